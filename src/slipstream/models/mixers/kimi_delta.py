"""Kimi delta attention: the gated delta rule with a decay for each dimension of a key (arXiv:2510.26692)."""

from __future__ import annotations

from slipstream.models.mixers.gated_delta import GatedDelta


class KimiDelta(GatedDelta):
    """The same arguments, `g` [1, N, heads, key_dim]."""
