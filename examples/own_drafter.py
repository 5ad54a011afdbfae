"""A drafter of one's own: it proposes what followed the last token when that token occurred before."""

from dataclasses import dataclass

from slipstream import LLM, SamplingParams
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal
from slipstream.draft.base import Drafter


@dataclass(frozen=True)
class EchoOptions:
    num_speculative_tokens: int = 4


class EchoDrafter(Drafter):
    """Nothing that a drafter proposes can change the text. A poor drafter is only slow."""

    Options = EchoOptions

    def propose(self, sequences, budgets):
        pairs = zip(sequences, budgets, strict=True)
        return [self._after(sequence.token_ids, budget) for sequence, budget in pairs]

    def _after(self, text, budget):
        earlier = [i for i in range(len(text) - 1) if text[i] == text[-1]]
        length = min(budget, self.traits.max_nodes)
        return Proposal.chain(text[earlier[-1] + 1 :][:length]) if earlier and length > 0 else EMPTY_PROPOSAL


def main() -> None:
    question = [{"role": "user", "content": "Show me how to use the command `tar`."}]
    params = SamplingParams(temperature=0, max_tokens=48)
    [plain] = LLM().chat(question, params)
    # "module:Class" finds a drafter in any module; a package gives it a name with an entry point.
    [drafted] = LLM(speculative_config={"method": f"{__name__}:EchoDrafter"}).chat(question, params)
    metrics = drafted.metrics
    print(f"accepted {metrics.num_accepted_tokens} of {metrics.num_draft_tokens} draft tokens")
    print("same text:", drafted.outputs[0].text == plain.outputs[0].text)


if __name__ == "__main__":
    main()
