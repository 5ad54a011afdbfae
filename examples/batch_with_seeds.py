"""Sample a batch with seeds: the same seed gives the same text, with speculation on or off, in any batch."""

from slipstream import LLM, SamplingParams

PROMPTS = ["SELECT name FROM", "def add(a, b):", "Once upon a time"]
SEEDS = [7, 8, 9]


def answers(speculative_config: dict[str, object], prompts: list[str], seeds: list[int]) -> list[str]:
    """One sampled text a prompt."""
    llm = LLM(speculative_config=speculative_config)
    params = [SamplingParams(temperature=0.8, max_tokens=24, seed=seed) for seed in seeds]
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


def main() -> None:
    plain = answers({"method": "off"}, PROMPTS, SEEDS)
    drafted = answers({"method": "suffix"}, PROMPTS, SEEDS)
    alone = answers({"method": "suffix"}, PROMPTS[:1], SEEDS[:1])
    for seed, text in zip(SEEDS, drafted, strict=True):
        print(f"seed {seed}: {text!r}")
    print("same texts without speculation:", plain == drafted)
    print("same text without the others in the batch:", alone == drafted[:1])


if __name__ == "__main__":
    main()
