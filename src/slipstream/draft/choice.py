"""Which drafter is asked for a sequence in a step, and for how much."""

from __future__ import annotations

from typing import NamedTuple

NOBODY = -1
"""In place of a drafter's number."""


class Choice(NamedTuple):
    """What is drafted for one sequence; drafters go by their number in `draft.drafters.Drafters`."""

    drafter: int = NOBODY
    """Who drafts, or `NOBODY`."""
    depth: int = 0
    """Levels of a chain, the most nodes of anything else."""
    lookup: int = NOBODY
    """Who is asked before that, or `NOBODY`."""
    min_tokens: int = 0
    """A proposal of the lookup with at least so many tokens makes asking the drafter needless."""

    @property
    def drafts(self) -> bool:
        """False where no drafter is called."""
        return self.drafter != NOBODY or self.lookup != NOBODY


NOTHING = Choice()
"""No drafts."""
