"""Structured output: grammars that constrain an answer.

`compiler` compiles a `StructuredOutput` with llguidance, once, in the bytes that the target's tokens say. llguidance
ends its process where memory runs out, so each form is tried first in a process of its own (`trial`, `worker`), under
the same limits, with bounds on memory and time. One process serves all engines and is started again when it has died.

Outwardly a `Grammar` is a function of the text, so target and drafter share it and nothing is restored when a draft is
rejected. Inside it is a tree of matchers, each a copy of its parent's with one token more, that moves on with the text.
"""
