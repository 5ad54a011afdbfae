"""What each verifier does in the cases that one can decide by hand."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.cli.flags.flags import field_help
from slipstream.cli.flags.speculation import SpeculationFlags
from slipstream.config import SpeculativeConfig
from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal, ProposalKind, Verdict
from slipstream.errors import ConfigError
from slipstream.sampling.noise import Noise, Stream
from slipstream.verify.base import Judgement, Verifier
from slipstream.verify.registry import VERIFIERS, create_verifier
from slipstream.verify.rejection import draft_row, likelihood_ratio, residual

NAMES = ("coupled", "rejection", "block")
SAMPLED = (ProposalKind.SAMPLED_IID, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT)


def certain(*tokens: int, vocab: int = 6) -> torch.Tensor:
    """One-hot rows, as temperature 0 makes them."""
    rows = torch.full((len(tokens), vocab), -math.inf)
    rows[range(len(tokens)), list(tokens)] = 0.0
    return rows


def random_rows(rows: int, vocab: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def judge(
    name: str, log_probs: torch.Tensor, proposal: Proposal, seed: int = 0, greedy: bool = False
) -> Verdict:
    (verdict,) = create_verifier(name).verify([Judgement(log_probs, proposal, Noise(seed, 10, greedy))])
    return verdict


def test_names() -> None:
    for name in NAMES:
        assert create_verifier(name).name == name
        assert create_verifier(name).verify([]) == []
    assert create_verifier("coupled").kinds == frozenset(ProposalKind)
    with pytest.raises(ConfigError, match="did you mean 'rejection'"):
        create_verifier("rejecton")


@pytest.mark.parametrize("name", NAMES)
def test_a_verifier_says_what_it_can_do(name: str) -> None:
    traits = VERIFIERS.load(name).traits()
    assert (traits.name, traits.kinds) == (name, create_verifier(name).kinds)
    is_coupled = name == "coupled"
    assert (traits.accepts_coupled, traits.reproducible) == (is_coupled, is_coupled)
    assert traits.needs_distributions is not is_coupled


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.module:Verifier", "cannot be loaded"),
        ("slipstream.core.proposal:Verdict", "is not a subclass of slipstream.verify.base.Verifier"),
        ("slipstream.verify.base:Verifier", "cannot be made: TypeError"),
    ],
)
def test_what_is_no_verifier_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        create_verifier(name)
    assert "\n" not in str(caught.value)


def test_a_verifier_sets_its_kinds() -> None:
    mine = type("Mine", (Verifier,), {})
    with pytest.raises(ConfigError, match="verifier Mine does not set kinds"):
        mine.traits()


def test_help_names_the_verifiers() -> None:
    for text in (field_help(SpeculationFlags)["verifier"], field_help(SpeculativeConfig)["verifier"]):
        assert [name for name in NAMES if name not in text] == []
        assert "module:Class" in text
    assert set(NAMES) <= set(VERIFIERS.names())


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("name", NAMES)
class TestCertainTarget:
    """With one-hot rows every verifier must say the same, whatever the noise."""

    def test_nothing_proposed(self, name: str, greedy: bool) -> None:
        assert judge(name, certain(4), EMPTY_PROPOSAL, greedy=greedy) == Verdict((), 4)

    def test_everything_accepted(self, name: str, greedy: bool) -> None:
        verdict = judge(name, certain(1, 2, 3, 5), Proposal.chain([1, 2, 3]), greedy=greedy)
        assert verdict == Verdict((0, 1, 2), 5)

    @pytest.mark.parametrize("wrong", [0, 1, 2])
    def test_first_wrong_token_ends_the_step(self, name: str, greedy: bool, wrong: int) -> None:
        draft = [1, 2, 3]
        draft[wrong] = 0
        verdict = judge(name, certain(1, 2, 3, 5), Proposal.chain(draft), greedy=greedy)
        assert verdict == Verdict(tuple(range(wrong)), [1, 2, 3][wrong])

    def test_descends_into_the_right_branch(self, name: str, greedy: bool) -> None:
        proposal = Proposal((0, 1, 2, 3), (ROOT, ROOT, 0, 1))  # 0 -> 2, 1 -> 3
        assert judge(name, certain(1, 5, 3, 5, 4), proposal, greedy=greedy) == Verdict((1, 3), 4)
        assert judge(name, certain(0, 2, 3, 4, 5), proposal, greedy=greedy) == Verdict((0, 2), 4)
        assert judge(name, certain(5, 2, 3, 4, 0), proposal, greedy=greedy) == Verdict((), 5)

    def test_equal_siblings_are_harmless(self, name: str, greedy: bool) -> None:
        proposal = Proposal((2, 1, 1, 3), (ROOT, ROOT, ROOT, 1))
        assert judge(name, certain(1, 0, 3, 3, 4), proposal, greedy=greedy) == Verdict((1, 3), 4)
        assert judge(name, certain(5, 0, 3, 3, 4), proposal, greedy=greedy) == Verdict((), 5)

    @pytest.mark.parametrize("kind", SAMPLED)
    def test_sampled_draft(self, name: str, greedy: bool, kind: ProposalKind) -> None:
        probs = torch.full((2, 6), 1 / 6)
        right = Proposal.chain([1, 2], kind, probs)
        assert judge(name, certain(1, 2, 3), right, greedy=greedy) == Verdict((0, 1), 3)
        wrong = Proposal.chain([1, 4], kind, probs)
        assert judge(name, certain(1, 2, 3), wrong, greedy=greedy) == Verdict((0,), 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", SAMPLED)
def test_draft_equal_to_the_target_always_is_accepted(name: str, kind: ProposalKind) -> None:
    """Every residual is numerically zero here. Coupled needs the target's noise for it, so it only must not fail."""
    rows = random_rows(4)
    for seed in range(50):
        noise = Noise(seed, 10)
        tokens = [noise.draw_without_replacement(rows[i], 1, 10 + i)[0] for i in range(3)]
        proposal = Proposal.chain(tokens, kind, rows[:3].exp())
        verdict = judge(name, rows, proposal, seed)
        assert 0 <= verdict.next_token < 6
        if name != "coupled":
            assert verdict.accepted == (0, 1, 2)


