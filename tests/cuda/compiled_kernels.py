"""`python compiled_kernels.py 90`: compile every kernel for GPUs of this architecture, which need not be there, and say
what each one takes. For others than Hopper's those of fewer head sizes: compiling takes minutes.

Prints a JSON object a line: kernel, architecture, constants, registers' spills, local and shared memory, and how often
each matrix instruction stands in it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.models.cuda import (
    activation,
    attention_kernels,
    choice_kernels,
    layer_kernels,
    linear_kernels,
    verdict_kernels,
)
from slipstream.models.cuda.attention_plan import SPLIT
from slipstream.models.cuda.choice import BLOCK
from slipstream.models.cuda.linear import MOST_SPLITS, ProductCut
from slipstream.models.cuda.linear_codes import HeldAs
from slipstream.models.cuda.norm import WIDEST, warps_of
from slipstream.models.cuda.tree_attention import Cut
from slipstream.models.cuda.verdict import NUM_PIECES, PIECE_BYTES
from slipstream.models.executor.pass_layout import WANTED

INSTRUCTIONS = ("HMMA", "HGMMA", "UTCHMMA", "STL", "LDL")
"""Matrix products of each generation; stores to and loads from local memory."""
DIMS = (64, 80, 96, 128, 192, 256)
FEWER_DIMS = (64, 96, 256)
"""One that fits, one that is padded, the largest."""
POINTERS = {
    "positions": "*i64", "slots": "*i64", "run_begin": "*i64", "run_length": "*i64", "tail_begin": "*i64",
    "tail_slots": "*i64", "tail_positions": "*i64", "items": "*i64", "partials": "*i64", "sums": "*fp32",
    "peaks": "*fp32", "masses": "*fp32", "key_scales": "*fp32", "value_scales": "*fp32", "sinks": "*bf16",
    "query": "*bf16", "key": "*bf16", "value": "*bf16", "output": "*bf16", "keys": "*bf16", "values": "*bf16",
}  # fmt: skip
POINTERS |= dict.fromkeys(
    ("tokens", "token_ids", "logit_rows", "parents", "sizes", "verdicts", "pieces"), "*i64"
) | {"logits": "*bf16", "temperatures": "*fp32", "best": "*fp64", "best_ids": "*i32"}
POINTERS |= {
    **{"rows": "*bf16", "tickets": "*i32", "scales": "*fp32", "group_scales": "*fp16", "zeros": "*fp32"},
    **{"bias": "*fp32"},
}
POINTERS |= dict.fromkeys(
    ("states", "change", "total", "source", "rotated_query", "rotated_key"), "*bf16"
) | dict.fromkeys(
    ("change_weight", "change_bias", "weight", "bias", "cosines", "sines", "query_weight", "key_weight"),
    "*fp32",
)
NUMBERS = dict.fromkeys(("scaling", "softcap", "epsilon", "scale"), "fp32")
OTHERS = {"choose_in_blocks": {"keys": "*i64"}, "multiply": {"partials": "*fp32"}}
"""Of a kernel the types that are others there."""
ALIGNED = ("query_row", "query_head", "num_in", "num_out")
"""Numbers that are multiples of 16."""
LINEARS = (
    (HeldAs.NUMBERS, 0, False, torch.bfloat16),
    (HeldAs.NUMBERS, 0, False, torch.float32),
    (HeldAs.FP8, 0, False, torch.bfloat16),
    (HeldAs.FP8, 128, False, torch.bfloat16),
    (HeldAs.CODES8, 16, True, torch.bfloat16),
    (HeldAs.CODES8, 32, False, torch.bfloat16),
    (HeldAs.CODES4, 32, True, torch.bfloat16),
    (HeldAs.CODES4, 32, True, torch.float32),
    (HeldAs.CODES4, 128, True, torch.bfloat16),
    (HeldAs.CODES4, 128, False, torch.bfloat16),
)
"""Weights: how they are held, inputs of a group, whether groups have zeros, and the type of the rows."""
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"


def kernels(dims: Sequence[int] = DIMS) -> Iterator[tuple[Any, ...]]:
    """(kernel, its constants, warps) of all that is launched with heads of these sizes, and further arguments of
    `compiled`."""
    yield from products()
    for dim in dims:
        block = triton.next_power_of_2(dim)
        sizes = {"KEY_DIM": dim, "VALUE_DIM": dim, "KEY_BLOCK": block, "VALUE_BLOCK": block}
        for is_int8 in (False, True):
            cut = Cut.of(dim, is_int8)
            for reach, softcap in ((0, False), (4096, True), (-8192, False)):
                constants = sizes | {"GROUP": 4, "TILE": cut.tile, "BLOCK": cut.block, "SPLIT": SPLIT}
                constants |= {"REACH": reach, "HAS_SOFTCAP": softcap, "IS_INT8": is_int8}
                yield attention_kernels.attend_splits, constants, cut.num_warps
            yield attention_kernels.write_entries, sizes | {"IS_INT8": is_int8}, 4
        for has_sinks in (False, True):
            constants = {"VALUE_DIM": dim, "VALUE_BLOCK": block, "HAS_SINKS": has_sinks}
            yield attention_kernels.add_partials, constants, 4
        for half, norms in ((dim // 2, True), (0, True), (dim // 4, False)):
            constants = {"DIM": dim, "BLOCK": block, "HALF": half, "NORMS_QUERY": norms, "NORMS_KEY": norms}
            yield layer_kernels.rotate_heads, constants, 1
    for width in (1024, 4096, WIDEST):
        for centres, others in ((True, True), (False, True), (False, False)):
            constants = {
                "BLOCK": width,
                "HAS_CHANGE": others,
                "NORMS_CHANGE": others,
                "CENTRES_CHANGE": centres,
            }
            constants |= {"HAS_CHANGE_BIAS": centres, "NORMS": True, "CENTRES": centres, "HAS_BIAS": centres}
            yield layer_kernels.add_then_norm, constants, warps_of(width)
    for kind in (0, 1, 2, 4):
        constants = {"KIND": kind, "GATED": True, "BLOCK": activation.BLOCK}
        yield layer_kernels.activate_rows, constants, 4
    yield choice_kernels.choose_in_blocks, {"BLOCK": BLOCK}, 4
    yield choice_kernels.choose_among_blocks, {"BLOCK": 256}, 4
    for size in WANTED:
        yield verdict_kernels.walk_trees, {"BLOCK": size}, 1
    for size in (1, 4):
        constants = {"PIECES": NUM_PIECES, "WORDS": PIECE_BYTES // size, "WORD_BYTES": size}
        yield verdict_kernels.move_pieces, constants, 4


def products() -> Iterator[tuple[Any, ...]]:
    """Those of linear layers, with few rows and with many."""
    for kind, group, has_zeros, dtype in LINEARS:
        cut = ProductCut.of(kind, group, dtype, 4096, 4096)
        numbers = "*fp32" if dtype == torch.float32 else "*bf16"
        codes = numbers if kind == HeldAs.NUMBERS else "*u8"
        constants = {"KIND": int(kind), "GROUP": group, "BLOCK": cut.block, "SPLITS": MOST_SPLITS}
        constants |= {"HAS_ZEROS": has_zeros, "HAS_BIAS": True, "HAS_SCALES": kind != HeldAs.NUMBERS}
        types = {"rows": numbers, "output": numbers, "codes": codes}
        for tiles in (1, cut.most_tiles):
            yield linear_kernels.multiply, constants | {"TILES": tiles}, 4, cut.num_stages, types


def compiled(
    architecture: int, kernel: Any, constants: dict[str, Any], num_warps: int, num_stages: int = 2,
    given: Mapping[str, str] = {},
) -> dict[str, Any]:  # fmt: skip
    """What the kernel takes; `given` are its arguments' types where they are others than those above."""
    types, others = {}, {**OTHERS.get(kernel.fn.__name__, {}), **given}
    for name in kernel.arg_names:
        held = "*i8" if constants.get("IS_INT8") and name in ("keys", "values") else None
        types[name] = (
            held
            or others.get(name)
            or POINTERS.get(name)
            or NUMBERS.get(name)
            or ("constexpr" if name in constants else "i32")
        )
    aligned = [kernel.arg_names.index(name) for name, kind in types.items() if kind.startswith("*")]
    aligned += [kernel.arg_names.index(name) for name in ALIGNED if name in types]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
    done = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([BINARIES / "cuobjdump", "-res-usage", file.name], text=True)
        code = subprocess.check_output([BINARIES / "cuobjdump", "-sass", file.name], text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage, re.DOTALL)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    return {
        "kernel": kernel.fn.__name__,
        "architecture": architecture,
        "constants": constants,
        "types": dict(given),
        "registers": registers,
        "stack": stack,
        "local": local,
        "shared": done.metadata.shared,
        "instructions": {name: len(re.findall(rf"\b{name}\b", code)) for name in INSTRUCTIONS},
        "products": sorted(set(re.findall(rf"\b(?:{'|'.join(INSTRUCTIONS[:3])})[.\w]*", code))),
        "flushes": ".ftz" in done.asm["ptx"],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    architecture = int(sys.argv[1])
    for each in kernels(DIMS if architecture == 90 else FEWER_DIMS):
        print(json.dumps(compiled(architecture, *each)), flush=True)
