"""The dynamic programme against brute force, and the measurement of ranks that it plans from."""

from __future__ import annotations

import itertools
import json
import math
import random
from functools import cache

import pytest
from typer.testing import CliRunner

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, sample_prompts
from slipstream.cli.main import app
from slipstream.config import SpeculativeConfig
from slipstream.core.proposal import ROOT, Proposal, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.draft.model.sequoia import RankAcceptance, best_tree, comb, fastest_tree
from slipstream.draft.proposers.proposal_shape import check_choices
from slipstream.draft.registry import validate
from slipstream.errors import ConfigError
from slipstream.text.prompts import encode_chat
from slipstream.tools.bench.engine.ranks import RankCounts, measure_rank_acceptance, with_tree

Tree = frozenset[tuple[int, ...]]


@cache
def all_trees(num_nodes: int, max_depth: int, num_ranks: int) -> frozenset[Tree]:
    """Every tree of at most so many nodes, written by ranks."""
    if num_nodes == 0:
        return frozenset({frozenset()})
    found = set(all_trees(num_nodes - 1, max_depth, num_ranks))
    for tree in all_trees(num_nodes - 1, max_depth, num_ranks):
        for above in [(), *tree]:
            rank = sum(1 for node in tree if node[:-1] == above)
            if len(above) < max_depth and rank < num_ranks:
                found.add(tree | {(*above, rank)})
    return frozenset(found)


def tokens(tree: Tree, acceptance: RankAcceptance) -> float:
    """Tokens a pass: the target's own and every node's chance that its whole path is right."""
    chances = [
        math.prod(acceptance.at(depth)[rank] for depth, rank in enumerate(node, start=1)) for node in tree
    ]
    return 1 + sum(chances)


def random_rates(rng: random.Random, num_depths: int, num_ranks: int) -> RankAcceptance:
    """Not always the best rank first: a drafter may be wrong about itself."""
    rows = []
    for _ in range(num_depths):
        weights = [rng.random() ** 3 for _ in range(num_ranks)]
        total = sum(weights) / rng.uniform(0.3, 1.0)
        rows.append(tuple(weight / total for weight in weights))
    return RankAcceptance(tuple(rows))


@pytest.mark.parametrize(
    ("num_nodes", "max_depth", "num_ranks"), [(1, 1, 1), (5, 2, 3), (6, 4, 3), (6, 6, 2)]
)
def test_no_tree_is_better(num_nodes: int, max_depth: int, num_ranks: int) -> None:
    rng = random.Random(num_nodes)
    trees = all_trees(num_nodes, max_depth, num_ranks)
    for num_depths in (1, 2, 3):
        acceptance = random_rates(rng, num_depths, num_ranks)
        plan = best_tree(acceptance, num_nodes, max_depth)
        check_choices("tree", plan.tree_choices)
        found = frozenset(map(tuple, plan.tree_choices))
        assert found in trees
        assert plan.acceptance_length == pytest.approx(tokens(found, acceptance))
        assert plan.acceptance_length == pytest.approx(max(tokens(tree, acceptance) for tree in trees))


@pytest.mark.parametrize("level_s", [0.0, 0.05, 0.3, 5.0])
def test_no_size_or_depth_is_faster(level_s: float) -> None:
    acceptance = random_rates(random.Random(4), 2, 3)

    def step_s(rows: int) -> float:
        return 1.0 if rows <= 4 else 1.0 + 0.1 * rows

    plan = fastest_tree(acceptance, 6, 4, level_s, step_s)
    times = [
        (max(map(len, tree), default=0) * level_s + step_s(1 + len(tree))) / tokens(tree, acceptance)
        for tree in all_trees(6, 4, 3)
    ]
    time = (plan.depth * level_s + step_s(1 + plan.num_nodes)) / plan.acceptance_length
    assert time == pytest.approx(min(times))
    assert bool(plan.tree_choices) == (level_s < 5)


def test_a_sure_first_guess_makes_a_chain_and_a_vague_one_a_star() -> None:
    sure = RankAcceptance(((0.95, 0.02),))
    assert best_tree(sure, 4, 8).tree_choices == [[0] * depth for depth in range(1, 5)]
    vague = RankAcceptance(((0.2, 0.19, 0.18, 0.17),))
    assert best_tree(vague, 4, 8).tree_choices == [[0], [1], [2], [3]]


