"""Text and tokens: streaming detokenisation, prompts, the bytes of tokens, vocabularies.

`stream.TextStream` shows text once and never takes it back. It begins with the last few tokens of the prompt as
context, because a decoder treats the first token of a text differently (a leading space would be lost). A character
whose bytes are spread over several tokens appears with its last one; bytes that no character begins with, which a
sampler may draw, become replacement characters, and the decoder starts anew behind them. The beginning of a stop string
is held back until it is known not to be one. Each piece says whether a draft token or the target's own yielded it.
"""
