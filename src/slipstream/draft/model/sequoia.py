"""The best fixed tree for a budget of nodes, from the acceptance rate of each rank.

Chen, May, Svirschevski, Huang, Ryabinin, Jia and Chen, "Sequoia: scalable and robust speculative decoding" (NeurIPS
2024): a dynamic programme over the nodes, the depth and the number of siblings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.config import check_at_least
from slipstream.errors import ConfigError


@dataclass(frozen=True)
class RankAcceptance:
    """Acceptance rates given that the parent was accepted, by depth and by rank among siblings."""

    rates: tuple[tuple[float, ...], ...]
    """Row i is for depth i + 1; the last row holds for every greater depth. No row sums to more than 1."""

    def __post_init__(self) -> None:
        if not self.rates or any(not row for row in self.rates):
            raise ConfigError("rank acceptance needs at least one depth, and one rank at each")
        for row in self.rates:
            if any(not 0 <= rate <= 1 for rate in row) or sum(row) > 1 + 1e-9:
                raise ConfigError(
                    f"rank acceptance: rates are in [0, 1] and siblings sum to at most 1, got {row}"
                )

    def at(self, depth: int) -> tuple[float, ...]:
        """The rates at `depth` below the text, best rank first."""
        return self.rates[min(depth, len(self.rates)) - 1]


@dataclass(frozen=True)
class TreePlan:
    """A fixed tree and its predicted acceptance length."""

    tree_choices: list[list[int]]
    """As `speculative_config` takes it."""
    acceptance_length: float
    """Predicted τ: tokens committed per target pass, the target's own included."""

    @property
    def num_nodes(self) -> int:
        return len(self.tree_choices)

    @property
    def depth(self) -> int:
        return max(map(len, self.tree_choices), default=0)


class _Programme:
    """Best trees by nodes, depth and first rank, each computed once."""

    def __init__(self, acceptance: RankAcceptance, num_nodes: int, max_depth: int) -> None:
        self.acceptance = acceptance
        self._best: dict[tuple[int, int, int], tuple[float, int]] = {}
        # From the deepest level up and from the last rank on, so that nothing recurses.
        for depth in range(max_depth, 0, -1):
            for rank in range(len(acceptance.at(depth)) - 1, -1, -1):
                for nodes in range(1, num_nodes + 1):
                    self._best[nodes, depth, rank] = self._compute(nodes, depth, rank)

    def value(self, nodes: int, depth: int, rank: int = 0) -> float:
        """Expected accepted tokens of at most `nodes` nodes at `depth` and below, for siblings from `rank` on, given
        that their parent was accepted."""
        return self._best.get((nodes, depth, rank), (0.0, 0))[0]

    def _compute(self, nodes: int, depth: int, rank: int) -> tuple[float, int]:
        """The value, and the number of nodes for sibling `rank` and its descendants; 0 ends the siblings."""
        rate = self.acceptance.at(depth)[rank]
        best, share = 0.0, 0
        for size in range(1, nodes + 1):
            value = rate * (1 + self.value(size - 1, depth + 1)) + self.value(nodes - size, depth, rank + 1)
            if value > best + 1e-12:
                best, share = value, size
        return best, share

    def choices(self, nodes: int, depth: int = 1, above: tuple[int, ...] = ()) -> list[list[int]]:
        """The nodes of the best tree."""
        found: list[list[int]] = []
        rank = 0
        while share := self._best.get((nodes, depth, rank), (0.0, 0))[1]:
            found.append([*above, rank])
            found += self.choices(share - 1, depth + 1, (*above, rank))
            nodes, rank = nodes - share, rank + 1
        return found


def best_tree(acceptance: RankAcceptance, num_nodes: int, max_depth: int) -> TreePlan:
    """The tree of at most `num_nodes` nodes and `max_depth` levels with the most expected accepted tokens.

    The work grows with `num_nodes` squared, `max_depth` and the ranks: 64 nodes, 12 levels and 8 ranks take a
    fraction of a second. Raises `ConfigError` for a budget below 1.
    """
    check_at_least("tree", 1, num_nodes=num_nodes, max_depth=max_depth)
    return _plan(_Programme(acceptance, num_nodes, max_depth), num_nodes)


def fastest_tree(
    acceptance: RankAcceptance,
    num_nodes: int,
    max_depth: int,
    level_s: float,
    step_s: Callable[[int], float],
) -> TreePlan:
    """As `best_tree`, with the size and depth at which the time per token is least.

    `level_s` is the drafter's time for one level of the tree, `step_s(rows)` the target's for a pass. The plan is empty
    where no tree gains speed.
    """
    check_at_least("tree", 1, num_nodes=num_nodes, max_depth=max_depth)
    best, least_s = TreePlan([], 1.0), step_s(1)
    for depth in range(1, max_depth + 1):
        programme = _Programme(acceptance, num_nodes, depth)
        for nodes in range(1, num_nodes + 1):
            length = 1 + programme.value(nodes, 1)
            token_s = (depth * level_s + step_s(1 + nodes)) / length
            if token_s < least_s * (1 - 1e-9):
                best, least_s = _plan(programme, nodes), token_s
    return best


def _plan(programme: _Programme, nodes: int) -> TreePlan:
    choices = sorted(programme.choices(nodes), key=lambda ranks: (len(ranks), ranks))
    return TreePlan(choices, 1 + programme.value(nodes, 1))


def comb(depth: int, width: int) -> list[list[int]]:
    """`tree_choices` with `width` siblings at every level below the best path; for measuring rank acceptance."""
    return [[*([0] * level), rank] for level in range(depth) for rank in range(width)]
