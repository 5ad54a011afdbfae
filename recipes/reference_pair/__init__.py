"""Make the reference pair: a tokenizer, a target model and a draft model from a folder of conversations."""
