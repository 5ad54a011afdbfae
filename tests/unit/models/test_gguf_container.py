"""GGUF files: every type of block bit for bit, and files that are damaged, cut short, or of another kind."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.errors import ModelError
from slipstream.models.files.digest import digest_of_files, files_of
from slipstream.models.files.gguf import open_gguf
from slipstream.models.files.gguf_model import find_gguf
from tests.kit.gguf_files import QUANTISED, random_blocks, reference, write

pytest.importorskip("gguf", reason="the extra `export` is not installed")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with keys of every type and three tensors."""
    keys = {
        "llama.block_count": 2,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.tokens": ["a", "é", ""],
        "tokenizer.ggml.token_type": [1, -3, 1],
        "tokenizer.ggml.scores": [0.5, 1.0, 2.0],
    }
    tensors = {
        "norm": np.arange(32, dtype=np.float32),
        "matrix": ("Q4_K", random_blocks("Q4_K", 4, 256)),
        "half": np.ones((2, 8), dtype=np.float16),
    }
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf", "llama", keys, tensors)


@pytest.mark.parametrize("kind", QUANTISED)
def test_blocks_have_the_numbers_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    raw = random_blocks(kind, 5, 768, seed=3)
    if kind == "MXFP4":
        raw[0, : 4 * 17 : 17] = range(4)  # the smallest scales are no normal numbers
    tensor = open_gguf(str(write(tmp_path / "x.gguf", "llama", {}, {"w": (kind, raw)}))).tensors["w"]
    assert (tensor.shape, tensor.format.name) == ((5, 768), kind)
    grouped = tensor.format.read(tensor.raw)
    assert torch.equal(grouped.widened(), reference(kind, raw))
    assert grouped.group_size == (16 if kind in ("Q2_K", "Q3_K", "Q6_K") else 32)
    assert int(grouped.codes.max()) == 2**grouped.bits - 1
    numbers = grouped.codes if grouped.table is None else torch.tensor(grouped.table)[grouped.codes.int()]
    exact = grouped.scales.double()[..., None] * numbers.view(5, -1, grouped.group_size)
    assert torch.equal(exact.float().double(), exact)  # products do not round, so kernels may add in any form


def test_keys_and_plain_tensors_come_back(small: Path) -> None:
    file = open_gguf(str(small))
    assert file.architecture == "llama"
    assert file.fields["llama.block_count"] == 2
    assert file.fields["llama.rope.freq_base"] == 10000.0
    assert file.fields["tokenizer.ggml.add_bos_token"] is True
    assert file.fields["tokenizer.ggml.tokens"] == ["a", "é", ""]
    assert file.fields["tokenizer.ggml.token_type"] == [1, -3, 1]
    assert file.tensors["norm"].numbers().tolist() == list(range(32))
    assert file.tensors["half"].numbers().dtype == torch.float16
    assert file.tensors["half"].shape == (2, 8)


