"""The draft protocol: frames, bounds, addresses, keys."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import SpeculativeConfig
from slipstream.draft.registry import validate
from slipstream.draft.remote.address import Address
from slipstream.draft.remote.handshake import (
    KEY_VARIABLE,
    RefusedError,
    check_version,
    fingerprint,
    proof,
    proves,
    read_key,
)
from slipstream.draft.remote.protocol import (
    _FIELDS,
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    PROTOCOL_VERSION,
    PrefixHash,
    checked,
    encode,
    printable,
)
from slipstream.draft.remote.sampling import sampling_message, sampling_of
from slipstream.draft.remote.worker import _party
from slipstream.errors import ConfigError, ProtocolError
from slipstream.rpc.frames import Frames
from slipstream.sampling.params import SamplingParams
from slipstream.verify.registry import VERIFIERS

TAIL = {
    "type": "tail",
    "request": 7,
    "length": 3,
    "hash": b"12345678",
    "tokens": [1, 2],
    "number": 4,
    "draft_s": 0.5,
}


def test_messages_survive_any_cut_of_the_stream() -> None:
    messages = [TAIL, {"type": "release", "request": 7, "finished": True}, {**TAIL, "number": 5}]
    stream = b"".join(map(encode, messages))
    rng = random.Random(0)
    for _ in range(20):
        frames, found, at = Frames(MAX_GREETING_BYTES), [], 0
        while at < len(stream):
            end = at + rng.randint(1, 40)
            found += map(checked, frames.add(stream[at:end]))
            at = end
        assert found == messages


def fault_of(read: Callable[[bytes], object], body: bytes) -> str | None:
    """What a reader says is wrong with it; None where nothing is."""
    try:
        read(body)
    except ProtocolError as error:
        return str(error)
    return None


@given(st.binary(max_size=200))
def test_nothing_but_a_protocol_error_comes_of_garbage(data: bytes) -> None:
    for body in (data, msgspec.msgpack.encode({"type": "tail", "tokens": data})):
        assert fault_of(lambda body: list(map(checked, Frames(MAX_GREETING_BYTES).add(body))), body) != ""
        assert fault_of(checked, body), "never a whole message"


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": ["a"]},
        {"tokens": [-1]},
        {"tokens": [True]},
        {"tokens": 3},
        {"length": "3"},
        {"length": True},
        {"hash": "12345678"},
        {"type": "tale"},
        {"type": ["tail"]},
    ],
)
def test_a_message_with_a_value_of_another_type_is_refused(change: dict[str, object]) -> None:
    assert checked(msgspec.msgpack.encode(TAIL)) == TAIL
    assert checked(msgspec.msgpack.encode({**TAIL, "later": 1})) == TAIL  # a later version may say more
    with pytest.raises(ProtocolError):
        checked(msgspec.msgpack.encode({**TAIL, **change}))


LARGE: list[object] = ["x" * 2**20, b"x" * 2**20, [["x" * 2**20]], {"x" * 2**20: 1}, 2**60]


@pytest.mark.parametrize("name", sorted(_FIELDS))
def test_no_error_repeats_what_the_other_side_sent(name: str) -> None:
    """Errors are logged: a peer decides neither how long a line is nor what is in it."""
    refused = 0
    for field in ("type", "later", *_FIELDS[name]):
        for value in LARGE:
            message = {"type": name, **dict.fromkeys(_FIELDS[name], 1), field: value}
            error = fault_of(checked, msgspec.msgpack.encode(message)) or ""
            refused += bool(error)
            assert len(error) < 300, field
            assert "xxxx" not in error, field
    assert refused >= 4


def test_lengths_come_before_contents() -> None:
    """A list of tokens that is too long is not read: what is in it would be refused."""
    for length in (3, 40, 2**17):  # each is written in a form of its own
        body = msgspec.msgpack.encode({**TAIL, "tokens": ["not a token"] * length})
        assert checked(body, max_tokens=length - 1)["tokens"] is None
        with pytest.raises(ProtocolError, match="tokens cannot be read"):
            checked(body, max_tokens=length)
    assert checked(msgspec.msgpack.encode(TAIL), max_tokens=2) == TAIL


def test_what_a_worker_says_is_clipped_and_stays_on_one_line() -> None:
    assert printable("no\n\x1b[2J" + "x" * 1000) == "no\\n\\x1b[2J" + "x" * 293


def test_who_shares_places_with_whom() -> None:
    """Engines of another machine, or connections of one process; by themselves those of this machine's ports."""

    class Writer:
        def __init__(self, family: int, *peer: object) -> None:
            self.info = {"socket": SimpleNamespace(family=family), "peername": peer}

        def get_extra_info(self, name: str) -> object:
            return self.info[name]

    assert _party(Writer(socket.AF_INET, "10.0.0.7", 50_000)) == "10.0.0.7"  # type: ignore[arg-type]
    assert _party(Writer(socket.AF_INET, "127.0.0.1", 50_000)) == ""  # type: ignore[arg-type]
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        writer = Writer(socket.AF_UNIX)
        writer.info["socket"] = one
        assert _party(writer) == f"process {os.getpid()}"  # type: ignore[arg-type]


