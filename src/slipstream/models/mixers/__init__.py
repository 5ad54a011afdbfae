"""Layers that are no attention over entries: recurrences, whose states `slipstream.kv.state` keeps.

The layers themselves are Transformers' modules, projections, gates and norms included. Only the functions of theirs
that carry a state from token to token are replaced, by ones that go a pass's walk over our states (`base`). A new one
is one file and one line in `registry`.

Attention over latents is here too (`latent`): its layers store entries, but not every head's keys and values.
"""