def test_coupled_draft_equal_to_the_target_always_is_accepted() -> None:
    rows = random_rows(4)
    for seed in range(50):
        tokens = Noise(seed, 10).choose(rows, range(10, 14)).tolist()
        proposal = Proposal.chain(tokens[:3], ProposalKind.COUPLED)
        assert judge("coupled", rows, proposal, seed) == Verdict((0, 1, 2), tokens[3])


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_coupled_drafts_are_refused_by_the_classical_verifiers(name: str) -> None:
    with pytest.raises(ValueError, match="only the coupled verifier"):
        judge(name, random_rows(2), Proposal.chain([1], ProposalKind.COUPLED))
    with pytest.raises(ValueError, match="only the coupled verifier"):
        judge(name, random_rows(3), Proposal((1, 2), (ROOT, ROOT), ProposalKind.COUPLED))
    empty = Proposal((), (), ProposalKind.COUPLED)
    assert judge(name, certain(3), empty) == Verdict((), 3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_rows", range(1, 66))
def test_every_row_count(name: str, num_rows: int) -> None:
    rows = random_rows(num_rows, vocab=37, seed=num_rows)
    tokens = rows[:-1].argmax(-1).tolist()
    chain = judge(name, rows, Proposal.chain(tokens), seed=num_rows)
    assert chain.accepted == tuple(range(len(chain.accepted)))
    star = judge(name, rows, Proposal(tuple(tokens), (ROOT,) * len(tokens)), seed=num_rows)
    assert len(star.accepted) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_judged_as_each_alone(name: str) -> None:
    judgements = [
        Judgement(random_rows(1 + n, seed=n), Proposal.chain(list(range(n))), Noise(n, 3 * n, greedy=n == 2))
        for n in range(6)
    ]
    verifier = create_verifier(name)
    together = verifier.verify(judgements)
    assert together == [verifier.verify([judgement])[0] for judgement in judgements]
    assert together == verifier.verify(judgements[::-1])[::-1]


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_classical_verifiers_use_the_noise_of_the_right_position(name: str) -> None:
    class Recording(Noise):
        def accepts(self, probability: float, position: int, candidate: int) -> bool:
            coins.append((position, candidate))
            return super().accepts(probability, position, candidate)

        def draw(self, log_probs: torch.Tensor, position: int, stream: Stream, index: int = 0) -> int:
            draws.append((position, stream))
            return super().draw(log_probs, position, stream, index)

    for last in (3, 5):  # the third draft token is rejected, or all are accepted
        coins: list[tuple[int, int]] = []
        draws: list[tuple[int, Stream]] = []
        judgement = Judgement(certain(1, 2, last, 4), Proposal.chain([1, 2, 3]), Recording(0, 10))
        (verdict,) = create_verifier(name).verify([judgement])
        assert coins == [(10, 0), (11, 1), (12, 2)]
        assert draws == [(10 + len(verdict.accepted), Stream.NEXT_TOKEN)]


def test_coupled_takes_raw_logits_when_greedy() -> None:
    """What `is_plain_greedy` promises: the argmax of the logits needs no processing."""
    logits = random_rows(3) * 7 + 2
    tokens = logits.argmax(-1).tolist()
    assert judge("coupled", logits, Proposal.chain(tokens[:2]), greedy=True) == Verdict((0, 1), tokens[2])


def test_residual() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    assert residual(p, q).tolist() == [1.0, 0.0, 0.0]
    assert torch.equal(residual(p, p), p)
    assert torch.equal(
        residual(certain(1, vocab=3)[0].exp(), certain(1, vocab=3)[0].exp()), certain(1, vocab=3)[0].exp()
    )


def test_draft_row() -> None:
    like = torch.zeros(4, dtype=torch.float64)
    narrow = torch.tensor([[0.5, 0.25, 0.25]] * 2)
    iid = Proposal((0, 1), (ROOT, ROOT), ProposalKind.SAMPLED_IID, narrow)
    assert draft_row(iid, 1, [0], like).tolist() == [0.5, 0.25, 0.25, 0.0]
    without = Proposal((0, 1), (ROOT, ROOT), ProposalKind.SAMPLED_WITHOUT_REPLACEMENT, narrow)
    assert draft_row(without, 0, [], like).tolist() == [0.5, 0.25, 0.25, 0.0]
    assert draft_row(without, 1, [0], like).tolist() == [0.0, 0.5, 0.5, 0.0]
    assert draft_row(without, 1, [0, 1, 2], like).tolist() == [0.0] * 4
    assert torch.equal(
        narrow, torch.tensor([[0.5, 0.25, 0.25]] * 2)
    )  # the drafter's own rows stay as they are
    chosen = Proposal((2,), (ROOT,))
    assert draft_row(chosen, 0, [], like).tolist() == [0.0, 0.0, 1.0, 0.0]


def test_likelihood_ratio_is_finite() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([0.25, 0.0, 0.0]).double()
    assert likelihood_ratio(p, q, 0) == 2.0
    assert 1 < likelihood_ratio(p, q, 1) < math.inf
    assert likelihood_ratio(p, q, 2) == 0.0
