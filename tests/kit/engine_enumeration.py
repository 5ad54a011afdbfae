"""The exact distribution of a real engine's answers: all outcomes of every random decision are enumerated.

`slipstream.testing.enumeration` proves verifiers on table models. Here the real engine runs its real drafter on a real
model once for each combination of outcomes, so that wrong rows and a wrong draft distribution show as a gap, without
any sampling error. A random number that is used twice in a step raises:

    off = engine_distribution(LLM(), prompt, params)
    assert total_variation(engine_distribution(llm, prompt, params), off) < 1e-5

Keep the support small: `top_k` 2 and three tokens are some hundred runs. The verifiers are `rejection` and `block`;
under `coupled` the answer is a function of the noise, see `slipstream.testing.coupled_identity`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from unittest.mock import patch

from slipstream import LLM
from slipstream.core.request import RequestOptions
from slipstream.sampling.params import SamplingParams
from slipstream.testing.enumeration import BranchingNoise, Decisions, Distribution, all_scripts
from slipstream.testing.table_model import Text


def engine_distribution(
    llm: LLM, prompt: Seq[int], params: SamplingParams, options: RequestOptions | None = None
) -> Distribution:
    """Answer to probability, over all drafts, acceptances and choices; caches are cleared before each run."""

    def run(script: Decisions) -> Text:
        def branching(seed: int, root_position: int, greedy: bool, nonce: int) -> BranchingNoise:
            return BranchingNoise(root_position, script)

        llm.reset_caches()
        with (
            patch("slipstream.engine.verification.Noise", branching),
            patch("slipstream.draft.proposers.draft_trees.Noise", branching),
        ):
            [output] = llm.generate([list(prompt)], params, options=options)
        return tuple(output.outputs[0].token_ids)

    distribution: Distribution = {}
    for weight, answer in all_scripts(run):
        distribution[answer] = distribution.get(answer, 0.0) + weight
    return distribution
