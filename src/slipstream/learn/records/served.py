"""What is kept of a served answer: its tokens, and the target's distribution at every row that was checked."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CorruptRecordError

Ints = NDArray[np.int32]
Halves = NDArray[np.float16]
Floats = NDArray[np.float32]

TAPS = "taps"
"""Name of the feature that heads read: the target's hidden states, one behind another."""
JUDGE_SHARE = 0.2
"""Share of the requests whose records are held out: no learner sees them, versions are scored on them."""

_HEAD = struct.Struct("<I")


class Purpose(StrEnum):
    """What a record is for. It follows from the request's id, so all answers of a request have the same one."""

    TRAIN = "train"
    JUDGE = "judge"


def share_of(*names: str) -> float:
    """A number in [0, 1) that depends on `names` alone, spread evenly: what decides by request."""
    digest = hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def purpose_of(request_id: str, judge_share: float = JUDGE_SHARE) -> Purpose:
    """What the records of a request are for."""
    return Purpose.JUDGE if share_of("purpose", request_id) < judge_share else Purpose.TRAIN


def tenant_key(tenant: str) -> str:
    """What replaces a tenant where its name must not be kept: in versions, events and the list of the forgotten."""
    return hashlib.sha256(b"tenant\0" + tenant.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def tenant_keys(tenant: str) -> tuple[str, ...]:
    """`tenant_key` of a tenant and of the accounts above it: of `account/user` two."""
    parts = tenant.split("/")
    return tuple(tenant_key("/".join(parts[:end])) for end in range(len(parts), 0, -1))


def _empty(dtype: Any, *shape: int) -> Any:
    return np.zeros(shape, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedRows:
    """The target's raw distribution (no temperature, no masks) at R rows, of each the k most probable tokens.

    A row follows `prompt + answer[:positions[r]] + path(r)`. Rows with an empty path are on the answer's own text, one
    for each of its tokens: what was drawn there is `answer[positions[r]]`. The others lie in branches that the target
    rejected.
    """

    positions: Ints = field(default_factory=lambda: _empty(np.int32, 0))
    """[R]: tokens of the answer before the branch."""
    depths: Ints = field(default_factory=lambda: _empty(np.int32, 0))
    """[R]: draft tokens between the text as it was in that step and the row: 0 for a step's first row. A row on the
    answer's own text with depth d > 0 was reached by d accepted draft tokens."""
    path_ids: Ints = field(default_factory=lambda: _empty(np.int32, 0))
    """[sum of lengths]: the paths' token ids, one after another."""
    path_ends: Ints = field(default_factory=lambda: _empty(np.int32, 0))
    """[R]: where each row's path ends in `path_ids`; it begins where the one before ends."""
    top_ids: Ints = field(default_factory=lambda: _empty(np.int32, 0, 0))
    """[R, k], the most probable first."""
    top_log_probs: Halves = field(default_factory=lambda: _empty(np.float16, 0, 0))
    """[R, k]: natural logarithms of their probabilities. Half precision is finest near 0, where it matters."""
    logsumexps: Floats = field(default_factory=lambda: _empty(np.float32, 0))
    """[R]: of all raw logits of the row."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def width(self) -> int:
        """k: how many tokens are kept of a row."""
        return int(self.top_ids.shape[1])

    def path(self, row: int) -> list[int]:
        """The draft tokens between the answer's own text and the row; empty on the answer itself."""
        begin = int(self.path_ends[row - 1]) if row else 0
        return [int(one) for one in self.path_ids[begin : self.path_ends[row]]]

    def path_lengths(self) -> Ints:
        """[R]; 0 for rows on the answer's own text."""
        return np.diff(self.path_ends, prepend=np.int32(0)).astype(np.int32)

    def tail(self) -> Floats:
        """[R]: the probability of all tokens that are not kept, at least 0."""
        kept = np.exp(self.top_log_probs.astype(np.float32)).sum(axis=1)
        rest: Floats = np.maximum(np.float32(0), np.float32(1) - kept)
        return rest

    def check(self) -> None:
        """Raise `CorruptRecordError` where the arrays do not belong together."""
        rows, k = len(self.positions), self.top_ids.shape[-1]
        right = (
            self.depths.shape == self.path_ends.shape == self.logsumexps.shape == (rows,)
            and self.top_ids.shape == self.top_log_probs.shape == (rows, k)
            and (rows == 0 or int(self.path_ends[-1]) == len(self.path_ids))
            and bool((self.path_lengths() >= 0).all())
        )
        if not right:
            raise CorruptRecordError("the arrays of a record's rows do not belong together")


@dataclass(frozen=True, slots=True, eq=False)
class ServedRecord:
    """One served answer that ended well, and what the target thought on the way."""

    request_id: str
    model_hash: str
    template_hash: str
    prompt_ids: Ints
    token_ids: Ints
    """The answer's."""
    rows: CheckedRows = field(default_factory=CheckedRows)
    index: int = 0
    """Which answer of its request."""
    tenant: str = ""
    task: str = ""
    draft_version: str = ""
    """The version that drafted; empty for the base drafter."""
    method: str = ""
    """The drafter's name, as in `StepItem.method`, at the answer's last step."""
    finish_reason: str = "stop"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    """With `nonce`, the random numbers of the answer: what a coupled draft would have drawn follows from them."""
    nonce: int = 0
    num_steps: int = 0
    """Passes of the target that decoded the answer."""
    num_draft_tokens: int = 0
    num_accepted: int = 0
    created_s: float = 0.0
    """When the answer began, seconds since 1970."""
    purpose: Purpose = Purpose.TRAIN
    features: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """What heads read besides tokens, by name; first axis: the tokens of prompt and answer but the last. Empty for
    drafters that need none."""
    number: int = -1
    """Its place in the ring, which counts on for ever; -1 for one that is not there."""

    @property
    def text_ids(self) -> Ints:
        """Prompt and answer."""
        return np.concatenate([self.prompt_ids, self.token_ids])

    def training_row(self) -> dict[str, Any]:
        """The record as `slipstream train` reads it: `token_ids`, `answer_spans` and where it came from."""
        prompt = len(self.prompt_ids)
        return {
            "task": self.task,
            "source": "served",
            "line": self.number,
            "purpose": str(self.purpose),
            "token_ids": self.text_ids.tolist(),
            "answer_spans": [[prompt, prompt + len(self.token_ids)]],
            "finish_reason": self.finish_reason,
            "temperature": self.temperature,
            "seed": self.seed,
            "draft_version": self.draft_version,
        }

    def encoded(self) -> bytes:
        """The record as bytes: a JSON head, then the arrays one after another, in little-endian order."""
        arrays = {"prompt_ids": self.prompt_ids, "token_ids": self.token_ids}
        arrays |= {f"rows.{one.name}": getattr(self.rows, one.name) for one in fields(CheckedRows)}
        arrays |= {f"features.{name}": values for name, values in self.features.items()}
        head: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        head["arrays"] = [[name, _little(one).dtype.str, one.shape] for name, one in arrays.items()]
        text = json.dumps(head, separators=(",", ":")).encode("ascii")
        return b"".join([_HEAD.pack(len(text)), text, *(_little(one).tobytes() for one in arrays.values())])

    @classmethod
    def decoded(cls, data: bytes, number: int = -1) -> ServedRecord:
        """The record of `encoded` bytes; raises `CorruptRecordError` where they are none. Its arrays are read-only."""
        try:
            [length] = _HEAD.unpack_from(data)
            head = json.loads(data[_HEAD.size : _HEAD.size + length])
            at = _HEAD.size + length
            arrays: dict[str, NDArray[Any]] = {}
            for name, dtype, shape in head.pop("arrays"):
                count = int(np.prod(shape, dtype=np.int64))
                arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
                at += arrays[name].nbytes
            if at != len(data):
                raise CorruptRecordError("a record has bytes behind its arrays")
            head["purpose"] = Purpose(head["purpose"])
            record = cls(
                prompt_ids=arrays.pop("prompt_ids"),
                token_ids=arrays.pop("token_ids"),
                rows=CheckedRows(**{one.name: arrays.pop(f"rows.{one.name}") for one in fields(CheckedRows)}),
                features={name.removeprefix("features."): values for name, values in arrays.items()},
                number=number,
                **head,
            )
        except (ValueError, KeyError, TypeError, struct.error, UnicodeDecodeError) as error:
            raise CorruptRecordError(f"a record cannot be read: {error}") from None
        record.rows.check()
        return record


_PLAIN = [
    one.name
    for one in fields(ServedRecord)
    if one.name not in ("prompt_ids", "token_ids", "rows", "features", "number")
]


def _little(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
