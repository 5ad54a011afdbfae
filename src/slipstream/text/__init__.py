"""Text and tokens: streaming detokenisation, prompts, the bytes of tokens, vocabularies."""