def test_rates_that_cannot_be_are_refused() -> None:
    for rows in ((), ((),), ((0.7, 0.5),), ((-0.1,),), ((1.5,),)):
        with pytest.raises(ConfigError):
            RankAcceptance(rows)
    with pytest.raises(ConfigError, match="at least 1"):
        best_tree(RankAcceptance(((0.5,),)), 0, 3)


# --- measuring ------------------------------------------------------------------------------------------------


def item(proposal: Proposal, emitted: list[int], accepted: tuple[int, ...]) -> StepItem:
    item = StepItem(Sequence(0, "0", 0, [9, 9], 2, SamplingParams(), 0), num_rows=2)
    item.proposal, item.verdict = proposal, Verdict(accepted, next_token=7)
    item.sequence.token_ids += emitted
    item.record_emitted(len(emitted))
    return item


def test_ranks_are_counted_below_the_accepted_path() -> None:
    star = Proposal((1, 2, 3, 4), (ROOT, ROOT, 0, 0))  # 1 or 2; after 1, 3 or 4
    counts = RankCounts(depth=2, width=2)
    counts.add([item(star, [1, 4, 7], (0, 3)), item(star, [2, 3], (1,)), item(star, [5], ())])
    counts.add([item(star, [1], (0,))])  # cut off behind an accepted token: nothing is known of what follows
    counts.add([item(star, [], (0,))])  # cut off before a token that may not come
    assert counts.reached == [4, 1]
    assert counts.accepted == [[2, 1], [0, 1]]
    with pytest.raises(ConfigError, match="give more"):
        counts.rates()


def test_measured_rates_predict_the_trees_acceptance_length() -> None:
    llm = LLM()
    rows = list(itertools.islice(sample_prompts(), 0, 350, 30))
    prompts = [encode_chat(llm.engine.tokenizer, row["messages"]) for row in rows]
    params = [SamplingParams(temperature=0.8, max_tokens=60, seed=seed) for seed in range(len(prompts))]
    draft = SpeculativeConfig.from_mapping({"method": "draft_model", "model": EMBEDDED_DRAFT})
    counts = measure_rank_acceptance(llm, draft, prompts, params, depth=3, width=3)
    rates = counts.rates()
    assert all(row[0] > row[1] > row[2] for row in rates.rates)
    plan = best_tree(rates, 6, 3)
    wide = {"method": "draft_model", "model": EMBEDDED_DRAFT, "tree_choices": plan.tree_choices}
    outputs = LLM(speculative_config=wide).generate(prompts, params)
    steps = sum(output.metrics.num_steps for output in outputs)
    measured = sum(output.metrics.num_output_tokens for output in outputs) / steps
    assert measured == pytest.approx(plan.acceptance_length, rel=0.1)


def test_a_drafter_without_fixed_trees_is_refused() -> None:
    with pytest.raises(ConfigError, match="no fixed trees"):
        measure_rank_acceptance(LLM(), SpeculativeConfig("ngram"), [[5]], SamplingParams())


def test_a_comb_is_a_tree() -> None:
    check_choices("tree", comb(3, 4))
    assert len(comb(3, 4)) == 12


# --- the verb -------------------------------------------------------------------------------------------------


def test_the_verb_prints_a_configuration_that_runs() -> None:
    small = ["--num-draft-nodes", "5", "--prompts", "1", "--max-tokens", "30", "--depth", "3", "--width", "3"]
    result = CliRunner().invoke(app, ["tree", *small])
    assert result.exit_code == 0, result.output
    config = json.loads(result.stdout)
    assert len(config["tree_choices"]) == 5
    assert max(map(len, config["tree_choices"])) <= 3
    assert "predicted τ" in result.stderr
    validate(SpeculativeConfig.from_mapping(config))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--spec", "ngram"], "has no fixed trees"), (["--fastest"], "needs the step times")],
)
def test_the_verb_refuses_what_it_cannot_plan(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["tree", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_drafter_with_another_shape_by_default_takes_the_tree() -> None:
    config = with_tree(SpeculativeConfig("eagle", options={"model": "head", "tree_top_k": 6}), [[0], [1]])
    _, options = validate(config)
    assert (options.tree_choices, options.tree_top_k, options.model) == ([[0], [1]], 1, "head")
