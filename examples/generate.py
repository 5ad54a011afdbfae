"""Generate a text with a draft model, and see what the drafts were worth."""

from slipstream import LLM, SamplingParams


def main() -> None:
    # Without a model, LLM loads the small pair that ships with the package: nothing is downloaded.
    llm = LLM(speculative_config={"method": "draft_model", "model": "embedded", "num_speculative_tokens": 4})
    question = [{"role": "user", "content": "Write a SQL query. How many losses does the team have?"}]
    [output] = llm.chat(question, SamplingParams(temperature=0, max_tokens=32))

    answer, metrics = output.outputs[0], output.metrics
    print(answer.text)
    print(f"finish reason: {answer.finish_reason}")
    print(f"accepted: {sum(answer.from_draft)} of the {len(answer.token_ids)} tokens came from drafts")
    print(
        f"acceptance rate {metrics.acceptance_rate:.2f}, {metrics.acceptance_length:.2f} tokens a target pass"
    )


if __name__ == "__main__":
    main()