def test_frames_are_bounded_before_they_are_read() -> None:
    with pytest.raises(ProtocolError, match="longer than 4,096"):
        list(Frames(MAX_GREETING_BYTES).add(struct.pack(">I", 5000)))
    with pytest.raises(ProtocolError, match=r"the open message has .* bytes; 16,777,216 are possible"):
        encode({"type": "open", "tokens": b"x" * (MAX_FRAME_BYTES + 1)})


def test_a_prefix_hash_depends_on_every_token_and_its_place() -> None:
    known = PrefixHash()
    known.extend([1, 2])
    assert known.digest([3]) == _digest([1, 2, 3])
    known.extend([3])
    assert (known.digest(), known.length) == (_digest([1, 2, 3]), 3)
    assert len({_digest(text) for text in ([1, 2, 3], [1, 3, 2], [1, 2], [258, 3], [1, 2, 3, 0])}) == 5


def _digest(token_ids: list[int]) -> bytes:
    known = PrefixHash()
    known.extend(token_ids)
    return known.digest()


@pytest.mark.parametrize(
    ("text", "shown", "local"),
    [
        ("127.0.0.1:7070", "127.0.0.1:7070", True),
        ("tcp://localhost:1", "localhost:1", True),
        ("[::1]:7070", "[::1]:7070", True),
        ("10.0.0.3:7070", "10.0.0.3:7070", False),
        ("0.0.0.0:7070", "0.0.0.0:7070", False),
        ("gpu-box:7070", "gpu-box:7070", False),
        ("unix:/run/draft.sock", "unix:/run/draft.sock", True),
    ],
)
def test_addresses(text: str, shown: str, local: bool) -> None:
    address = Address.parse(text)
    assert (str(address), address.is_local) == (shown, local)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": "7070"}, "must be HOST:PORT or unix:PATH"),
        ({"workers": "host:99999"}, "must be HOST:PORT or unix:PATH"),
        ({"workers": "unix:"}, "needs a path"),
        ({"workers": []}, "an address or a list of them"),
        ({"workers": [7070]}, "must be addresses such as"),
        ({"worker": "h:1"}, "did you mean 'workers'"),
        ({"num_speculative_tokens": 0}, "at least 1"),
        ({"num_speculative_tokens": 99}, "at most 31"),
        ({"max_wait_ms": -1}, "from 0 to 60,000"),
        ({"wait_tokens": 0}, "at least 1"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(SpeculativeConfig("remote", options=options))


def test_the_short_form_names_the_worker() -> None:
    _, options = validate(SpeculativeConfig.from_short("remote:gpu-box:7070"))
    assert [str(address) for address in options.addresses()] == ["gpu-box:7070"]


def test_a_verifier_that_judges_neither_kind_is_refused_by_name() -> None:
    traits = VERIFIERS.load("rejection").traits()
    validate(SpeculativeConfig("remote", "rejection"), traits)
    none = type(traits)("sampled_only", frozenset(traits.kinds) - {"one_hot"}, True, False)
    with pytest.raises(ConfigError, match=r"verifier 'sampled_only' cannot judge coupled or one_hot"):
        validate(SpeculativeConfig("remote"), none)


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_key(None) == b""
    monkeypatch.setenv(KEY_VARIABLE, "of the environment")
    assert read_key(None) == b"of the environment"
    file = tmp_path / "key"
    file.write_text("of the file, longer\n")
    assert read_key(str(file)) == b"of the file, longer"
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="at least 16 characters, has 5"):
        read_key(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(str(tmp_path / "none"))


def test_a_proof_is_of_one_key_one_side_and_one_greeting() -> None:
    mac = proof(b"key", "engine", b"a", b"b")
    assert proves(mac, b"key", "engine", b"a", b"b")
    for other in (
        (b"kex", "engine", b"a", b"b"),
        (b"key", "worker", b"a", b"b"),
        (b"key", "engine", b"a", b"c"),
    ):
        assert not proves(mac, *other)


def test_versions_and_vocabularies() -> None:
    check_version(PROTOCOL_VERSION, "the worker")
    with pytest.raises(RefusedError, match=r"the worker speaks version 9 of the draft protocol, this side 1"):
        check_version(9, "the worker")

    class Tokens:
        def __init__(self, vocabulary: dict[str, int]) -> None:
            self.vocabulary = vocabulary

        def get_vocab(self) -> dict[str, int]:
            return self.vocabulary

    same = fingerprint(Tokens({"a": 0, "b": 1}))
    assert same == fingerprint(Tokens({"b": 1, "a": 0}))
    assert len({same, fingerprint(Tokens({"a": 1, "b": 0})), fingerprint(Tokens({"a": 0}))}) == 3


def test_sampling_parameters_travel_without_texts() -> None:
    params = SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        logit_bias={3: 1.5},
        stop=["secret"],
    )
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(sampling_message(params)))
    assert "secret" not in repr(message)
    found = sampling_of(message, 4)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias"):
        assert getattr(found, name) == getattr(params, name), name
    with pytest.raises(ProtocolError, match="cannot be used"):
        sampling_of({**message, "temperature": "hot"}, 4)
    for change in ({"allowed": [4]}, {"logit_bias": {4: 1.0}}, {"allowed": [-1]}):
        with pytest.raises(ProtocolError, match="cannot be used"):
            sampling_of({**message, **change}, 4)
