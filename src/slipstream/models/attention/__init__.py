"""Attention backends over Slipstream's own cache.

A backend prepares once a pass and attends once a layer. `native` computes whole passes in the CPU kernels, `packed`
attends with PyTorch's operators, sequence by sequence, and `cache_adapter` serves the few families that read a cache
their keys instead of the attention interface. Layers of families that do neither are led to the interface
(`own_forward`), and those that count tokens by themselves are given positions (`counted`).
"""
