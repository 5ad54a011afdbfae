"""Which prompt tokens of a simulated request an earlier one has left in the cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.kv.prefix import PrefixIndex


@dataclass(eq=False)
class _Held:
    token_ids: list[int]
    tenant: str = ""
    keys: list[int] = field(default_factory=list)


class SimulatedCache:
    """Texts computed so far, found by the engine's own index of prefixes. Nothing is evicted."""

    def __init__(self, is_on: bool = True, fast_prompts: bool = False) -> None:
        """`is_on` is False where the engine does not reuse prefixes; `fast_prompts` is the engine's."""
        self._is_on = is_on
        self._fast_prompts = fast_prompts
        self._index: PrefixIndex[_Held] = PrefixIndex()

    def num_cached(self, prompt: Seq[int]) -> int:
        """Leading tokens that need not be computed; the last one always is."""
        if not self._is_on:
            return 0
        _, common = self._index.longest(self._entry_ids(prompt, len(prompt)), "")
        return min(common, len(prompt) - 1)

    def add(self, token_ids: Seq[int], num_prompt: int) -> None:
        """A text whose entries are in the cache from now on; its first `num_prompt` tokens are a prompt."""
        if self._is_on:
            self._index.extend(_Held(self._entry_ids(token_ids, num_prompt)))

    def _entry_ids(self, token_ids: Seq[int], num_prompt: int) -> list[int]:
        """As `Sequence.entry_ids`: an answer's entries are not those of the same text in a prompt."""
        fast = max(num_prompt - 1, 0) if self._fast_prompts else 0
        return [*(~token_id for token_id in token_ids[:fast]), *token_ids[fast:]]
