"""Text and tokens: streams of text, prompts, tokens' bytes, vocabularies."""
