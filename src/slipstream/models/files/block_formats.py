"""The types of GGUF tensors: plain numbers, and blocks of quantised ones.

A block holds 32 or 256 weights of one output: small integers in nibbles and single bits, or places in a table, and
numbers of 16 bits or fewer that scale groups of them. The layouts are those of ggml. Every integer, scale and minimum
is read exactly: a K-quant's scale is a 16-bit number times one of 4 to 8 bits, which float32 holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.models.files.grouped import Grouped
from slipstream.models.linear.code_tables import FP4, IQ4, CodeTable, halves_of_e8m0
from slipstream.models.linear.grouped import BlockedWeight


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A type of tensor in a GGUF file."""

    name: str
    """As llama.cpp names it: 'Q4_K'."""
    block_size: int
    """Weights of a block; 1 for plain numbers."""
    block_bytes: int
    dtype: torch.dtype | None = None
    """Type of plain numbers; None for quantised ones."""
    unpack: Callable[[Tensor], Grouped] | None = None
    """uint8 [out, blocks, block_bytes] -> the outputs; None for plain numbers."""
    bits: int = 0
    """Bits of the codes of a quantised one."""
    group_size: int = 32
    """Number of weights that share a scale."""
    is_symmetric: bool = False
    """See `GroupedMatrix`."""
    unpack_blocks: Callable[[Tensor], BlockedWeight] | None = None
    """As `unpack`, with the integers that scale the groups; None for types whose groups have no such."""
    table: CodeTable | None = None
    """The numbers that codes stand for; None where they are numbers themselves."""

    def num_bytes(self, num_weights: int) -> int:
        """Bytes of so many weights, a multiple of `block_size`."""
        return num_weights // self.block_size * self.block_bytes

    def read(self, raw: Tensor) -> Grouped:
        """uint8 [out, bytes of an output], whole blocks -> the outputs."""
        assert self.unpack is not None
        return self.unpack(raw.view(len(raw), -1, self.block_bytes))

    def read_blocks(self, raw: Tensor) -> BlockedWeight | None:
        """As `read`, in the blocks of the file; None for a type that our kernels hold as single groups."""
        if self.unpack_blocks is None:
            return None
        return self.unpack_blocks(raw.view(len(raw), -1, self.block_bytes))


def _half(bytes_: Tensor) -> Tensor:
    """uint8 [..., 2 n] -> float32 [..., n] of float16."""
    return bytes_.contiguous().view(torch.float16).float()


def _nibbles(bytes_: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 2 n]: the low halves, then the high ones."""
    count = bytes_.shape[-1]
    halves = bytes_.new_empty(
        *bytes_.shape[:-1], 2 * count
    )  # written in place: concatenating would copy both
    torch.bitwise_and(bytes_, 15, out=halves[..., :count])
    torch.bitwise_right_shift(bytes_, 4, out=halves[..., count:])
    return halves


def _bits(bytes_: Tensor, width: int) -> Tensor:
    """uint8 [..., n] -> [..., 8 / width, n]: `width` bits of every byte, the lowest first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    fields: Tensor = bytes_[..., None, :] >> shifts[:, None] & (2**width - 1)
    return fields


def _parts(bytes_: Tensor, length: int) -> Tensor:
    """[..., n] -> [..., n / length, length]"""
    return bytes_.reshape(*bytes_.shape[:-1], -1, length)


def _fifth_bits(bytes_: Tensor) -> Tensor:
    """uint8 [..., 4] -> [..., 32] of 0 and 16: bit after bit."""
    return _bits(bytes_, 1).transpose(-1, -2).flatten(-2) << 4


def _grouped(codes: Tensor, scales: Tensor, minimums: Tensor, bits: int) -> Grouped:
    """Return the groups of blocks: codes [out, blocks, ...], scales and minimums [out, blocks, ...]."""
    return Grouped(codes.flatten(1), scales.flatten(1), minimums.flatten(1), bits)


def _q4_0(blocks: Tensor) -> Grouped:
    scales = _half(blocks[..., :2])
    return _grouped(_nibbles(blocks[..., 2:]), scales, -8 * scales, 4)


def _q4_1(blocks: Tensor) -> Grouped:
    return _grouped(_nibbles(blocks[..., 4:]), _half(blocks[..., :2]), _half(blocks[..., 2:4]), 4)


def _q5_0(blocks: Tensor) -> Grouped:
    scales = _half(blocks[..., :2])
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _grouped(codes, scales, -16 * scales, 5)


def _q5_1(blocks: Tensor) -> Grouped:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _grouped(codes, _half(blocks[..., :2]), _half(blocks[..., 2:4]), 5)


def _q8_0(blocks: Tensor) -> Grouped:
    scales = _half(blocks[..., :2])
    return _grouped(blocks[..., 2:] ^ 128, scales, -128 * scales, 8)  # two's complement, from 0 on


