"""How an engine and a draft worker come to trust each other: versions, a shared key, the vocabulary."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Any

from slipstream.draft.remote.protocol import PROTOCOL_VERSION, Message, printable
from slipstream.errors import ConfigError, RemoteError

KEY_VARIABLE = "SLIPSTREAM_WORKER_KEY"
MIN_KEY_LENGTH = 16
NONCE_BYTES = 16


class RefusedError(RemoteError):
    """A worker, or an engine, that must not be used; trying again soon is of no use."""


def read_key(key_file: str | None) -> bytes:
    """The shared key: the contents of `key_file`, else of the environment variable; empty where neither is there.

    Raises `ConfigError` for a file that cannot be read and for a key that is too short.
    """
    if key_file is None:
        text, source = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
        if not text:
            return b""
    else:
        source = f"key file {key_file!r}"
        try:
            text = Path(key_file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read: {error}") from None
    key = text.strip().encode()
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"{source} must hold a key of at least {MIN_KEY_LENGTH} characters, has {len(key)}; "
            f"make one with: openssl rand -hex 32"
        )
    return key


def fingerprint(tokenizer: Any) -> bytes:
    """A hash of every token and its id: equal for equal vocabularies. 32 bytes."""
    found = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        found.update(f"{token_id}\0{token}\0".encode("utf-8", "surrogatepass"))
    return found.digest()


def new_nonce() -> bytes:
    """Random bytes that are used once."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(key: bytes, who: str, hello_nonce: bytes, challenge_nonce: bytes) -> bytes:
    """Return a proof that `who`, `engine` or `worker`, knows the key; the key itself does not travel."""
    return hmac.new(key, b"\0".join((who.encode(), hello_nonce, challenge_nonce)), hashlib.sha256).digest()


def proves(mac: bytes, key: bytes, who: str, hello_nonce: bytes, challenge_nonce: bytes) -> bool:
    """Whether `mac` is that proof; compared in constant time."""
    return hmac.compare_digest(mac, proof(key, who, hello_nonce, challenge_nonce))


def check_version(theirs: int, who: str) -> None:
    """Raise `RefusedError` unless the other side speaks this version; `who` names it."""
    if theirs != PROTOCOL_VERSION:
        raise RefusedError(
            f"{who} speaks version {theirs} of the draft protocol, this side {PROTOCOL_VERSION}; "
            f"run the same Slipstream on both"
        )


def check_worker(welcome: Message, vocabulary: bytes, vocab_size: int, kinds: frozenset[str]) -> None:
    """Raise `RefusedError` where the worker of this welcome drafts other tokens, or in a way that no verifier can
    judge.

    `kinds` are the kinds of proposals that the engine's verifier can judge.
    """
    if welcome["vocabulary"] != vocabulary:
        raise RefusedError(
            f"the worker's drafter {welcome['drafter']!r} drafts for a target of another vocabulary "
            f"({welcome['vocab_size']:,} tokens, this target {vocab_size:,}); start it with this target's model"
        )
    if welcome["kind"] not in kinds:
        raise RefusedError(
            f"the worker makes {printable(welcome['kind'])} drafts, which this engine's verifier cannot judge "
            f"(it judges {' or '.join(sorted(kinds)) or 'neither kind that can be sent'}); start the worker with "
            f"draft_sample_method greedy, or use verifier 'coupled'"
        )
