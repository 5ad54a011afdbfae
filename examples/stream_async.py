"""Stream several answers at once from one engine. Requests that run together share target passes."""

import asyncio

from slipstream import AsyncEngine, SamplingParams

QUESTIONS = {
    "movies": "Can you help me to buy movie tickets?",
    "tar": "Show me how to use the command `tar`.",
}


async def answer(engine: AsyncEngine, name: str, question: str) -> str:
    """Print the pieces of one answer as they come."""
    prompt = engine.encode_chat([{"role": "user", "content": question}])
    pieces = []
    async for update in engine.stream(prompt, SamplingParams(temperature=0, max_tokens=24)):
        pieces.append(update.text)
        print(f"{name:>8} | {update.text!r}")
    return "".join(pieces)


async def main() -> None:
    async with AsyncEngine(speculative_config={"method": "suffix"}) as engine:
        texts = await asyncio.gather(*(answer(engine, *item) for item in QUESTIONS.items()))
    for name, text in zip(QUESTIONS, texts, strict=True):
        print(f"{name}: {text}")


if __name__ == "__main__":
    asyncio.run(main())