def _k_integers(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [out, blocks, 8], of 6 bits: what scales and minimums of Q4_K and Q5_K are times their blocks' halves.

    The first four of each are the low bits of a byte; the others a nibble, with the byte's two high bits above it.
    """
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    minimums = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    return scales, minimums


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums [out, blocks, 8] of Q4_K and Q5_K."""
    scales, minimums = _k_integers(blocks)
    return _half(blocks[..., :2]) * scales, -(_half(blocks[..., 2:4]) * minimums)


def _k_nibbles(bytes_: Tensor) -> Tensor:
    """uint8 [..., 128] -> [..., 8, 32]: each 32 bytes hold a group in the low halves, the next one in the high ones."""
    return _bits(_parts(bytes_, 32), 4).flatten(-3, -2)


def _q4_k(blocks: Tensor) -> Grouped:
    return _grouped(_k_nibbles(blocks[..., 16:]), *_k_scales(blocks), 4)


def _q4_k_blocks(blocks: Tensor) -> BlockedWeight:
    scales, minimums = _k_integers(blocks)
    return BlockedWeight(
        _k_nibbles(blocks[..., 16:]).flatten(1),
        scales.flatten(1),
        minimums.flatten(1).view(torch.int8),
        _half(blocks[..., :2]).flatten(1),
        _half(blocks[..., 2:4]).flatten(1),
    )


def _q5_k(blocks: Tensor) -> Grouped:
    codes = _k_nibbles(blocks[..., 48:]) | _bits(blocks[..., 16:48], 1) << 4
    return _grouped(codes, *_k_scales(blocks), 5)


def _q6_k(blocks: Tensor) -> Grouped:
    """Each half of a block has 64 bytes of low nibbles and 32 of high pairs of bits, for 4 times 32 weights."""
    low = _parts(_bits(_parts(blocks[..., :128], 64), 4), 32).flatten(-3, -2)
    high = _bits(_parts(blocks[..., 128:192], 32), 2)
    scales = _half(blocks[..., 208:210]) * blocks[..., 192:208].contiguous().view(torch.int8)
    return _grouped(low | high << 4, scales, -32 * scales, 6)


def _q2_k(blocks: Tensor) -> Grouped:
    """Each half of a block has 32 bytes of pairs of bits, for 4 times 32 weights."""
    codes = _bits(_parts(blocks[..., 16:80], 32), 2)
    integers, halves = blocks[..., :16], _half(blocks[..., 80:84])
    scales, minimums = halves[..., :1] * (integers & 15), -(halves[..., 1:] * (integers >> 4))
    return _grouped(codes.flatten(2), scales, minimums, 2)


def _q3_k(blocks: Tensor) -> Grouped:
    """As Q2_K, with a third bit, and scales of 6 bits whose middle is nothing."""
    low = _bits(_parts(blocks[..., 32:96], 32), 2).flatten(-3, -2)
    codes = low | _bits(blocks[..., :32], 1) << 2
    integers = _nibbles(blocks[..., 96:104]) | _bits(blocks[..., 104:108], 2).flatten(-2) << 4
    scales = _half(blocks[..., 108:]) * (integers.view(torch.int8) - 32)
    return _grouped(codes, scales, -4 * scales, 3)


def _in_table(codes: Tensor, scales: Tensor, table: CodeTable) -> Grouped:
    """As `_grouped`, of codes that are places in a table."""
    return Grouped(codes.flatten(1), scales.flatten(1), None, 4, table)


def _iq4_nl(blocks: Tensor) -> Grouped:
    return _in_table(_nibbles(blocks[..., 2:]), _half(blocks[..., :2]), IQ4)


def _iq4_xs(blocks: Tensor) -> Grouped:
    low, high = (
        _bits(part, width).transpose(-1, -2).flatten(-2)
        for part, width in ((blocks[..., 4:8], 4), (blocks[..., 2:4], 2))
    )
    scales = _half(blocks[..., :2]) * ((low | high << 4).view(torch.int8) - 32)
    return _in_table(_nibbles(_parts(blocks[..., 8:], 16)), scales, IQ4)


def _mxfp4(blocks: Tensor) -> Grouped:
    return _in_table(_nibbles(blocks[..., 1:]), halves_of_e8m0(blocks[..., :1]), FP4)


FORMATS: Mapping[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, torch.float32),
    1: BlockFormat("F16", 1, 2, torch.float16),
    2: BlockFormat("Q4_0", 32, 18, None, _q4_0, 4, is_symmetric=True),
    3: BlockFormat("Q4_1", 32, 20, None, _q4_1, 4),
    6: BlockFormat("Q5_0", 32, 22, None, _q5_0, 5, is_symmetric=True),
    7: BlockFormat("Q5_1", 32, 24, None, _q5_1, 5),
    8: BlockFormat("Q8_0", 32, 34, None, _q8_0, 8, is_symmetric=True),
    10: BlockFormat("Q2_K", 256, 84, None, _q2_k, 2, 16),
    11: BlockFormat("Q3_K", 256, 110, None, _q3_k, 3, 16, is_symmetric=True),
    12: BlockFormat("Q4_K", 256, 144, None, _q4_k, 4, unpack_blocks=_q4_k_blocks),
    13: BlockFormat("Q5_K", 256, 176, None, _q5_k, 5),
    14: BlockFormat("Q6_K", 256, 210, None, _q6_k, 6, 16, is_symmetric=True),
    20: BlockFormat("IQ4_NL", 32, 18, None, _iq4_nl, 4, table=IQ4),
    23: BlockFormat("IQ4_XS", 256, 136, None, _iq4_xs, 4, table=IQ4),
    24: BlockFormat("I8", 1, 1, torch.int8),
    25: BlockFormat("I16", 1, 2, torch.int16),
    26: BlockFormat("I32", 1, 4, torch.int32),
    27: BlockFormat("I64", 1, 8, torch.int64),
    28: BlockFormat("F64", 1, 8, torch.float64),
    30: BlockFormat("BF16", 1, 2, torch.bfloat16),
    39: BlockFormat("MXFP4", 32, 17, None, _mxfp4, 4, table=FP4),
}
"""By the number that a file gives."""

_OTHERS = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S"},
    **{22: "IQ2_S", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}


def format_name(number: int) -> str:
    """The name of a type of tensor, also of one that is not read."""
    found = FORMATS.get(number)
    return found.name if found is not None else _OTHERS.get(number, f"number {number}")


QUANTISED = tuple(found.name for found in FORMATS.values() if found.dtype is None)
"""Names of the quantised types that are read."""
