"""Muon: momentum, orthogonalised by Newton-Schulz (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

from collections import defaultdict
from collections.abc import Iterable

import torch

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Push the singular values of `[K, rows, cols]` matrices towards 1, in `dtype`; returns float32."""
    a, b, c = COEFFICIENTS
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(STEPS):
        gram = x @ x.mT  # [K, min, min]
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: torch.Tensor = (x.mT if tall else x).float()
    return result


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum over matrices; those of one shape are orthogonalised in one batch.

    `dtype` is the precision of Newton-Schulz. `torch.optim.Muon` fixes it at bfloat16, which takes minutes a
    step on a CPU that lacks it; where the hardware has it, bfloat16 is twice as fast as float32.
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for weight in group["params"]:
                by_shape[weight.shape].append(weight)
            for (rows, cols), weights in by_shape.items():
                updates = []
                for weight in weights:
                    state = self.state[weight]
                    velocity = (
                        state["velocity"] if state else state.setdefault("velocity", torch.zeros_like(weight))
                    )
                    assert weight.grad is not None
                    velocity.lerp_(weight.grad, 1 - group["momentum"])
                    updates.append(weight.grad.lerp(velocity, group["momentum"]))
                # The entries of a tall matrix with unit singular values are smaller: scale them to the same RMS.
                scale = max(1.0, rows / cols) ** 0.5
                for weight, update in zip(
                    weights, orthogonalise(torch.stack(updates), self.dtype), strict=True
                ):
                    weight.add_(update, alpha=-group["lr"] * scale)
