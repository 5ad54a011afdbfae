"""Past answers, indexed by tenant, bounded in memory, optionally saved to disk."""

from __future__ import annotations

import itertools
import json
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import IO, Any, NamedTuple

from slipstream.core.request import tenant_account
from slipstream.draft.lookup.suffix_index import SuffixIndex
from slipstream.errors import ConfigError

FORMAT = "slipstream-suffix-cache"
VERSION = 1


class PastAnswer(NamedTuple):
    """One past answer, preceded by the last `num_context` tokens of its prompt."""

    tenant: str
    token_ids: array[int]
    num_context: int


class SuffixCache:
    """Past answers, first in first out.

    Tenants share only the memory bound: each has an index of its own. When the bound is reached, the oldest answer of
    the account that holds the most is dropped, so a busy account pushes out its own.
    """

    def __init__(self, max_depth: int, max_occurrences: int, max_documents: int, max_tokens: int) -> None:
        self._max_depth = max_depth
        self._max_occurrences = max_occurrences
        self._max_documents = max_documents
        self._max_tokens = max_tokens
        self._documents: dict[int, PastAnswer] = {}
        """By number, oldest first."""
        self._numbers = itertools.count()
        self._held: dict[str, deque[int]] = {}
        """Numbers by account, oldest first."""
        self._held_tokens: Counter[str] = Counter()
        self._indexes: dict[str, SuffixIndex] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        """Answers held."""
        return len(self._documents)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def tenants(self) -> tuple[str, ...]:
        """Those with answers held."""
        return tuple(self._indexes)

    def answers(self) -> Iterator[PastAnswer]:
        """Those held, oldest first."""
        yield from self._documents.values()

    def index(self, tenant: str) -> SuffixIndex | None:
        """The index over this tenant's past answers; None when there are none."""
        return self._indexes.get(tenant)

    def add(self, tenant: str, token_ids: Seq[int], num_context: int) -> None:
        """Store an answer and drop the oldest ones beyond the bounds; ignores an answer longer than the token bound."""
        if len(token_ids) > self._max_tokens:
            return
        number, account = next(self._numbers), tenant_account(tenant)
        self._documents[number] = PastAnswer(tenant, array("i", token_ids), num_context)
        self._held.setdefault(account, deque()).append(number)
        self._held_tokens[account] += len(token_ids)
        self._num_tokens += len(token_ids)
        if tenant not in self._indexes:
            self._indexes[tenant] = SuffixIndex(self._max_depth, self._max_occurrences)
        self._indexes[tenant].begin_document()
        self._indexes[tenant].extend(token_ids, num_context)
        while len(self._documents) > self._max_documents or self._num_tokens > self._max_tokens:
            if len(self._documents) > self._max_documents:
                self._drop_oldest(max(self._held, key=lambda name: len(self._held[name])))
            else:
                self._drop_oldest(max(self._held, key=self._held_tokens.__getitem__))

    def clear(self) -> None:
        """Drop all answers."""
        self._documents.clear()
        self._held.clear()
        self._held_tokens.clear()
        self._indexes.clear()
        self._num_tokens = 0

    def _drop_oldest(self, account: str) -> None:
        document = self._documents.pop(self._held[account].popleft())
        self._num_tokens -= len(document.token_ids)
        self._held_tokens[account] -= len(document.token_ids)
        if not self._held[account]:
            del self._held[account], self._held_tokens[account]
        index = self._indexes[document.tenant]
        index.drop_oldest_document()
        if not index.num_documents:
            del self._indexes[document.tenant]

    def save(self, path: str | Path, vocab_size: int) -> None:
        """Write all answers, oldest first, as JSON lines below a header; the file is replaced atomically.

        It holds tenants' names and answers, so only its owner may read it.
        """
        partial = Path(f"{path}.partial")
        partial.touch(mode=0o600)
        with partial.open("w") as file:
            header = {"format": FORMAT, "version": VERSION, "vocab_size": vocab_size, "documents": len(self)}
            file.write(json.dumps(header) + "\n")
            for tenant, token_ids, num_context in self.answers():
                file.write(json.dumps([tenant, num_context, token_ids.tolist()]) + "\n")
        partial.replace(path)

    def load(self, path: str | Path, vocab_size: int) -> None:
        """Add the answers of a saved file. Raises `ConfigError`, and adds none, if any cannot be used."""
        for tenant, token_ids, num_context in _read(path, vocab_size):
            self.add(tenant, token_ids, num_context)

    def memory_bytes(self) -> int:
        """Bytes held by the answers and their indexes."""
        documents_bytes = 4 * self._num_tokens + _DOCUMENT_BYTES * len(self._documents)
        return documents_bytes + sum(index.memory_bytes() for index in self._indexes.values())

    def integrity(self) -> list[str]:
        """Violated invariants; empty when there are none. Walks everything, so it is for tests."""
        problems = [problem for index in self._indexes.values() for problem in index.integrity()]
        for tenant, index in self._indexes.items():
            own = [document for document in self._documents.values() if document.tenant == tenant]
            if index.num_documents != len(own) or len(index) != sum(1 + len(d.token_ids) for d in own):
                problems.append(f"tenant {tenant!r}: the index and the stored answers differ")
        for account, numbers in self._held.items():
            own = [d for d in self._documents.values() if tenant_account(d.tenant) == account]
            if own != [self._documents[number] for number in numbers]:
                problems.append(f"account {account!r}: the order and the stored answers differ")
            if self._held_tokens[account] != sum(len(document.token_ids) for document in own):
                problems.append(f"account {account!r}: the stored answers have another number of tokens")
        if self._num_tokens != sum(len(document.token_ids) for document in self._documents.values()):
            problems.append(
                f"{self._num_tokens} tokens are counted, but the stored answers have another number"
            )
        return problems


