"""Messages between processes: values come as they were sent, and what is no message is said in one line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slipstream.errors import ProtocolError
from slipstream.rpc.codec import Codec, WireMessage


class Opened(WireMessage, tag="opened"):
    """A message of this test's protocol."""

    folder: Path
    size: int


CODEC: Codec[Opened] = Codec(Opened, 2**10)


def test_a_path_comes_as_a_path() -> None:
    sent = Opened(Path("/models/a"), 3)
    assert CODEC.read(CODEC.frame(sent)[4:]) == sent


@pytest.mark.parametrize(
    "fields", [["opened", 7, 3], ["opened", None, 3], ["opened", "/a", "x"], ["closed", "/a", 3]]
)
def test_fields_of_another_type_are_refused_in_one_line(fields: list[object]) -> None:
    with pytest.raises(ProtocolError, match=r"^a message of the other process cannot be read: [^\n]+$"):
        CODEC.read(msgspec.msgpack.encode(fields))
