"""Compare drafters on a few prompts: acceptance, tokens a target pass, and that no text changes.

`slipstream bench` measures time as well, with paired runs and intervals; a short script cannot.
"""

from slipstream import LLM, SamplingParams

DRAFTERS = {
    "off": {"method": "off"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix"},
    "draft model": {"method": "draft_model", "model": "embedded", "num_speculative_tokens": 4},
    "draft tree": {"method": "draft_model", "model": "embedded", "tree_top_k": 3, "num_draft_nodes": 12},
}
CHATS = [
    [{"role": "user", "content": f"Show me how to use the command `{tool}`."}] for tool in ("tar", "grep")
]


def main() -> None:
    texts = {}
    print(f"{'drafter':12}  accepted  drafted  passes  tokens a pass")
    for name, config in DRAFTERS.items():
        outputs = LLM(speculative_config=config).chat(CHATS, SamplingParams(temperature=0, max_tokens=40))
        every = [output.outputs[0].metrics for output in outputs]
        accepted = sum(metrics.num_accepted_tokens for metrics in every)
        drafted = sum(metrics.num_draft_tokens for metrics in every)
        passes = sum(metrics.num_steps for metrics in every)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"{name:12}  {accepted:8}  {drafted:7}  {passes:6}  {tokens / passes:13.2f}")
        texts[name] = [output.outputs[0].text for output in outputs]
    print("texts identical:", all(answers == texts["off"] for answers in texts.values()))


if __name__ == "__main__":
    main()
