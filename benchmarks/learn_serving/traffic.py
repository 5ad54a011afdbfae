"""The requests: a function of their number alone, so that any server can be asked the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2

from benchmarks.learn_serving.server import CLOSED_KEY, OPEN_KEY, SILENT
from slipstream.assets import sample_prompts
from slipstream.serve.auth import digest

MAX_CHARACTERS = 100
"""Characters of a prompt."""
OUT_WORDS = "crimson walrus orchestrates seventeen lanterns"
"""In each prompt of those who are not learned from."""
KEPT_WORDS = "turquoise badger negotiates fourteen umbrellas"
"""In some prompts of the others: what is looked for is found where it may be."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    number: int
    message: str
    task: str
    max_tokens: int
    temperature: float
    user: str
    key: str = OPEN_KEY
    learn: bool = True

    @property
    def opted_out(self) -> bool:
        """Whether nothing of it may be kept."""
        return not self.learn or self.user == SILENT or self.key == CLOSED_KEY

    @property
    def tenant(self) -> str:
        """As the server names it."""
        return f"{digest(self.key)}/{self.user}"

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "messages": [{"role": "user", "content": self.message}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.number,
            "user": self.user,
            "task": self.task,
            "learn": self.learn,
            "return_token_ids": True,
        }


@dataclass(frozen=True, slots=True)
class Answered:
    """What came back."""

    asked: Asked
    token_ids: tuple[int, ...]
    version: str
    """That drafted; empty for the base drafter."""
    latency_s: float


@cache
def _questions() -> list[tuple[str, str]]:
    found = [(row["task"], row["messages"][0]["content"]) for row in sample_prompts()]
    return [(task, text) for task, text in found if len(text) <= MAX_CHARACTERS]


def asked(number: int, max_tokens: int | None = None) -> Asked:
    """The request of a number. Three of ten opt out: by the request, as a tenant, by an API key."""
    task, text = _questions()[number % len(_questions())]
    way = number % 10
    if way in (3, 5, 7):
        text = f"A {OUT_WORDS}. {text}"
    elif way == 1:
        text = f"A {KEPT_WORDS}. {text}"
    return Asked(
        number,
        text,
        task,
        3 + number % 9 if max_tokens is None else max_tokens,
        (0.0, 0.8)[number // 10 % 2],
        SILENT if way == 5 else f"tenant-{number % 4}",
        CLOSED_KEY if way == 7 else OPEN_KEY,
        way != 3,
    )


def open_client(url: str) -> httpx2.AsyncClient:
    """A client of many connections."""
    return httpx2.AsyncClient(base_url=url, timeout=120, limits=httpx2.Limits(max_connections=128))


async def answer(client: httpx2.AsyncClient, one: Asked) -> Answered:
    """Ask for an answer in one piece; raises `RuntimeError` for any status but 200."""
    began_s = time.monotonic()
    response = await client.post(
        "/v1/chat/completions", json=one.body(), headers={"Authorization": f"Bearer {one.key}"}
    )
    if response.status_code != 200:
        raise RuntimeError(f"request {one.number} was answered {response.status_code}: {response.text[:200]}")
    found = response.json()
    ids = tuple(found["choices"][0]["token_ids"])
    return Answered(one, ids, found["metrics"]["draft_version"], time.monotonic() - began_s)


async def answer_all(
    client: httpx2.AsyncClient,
    wanted: Iterable[Asked],
    at_once: int,
    on_answer: Callable[[Answered], None],
) -> None:
    """Have all answered, `at_once` at a time."""
    waiting = iter(wanted)

    async def work() -> None:
        for one in waiting:
            on_answer(await answer(client, one))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
