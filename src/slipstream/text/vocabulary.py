"""Checks that a draft's vocabulary is the target's."""

from __future__ import annotations

from typing import Any

from slipstream.errors import VocabularyMismatchError


def check_same_vocabulary(target: Any, draft: Any, name: str) -> None:
    """Raise `VocabularyMismatchError`, naming the first difference, unless every token has the same id in both.

    The roles of ids (padding, unknown, begin, end) are not compared: prompts and stops are the target's, so a base
    model may draft for a tuned one with another end token.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    advice = "use method tli or slem, which draft across vocabularies, or a draft of the target's vocabulary"
    if ours != theirs:
        token = min(
            (t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)),
            key=lambda t: (ours.get(t, theirs.get(t, 0)), t not in ours),
        )
        raise VocabularyMismatchError(
            f"draft {name!r} has another vocabulary ({len(theirs)} tokens, the target {len(ours)}): token {token!r} "
            f"is {_id(theirs.get(token))} there and {_id(ours.get(token))} in the target; {advice}"
        )


def _id(token_id: int | None) -> str:
    return "absent" if token_id is None else f"id {token_id}"
