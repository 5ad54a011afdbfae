"""Triton's interpreter with four faults mended: numpy's newer scalars, bfloat16 products and roundings, and the order
of sums.

The interpreter of Triton 3.6 and 3.7 cannot take a loop's bounds from memory under numpy 2.4, multiplies the bit
patterns of bfloat16 numbers, and cuts off the bits that bfloat16 has not, where a GPU rounds. A product's sums are
numpy's there, and a row's bits depend on its place; a GPU's instruction adds in an order that does not, and so does the
product here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


def widened(handle: Any) -> Any:
    """The numbers of a tensor of the interpreter, bfloat16 as float32."""
    if "bf16" in str(handle.dtype.scalar):
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def ordered_product(a: Any, b: Any, total: Any) -> Any:
    """total + a b, with the products of each number added one after another."""
    total = total.copy()
    for k in range(a.shape[-1]):
        total = total + a[..., :, k, None] * b[..., None, k, :]
    return total


def mend() -> None:
    """Replace the interpreter's faulty parts in this process."""

    def create_dot(self: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
        kind = total.data.dtype
        product = ordered_product(widened(a).astype(kind), widened(b).astype(kind), total.data)
        return interpreter.TensorHandle(product, total.dtype.scalar)

    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if (str(source.dtype.scalar), str(kind.scalar)) != ("fp32", "bf16"):
            return cast(self, source, kind)
        rounded = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), kind.scalar)

    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
        scope.set_attr(
            tensor, "__bool__", lambda self: self.handle.data.size != 1 or bool(self.handle.data.item())
        )

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.cast_impl = cast_impl
    interpreter._patch_lang_tensor = patch_tensor
