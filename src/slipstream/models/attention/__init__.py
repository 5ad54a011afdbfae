"""Attention backends over Slipstream's own cache.

A backend prepares once a pass and attends once a layer. `native` computes whole passes in the CPU kernels, `packed`
attends with PyTorch's operators, sequence by sequence, and `cache_adapter` serves the few families that read a cache
their keys instead of the attention interface.
"""