def refusal(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        open_gguf(str(file))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def patched(content: bytes, found: bytes, put: bytes) -> bytes:
    assert content.count(found) == 1
    return content.replace(found, put)


def test_files_that_are_none_or_are_cut_short_are_refused(small: Path, tmp_path: Path) -> None:
    content, file = small.read_bytes(), tmp_path / "x.gguf"
    assert "no GGUF file" in refusal(file, b"")
    assert "no GGUF file: it begins otherwise" in refusal(file, b"none of it")
    assert "its header ends in the middle" in refusal(file, content[:100])
    assert "its tensor half lies beyond its end" in refusal(file, content[:-1])
    assert "GGUF version 1" in refusal(file, content[:4] + struct.pack("<I", 1) + content[8:])
    assert "big-endian" in refusal(file, content[:4] + struct.pack(">I", 3) + content[8:])
    with pytest.raises(ModelError, match="there is no file"):
        open_gguf(str(tmp_path / "y.gguf"))


def test_damaged_headers_are_named_for_what_is_wrong(small: Path, tmp_path: Path) -> None:
    content, file = small.read_bytes(), tmp_path / "x.gguf"
    matrix = b"matrix" + struct.pack("<IQQI", 2, 256, 4, 12)
    for put, what in (
        (b"matrix" + struct.pack("<IQQI", 2, 256, 4, 18), "IQ3_XXS weights (matrix)"),
        (b"matrix" + struct.pack("<IQQI", 2, 256, 4, 99), "number 99 weights"),
        (b"matrix" + struct.pack("<IQQI", 2, 255, 4, 12), "rows of 255, in Q4_K blocks of 256"),
        (b"matrix" + struct.pack("<IQQI", 2, 256, 2**60, 12), "beyond its end"),
        (b"matrix" + struct.pack("<IQQI", 9, 256, 4, 12), "9 dimensions"),
        (b"matrix" + struct.pack("<IQQI", 2, 256, 0, 12), "matrix is empty"),
    ):
        assert what in refusal(file, patched(content, matrix, put))
    twice = patched(content, b"\4\0\0\0\0\0\0\0half", b"\4\0\0\0\0\0\0\0norm")
    assert "two tensors 'norm'" in refusal(file, twice)
    tokens = b"tokenizer.ggml.tokens" + struct.pack("<II", 9, 8)
    many = patched(content, tokens + struct.pack("<Q", 3), tokens + struct.pack("<Q", 2**62))
    assert f"a list of {2**62} values" in refusal(file, many)
    part = write(tmp_path / "part.gguf", "llama", {"split.count": 3, "split.no": 1}, {})
    assert "says that it is part 2 of 3, and its name says of none" in refusal(file, part.read_bytes())


def in_parts(folder: Path, *changed: dict[str, Any]) -> list[Path]:
    """A model in as many files, each with a tensor of its number."""
    files = []
    for number, changes in enumerate(changed):
        keys = {"split.no": number, "split.count": len(changed), "split.tensors.count": len(changed)}
        first = {"llama.block_count": 2} if number == 0 else {}
        tensors = {changes.pop("tensor", f"w{number}"): np.full(8, number, dtype=np.float32)}
        file = folder / f"x-{number + 1:05}-of-{len(changed):05}.gguf"
        files.append(write(file, "llama", first | keys | changes, tensors))
    return files


def test_a_model_in_parts_is_read_from_any_of_them_and_from_its_folder(tmp_path: Path) -> None:
    files = in_parts(tmp_path, {}, {}, {})
    assert find_gguf(str(tmp_path)) == str(files[0])
    for file in files:
        found = open_gguf(str(file))
        assert found.path == str(files[0])
        assert found.fields["llama.block_count"] == 2
        numbers = {name: float(each.numbers()[0]) for name, each in found.tensors.items()}
        assert numbers == {"w0": 0, "w1": 1, "w2": 2}
    assert files_of(files[1]) == files
    before = digest_of_files(str(files[0]))
    files[2].write_bytes(files[2].read_bytes()[:-4] + b"\0\0\0\1")
    assert digest_of_files(str(files[0])) != before, "a check that was passed counts for all parts"
    write(tmp_path / "y.gguf", "llama", {}, {})
    assert find_gguf(str(tmp_path)) is None, "which of the two it means is not known"


def test_parts_that_are_missing_or_not_one_model_are_refused(tmp_path: Path) -> None:
    files = in_parts(tmp_path, {}, {}, {})
    kept = files[1].read_bytes()
    files[1].unlink()
    for file in (files[0], files[2]):
        with pytest.raises(
            ModelError, match=r"there is no file '.*x-00002-of-00003.gguf': it is part 2 of the 3 of"
        ):
            open_gguf(str(file))
    assert find_gguf(str(tmp_path)) == str(files[0])
    files[1].write_bytes(kept)
    for changed, what in (
        (
            ({}, {"split.no": 0}),
            r"00002-of-00002.gguf' says that it is part 1 of 2, and by its name it is part 2 of 2",
        ),
        (({"split.count": 1}, {}), r"00001-of-00002.gguf' says that it is part 1 of 1"),
        (({}, {"tensor": "w0"}), "in parts of which two hold a tensor 'w0'"),
        (({"split.tensors.count": 3}, {}), "in parts that hold 2 tensors, and says 3"),
    ):
        with pytest.raises(ModelError, match=what):
            open_gguf(str(in_parts(tmp_path, *changed)[0]))


def header(keys: bytes = b"", tensors: bytes = b"", num_keys: int = 0, num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + keys + tensors


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def row(name: bytes, width: int, offset: int, kind: int = 0) -> bytes:
    """The place of a tensor of one row of float32."""
    return text(name) + struct.pack("<IQIQ", 1, width, kind, offset)


def test_hostile_headers_are_refused_in_a_short_line(tmp_path: Path) -> None:
    file, pad = tmp_path / "x.gguf", bytes(256)
    numbers = struct.pack("<IQ", 0, 2**22) + bytes(2**22)  # bytes become Python's numbers, eight bytes each
    for content, what in (
        (header(num_keys=2**62), "its header ends in the middle"),
        (header(num_tensors=2**62), "its header ends in the middle"),
        (header(key(b"a", 8, struct.pack("<Q", 2**63)), num_keys=1), f"a text of {2**63} bytes"),
        (header(key(b"a", 8, text(b"\xff")), num_keys=1), "a text that is not UTF-8"),
        (header(key(b"a", 13, b""), num_keys=1), "a value of type 13"),
        (header(key(b"a", 9, struct.pack("<IQIQ", 9, 1, 9, 1)), num_keys=1), "a list of values of type 9"),
        (header(key(b"a", 4, pad[:4]) * 2, num_keys=2), "two keys 'a'"),
        (header(key(b"a" * 129, 4, pad[:4]), num_keys=1), "a name of 129 characters, 'aaaa"),
        (header(key(b"a\n\x1b[2J", 4, pad[:4]), num_keys=1), r"'a\n\x1b[2J'"),
        (
            header(b"".join(key(bytes([65 + n]), 9, numbers) for n in range(3)), num_keys=3),
            f"of {2**22} values",
        ),
        (header(key(b"general.architecture", 8, text(b"a\nb")), num_keys=1), r"an architecture 'a\nb'"),
        (header(key(b"general.alignment", 4, struct.pack("<I", 0)), num_keys=1), "an alignment of 0"),
        (header(key(b"general.alignment", 4, struct.pack("<I", 24)), num_keys=1), "an alignment of 24"),
        (header(key(b"general.alignment", 8, text(b"x" * 99)), num_keys=1), "an alignment of 'xxxx"),
        (header(key(b"split.count", 8, text(b"x" * 99)), num_keys=1), "it is part 1 of 'xxxx"),
        (header(tensors=row(b"a", 8, 2**64 - 32), num_tensors=1) + pad, "lies beyond its end"),
        (header(tensors=row(b"a", 2**64 - 1, 0), num_tensors=1) + pad, "lies beyond its end"),
        (header(tensors=row(b"a", 8, 16), num_tensors=1) + pad, "begins at 16, between two places"),
        (header(tensors=row(b"a\nb", 8, 0), num_tensors=1) + pad, r"'a\nb'"),
        (header(tensors=row(b"a", 8, 0) + row(b"b", 8, 0), num_tensors=2) + pad, "tensors a and b overlap"),
        (header(tensors=row(b"b", 16, 32) + row(b"a", 9, 0), num_tensors=2) + pad, "tensors a and b overlap"),
    ):
        message = refusal(file, content)
        assert what in message
        assert len(message) < 250 + len(str(file))
    odd = header(key(b"general.alignment", 4, struct.pack("<I", 1)), row(b"a", 8, 0), 1, 1)
    assert len(odd) % 4
    assert "begins at 0, between two places" in refusal(file, odd + pad)


def test_tensors_side_by_side_in_any_order_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    content = header(tensors=row(b"b", 8, 32) + row(b"a", 8, 0), num_tensors=2)
    begin = -(-len(content) // 32) * 32
    numbers = np.arange(16, dtype=np.float32).tobytes()
    file.write_bytes(content.ljust(begin, b"\0") + numbers)
    assert open_gguf(str(file)).tensors["b"].numbers().tolist() == list(range(8, 16))


def damage(content: bytes, header: int, chance: random.Random) -> bytes:
    """Some bytes of the header changed, or the file cut, or a length set to an extreme."""
    changed = bytearray(content)
    way = chance.randrange(4)
    if way == 0:
        return bytes(changed[: chance.randrange(len(changed))])
    for _ in range(chance.choice([1, 1, 2, 8])):
        place = chance.randrange(4, header - 8)
        if way == 1:
            changed[place] = chance.randrange(256)
        elif way == 2:
            changed[place] ^= 1 << chance.randrange(8)
        else:
            extreme = chance.choice([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, len(content)])
            changed[place : place + 8] = struct.pack("<Q", extreme)
    return bytes(changed)


def read_or_refused(file: Path) -> tuple[str, int]:
    """Why a file is refused, or its largest tensor's bytes."""
    try:
        read = open_gguf(str(file))
    except ModelError as error:
        return str(error), 0
    return "", max((tensor.raw.numel() for tensor in read.tensors.values()), default=0)


def fuzz(small: Path, folder: Path, rounds: int) -> int:
    """How many damaged files are refused; none may crash, or have more read than it holds."""
    content, chance = small.read_bytes(), random.Random(19)
    header = content.index(b"half") + 40
    refused = 0
    tracemalloc.start()
    try:
        for _ in range(rounds):
            file = folder / "damaged.gguf"
            file.write_bytes(damage(content, header, chance))
            message, largest = read_or_refused(file)
            assert "\n" not in message
            assert largest <= len(content)
            refused += bool(message)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    return refused


def test_damaged_headers_neither_crash_nor_fill_the_memory(small: Path, tmp_path: Path) -> None:
    assert fuzz(small, tmp_path, 500) > 250


@pytest.mark.long
def test_many_more_damaged_headers(small: Path, tmp_path: Path) -> None:
    assert fuzz(small, tmp_path, 3_000) > 1_500
