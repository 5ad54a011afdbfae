"""Do two tokenizers mean the same by a token id?"""

from __future__ import annotations

from typing import Any

from slipstream.errors import VocabularyMismatchError


def check_same_vocabulary(target: Any, draft: Any, name: str) -> None:
    """Raise `VocabularyMismatchError`, naming the first difference, unless every id means the same in both.

    Which ids are used for padding, for unknown text, or to begin and end a text is not compared: prompts and stops are
    the target's, and a base model drafts for one that was tuned to end its answers with another token.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    advice = (
        "use method tli or slem, which draft across vocabularies, or a draft that was made for this target"
    )
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
