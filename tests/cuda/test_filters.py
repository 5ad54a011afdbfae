"""Min-p, top-k and top-p at the end of a pass are those of the host's `LogitsProcessor`."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from slipstream.core.proposal import Proposal
from slipstream.models.cuda.filters import filtered
from slipstream.models.executor.choices import NUM_ROWS, OwnTokens, TokenChoices
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import NUM_NUCLEUS_CANDIDATES, LogitsProcessor

VOCABULARIES = [40, NUM_NUCLEUS_CANDIDATES, 5000]


def on_device(logits: Tensor, params: list[SamplingParams]) -> tuple[Tensor, Tensor]:
    """What a pass makes of a row for each of the parameters."""
    choices = TokenChoices()
    for each in params:
        choices.add(OwnTokens([0], each), Proposal())
    table = torch.from_numpy(choices.table(len(params)))
    temperatures, top_k = table[1].view(torch.float64).float(), table[NUM_ROWS]
    fractions = (row.view(torch.float64) for row in table[NUM_ROWS + 1 :])
    return filtered(logits, temperatures, top_k, *fractions)


def on_host(logits: Tensor, params: SamplingParams) -> Tensor:
    """bool [rows, vocab]: what is left."""
    processor = LogitsProcessor(params, [], [], [], logits.shape[1])
    return processor.log_probs(logits, [], [()] * len(logits)) > -torch.inf


def random_params(generator: random.Random, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=generator.choice([0.3, 1.0, 1.7]),
        top_k=generator.choice([0, 1, 7, 60, vocab_size, vocab_size + 5]),
        top_p=generator.choice([1.0, 0.95, 0.5, 0.02]),
        min_p=generator.choice([0.0, 0.0, 0.05, 1.0]),
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("coarse", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_what_is_left_is_what_the_host_leaves(vocab_size: int, coarse: bool, seed: int) -> None:
    """Of peaked rows, for which the candidates suffice."""
    generator = random.Random(seed)
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(seed)) * 5
    logits[:, 3] = -torch.inf
    if coarse:
        logits = logits.round()
    params = [random_params(generator, vocab_size) for _ in logits]
    left, short = on_device(logits, params)
    assert not short[torch.tensor([each.temperature < 1 for each in params])].any()
    for row, each in enumerate(params):
        if not short[row]:
            expected = on_host(logits[row : row + 1], each)[0]
            assert torch.equal(left[row] > -torch.inf, expected), each
            assert torch.equal(left[row][expected], logits[row][expected])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits(dtype: torch.dtype) -> None:
    """They have ties everywhere."""
    logits = (torch.randn(6, 3000, generator=torch.Generator().manual_seed(5)) * 4).to(dtype)
    params = [
        SamplingParams(top_k=k, top_p=p)
        for k, p in ((9, 1.0), (50, 0.8), (0, 0.6), (200, 0.99), (3, 0.1), (0, 0.3))
    ]
    left, short = on_device(logits, params)
    assert left.dtype == dtype
    assert not short.any()
    for row, each in enumerate(params):
        assert torch.equal(left[row] > -torch.inf, on_host(logits[row : row + 1], each)[0])


def test_a_row_is_short_where_the_candidates_do_not_suffice() -> None:
    size = NUM_NUCLEUS_CANDIDATES + 10
    flat, peaked = torch.zeros(size), torch.zeros(size)
    peaked[5] = 20.0
    cases = [
        (flat, SamplingParams(top_k=NUM_NUCLEUS_CANDIDATES), False),  # all of equal logits are left
        (flat, SamplingParams(top_k=NUM_NUCLEUS_CANDIDATES + 1), True),
        (peaked, SamplingParams(top_k=NUM_NUCLEUS_CANDIDATES + 1, min_p=0.5), False),
        (flat, SamplingParams(top_p=NUM_NUCLEUS_CANDIDATES / size), False),  # ties at the last candidate
        (flat, SamplingParams(top_p=0.999), True),
        (peaked, SamplingParams(top_p=0.999), False),
        (flat, SamplingParams(top_p=0.999, temperature=0.0), False),
        (flat, SamplingParams(top_k=size), False),
        (flat, SamplingParams(top_k=3, top_p=0.999), True),  # top-k leaves all of them
    ]
    left, short = on_device(torch.stack([logits for logits, *_ in cases]), [params for _, params, _ in cases])
    assert short.tolist() == [expected for *_, expected in cases]
    for row, (logits, params, is_short) in enumerate(cases):
        if not is_short and params.temperature:
            assert torch.equal(left[row] > -torch.inf, on_host(logits[None], params)[0]), row


def test_a_row_depends_on_nothing_else() -> None:
    """Alone, at another place and among more rows it is cut at the same token, also where two masses are equal."""
    logits = torch.zeros(33, 700)
    logits[:, 7] = 3.0
    params = [SamplingParams(top_p=(5 + row) / 700, temperature=0.9) for row in range(33)]
    together, _ = on_device(logits, params)
    for row in (0, 13, 32):
        alone, _ = on_device(logits[:1], params[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_a_row_without_filters_is_as_it_was() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(4))
    logits[0, 3], logits[1, 4] = float("nan"), float("inf")
    left, short = on_device(
        logits, [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=2)]
    )
    assert torch.equal(left[:2].nan_to_num(7.0), logits[:2].nan_to_num(7.0))
    assert int((left[2] > -torch.inf).sum()) == 2
    left, short = on_device(logits[:1], [SamplingParams(top_p=0.5, top_k=3, min_p=0.1)])
    assert left[0, 3].isnan()
    assert not short.any()