_DOCUMENT_BYTES = 320
"""A `PastAnswer`, its array's header, its token count, its number and where that is kept, as CPython lays them out."""


def check_cache_file(path: str | Path) -> None:
    """Raise `ConfigError` unless the first line of `path` is the header of a saved cache."""
    with _open(path) as file:
        _header(file, path)


def _open(path: str | Path) -> IO[str]:
    try:
        return Path(path).open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"suffix cache file {str(path)!r} cannot be read: {error.strerror}") from None


def _header(file: IO[str], path: str | Path) -> dict[str, Any]:
    try:
        header = json.loads(file.readline())
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ConfigError(f"{str(path)!r} is not a suffix cache file; make one with SuffixDrafter.save")
    if header.get("version") != VERSION:
        raise ConfigError(
            f"suffix cache file {str(path)!r} has version {header.get('version')!r}; "
            f"this Slipstream reads version {VERSION}"
        )
    return header


def _read(path: str | Path, vocab_size: int) -> list[PastAnswer]:
    with _open(path) as file:
        header = _header(file, path)
        if header.get("vocab_size") != vocab_size:
            raise ConfigError(
                f"suffix cache file {str(path)!r} is for a vocabulary of {header.get('vocab_size')!r}; "
                f"the target has {vocab_size} tokens"
            )
        documents: list[PastAnswer] = []
        try:
            for line in file:
                documents.append(_document(line, vocab_size))
        except (ValueError, TypeError, OverflowError, RecursionError):
            number = len(documents) + 2
            raise ConfigError(f"suffix cache file {str(path)!r} is damaged in line {number}") from None
    if len(documents) != header.get("documents"):
        raise ConfigError(f"suffix cache file {str(path)!r} is cut off after {len(documents)} answers")
    return documents


def _document(line: str, vocab_size: int) -> PastAnswer:
    """One parsed line; raises ValueError, TypeError, OverflowError or RecursionError for a damaged one."""
    tenant, num_context, token_ids = json.loads(line)
    document = PastAnswer(tenant, array("i", token_ids), num_context)
    in_vocabulary = all(0 <= token < vocab_size for token in document.token_ids)
    if not (isinstance(tenant, str) and type(num_context) is int and num_context >= 0 and in_vocabulary):
        raise ValueError(line)
    return document
