"""The HTTP front over replicas: OpenAI's API, with nothing to be seen of a replica that dies under way."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from slipstream.assets import EMBEDDED_TARGET
from slipstream.deploy.directory import Directory
from slipstream.deploy.front import FrontApp
from slipstream.deploy.process import ReplicaDescription, start_replica
from slipstream.deploy.replica import ReplicaServer
from slipstream.deploy.settings import DeploySettings
from slipstream.engine.async_engine import AsyncEngine

ROOM = {"kv_cache_bytes": 64 * 2**20, "max_num_seqs": 4}


class Front:
    """A front with its replicas, in this process."""

    def __init__(self, app: FrontApp, directory: Directory) -> None:
        self.app = app
        self.directory = directory
        self.servers: dict[str, ReplicaServer] = {}
        self.engines: list[AsyncEngine] = []
        self.key = ""
        """The API key that requests are sent with."""
        self.num_bodies_read = 0

    async def add(self, name: str) -> None:
        engine = AsyncEngine(**ROOM)
        described = ReplicaDescription(id=name, secret=self.directory.secret(), beat_s=0.05)
        self.servers[name], host, port = await start_replica(engine, described)
        self.engines.append(engine)
        self.directory.register(name, host, port)

    async def kill(self, name: str) -> None:
        self.directory.drop(name)
        await self.servers.pop(name).close()

    async def ask(self, method: str, *arguments: Any) -> Any:
        return getattr(self.directory, method)(*arguments)

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        on_part: Callable[[int], Awaitable[None]] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a request; `on_part` is awaited with the number of each part."""
        sent = {"content-type": "application/json", "authorization": f"Bearer {self.key}", **(headers or {})}
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET" if body is None else "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        messages = [{"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}]
        got: list[Any] = []

        async def receive() -> Any:
            if messages:
                self.num_bodies_read += body is not None
                return messages.pop()
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            got.append(message)
            if on_part is not None:
                await on_part(len(got))

        await self.app(scope, receive, send)
        found = {name.decode().lower(): value.decode() for name, value in got[0]["headers"]}
        return got[0]["status"], found, b"".join(message.get("body", b"") for message in got[1:])


@contextlib.asynccontextmanager
async def a_front(num: int = 2, **settings: Any) -> AsyncIterator[Front]:
    directory = Directory()
    front = Front.__new__(Front)
    app = FrontApp(DeploySettings(model=EMBEDDED_TARGET, **settings), lambda *each: front.ask(*each), "pair")
    Front.__init__(front, app, directory)
    for number in range(num):
        await front.add(f"r{number}")
    incoming: asyncio.Queue[Any] = asyncio.Queue()
    outgoing: asyncio.Queue[Any] = asyncio.Queue()
    incoming.put_nowait({"type": "lifespan.startup"})
    life = asyncio.create_task(app({"type": "lifespan"}, incoming.get, outgoing.put))
    assert (await outgoing.get())["type"] == "lifespan.startup.complete"
    try:
        yield front
    finally:
        incoming.put_nowait({"type": "lifespan.shutdown"})
        await life
        for server in front.servers.values():
            await server.close()
        for engine in front.engines:
            await asyncio.to_thread(engine.close)


def run(scenario: Callable[[Front], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with a_front(**settings) as front:
            await scenario(front)

    asyncio.run(main())


def chunks(body: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


ASKED = {
    "messages": [{"role": "user", "content": "Tell me of the sea."}],
    "temperature": 0.8,
    "seed": 4,
    "max_tokens": 160,
    "logprobs": True,
}


def test_a_stream_and_a_whole_answer_survive_their_replica() -> None:
    async def scenario(front: Front) -> None:
        _, _, whole = await front.call("/v1/chat/completions", ASKED)
        [wanted] = json.loads(whole)["choices"]

        async def kill_the_busy(_: int) -> None:
            _, _, data = await front.call("/replicas/data")
            busy = [each["replica"] for each in json.loads(data)["replicas"] if each["load"]]
            if busy and len(front.servers) > 1:
                await front.kill(busy[0])

        asked = ASKED | {"stream": True, "stream_options": {"include_usage": True}}
        status, _, body = await front.call("/v1/chat/completions", asked, on_part=kill_the_busy)
        assert status == 200
        got = chunks(body)
        choices = [chunk["choices"][0] for chunk in got if chunk["choices"]]
        assert (
            "".join(choice["delta"].get("content") or "" for choice in choices)
            == wanted["message"]["content"]
        )
        entries = [
            entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]
        ]
        assert entries == wanted["logprobs"]["content"]
        assert choices[-1]["finish_reason"] == wanted["finish_reason"]
        assert got[-1]["usage"]["completion_tokens"] == json.loads(whole)["usage"]["completion_tokens"]
        _, _, data = await front.call("/replicas/data")
        assert json.loads(data)["counts"]["moved"] == 1, "it was killed under way"

        await front.add("r9")
        task = asyncio.create_task(front.call("/v1/chat/completions", ASKED))
        while not (busy := [name for name, server in front.servers.items() if server.num_under_way]):
            await asyncio.sleep(0.001)
        await front.kill(busy[0])
        _, headers, body = await task
        assert json.loads(body)["choices"] == [wanted]
        assert headers["x-slipstream-moved"] == "1"

    run(scenario)


def test_the_front_bounds_replays_and_says_what_it_knows() -> None:
    async def scenario(front: Front) -> None:
        short = ASKED | {"max_tokens": 2}
        stranger = await front.call("/v1/chat/completions", short, {"Idempotency-Key": "a"})
        assert (stranger[0], front.num_bodies_read) == (401, 0), "the API key comes before the body"
        front.key = "known"
        large = ASKED | {"user": "u" * 10_000}
        refused = await front.call("/v1/chat/completions", large, {"Idempotency-Key": "b"})
        assert (refused[0], json.loads(refused[2])["error"]["code"]) == (413, "request_too_large")
        first = await front.call("/v1/chat/completions", short, {"Idempotency-Key": "a"})
        again = await front.call("/v1/chat/completions", short, {"Idempotency-Key": "a"})
        assert json.loads(first[2])["id"] == json.loads(again[2])["id"]
        assert again[1]["x-slipstream-replayed"] == "true"

        status, _, body = await front.call("/v1/chat/completions", short, {"X-Slipstream-Timeout-S": "soon"})
        assert (status, "seconds above 0" in body.decode()) == (400, True)
        status, headers, body = await front.call(
            "/v1/chat/completions", ASKED, {"X-Slipstream-Timeout-S": "0.000001"}
        )
        assert (status, json.loads(body)["error"]["code"]) == (504, "deadline")

        asked = ASKED | {"max_tokens": 300, "n": 4, "logprobs": False}
        tasks = [
            asyncio.create_task(front.call("/v1/chat/completions", asked | {"seed": n})) for n in range(2)
        ]
        while json.loads((await front.call("/replicas/data"))[2])["under_way"] < 2:
            await asyncio.sleep(0.01)
        status, headers, body = await front.call("/v1/chat/completions", asked)
        assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (429, "1", "queue_full")
        for task in tasks:
            assert (await task)[0] == 200

        status, _, body = await front.call("/v1/completions", {"prompt": "a", "max_tokens": 1, "regex": "("})
        assert status in (200, 400)
        _, _, metrics = await front.call("/metrics")
        assert b'slipstream_fleet_replica_up{model_name="pair",replica="r0"} 1.0' in metrics
        assert b'slipstream_fleet_replicas{model_name="pair"} 1.0' in metrics
        status, _, page = await front.call("/replicas")
        assert (status, b"<h1>Replicas</h1>" in page) == (200, True)
        assert (await front.call("/ready"))[0] == 200
        _, _, models = await front.call("/v1/models")
        assert json.loads(models)["data"][0]["id"] == "pair"

    serve = {"api_key": ("known",), "max_body_bytes": 10_000}
    run(scenario, num=1, router={"max_waiting": 4}, serve=serve)


def value(metrics: bytes, name: str) -> float:
    """The sum of a metric's series."""
    lines = [line for line in metrics.decode().splitlines() if line.startswith(name + "{")]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)


SUMS = (
    "slipstream_generation_tokens_total",
    "slipstream_engine_steps_total",
    "slipstream_prefix_cache_queries_total",
    "slipstream_fleet_generation_tokens_total",
    "slipstream_fleet_replica_generation_tokens_total",
    "slipstream_fleet_replica_steps_total",
)


def test_counts_of_replicas_are_summed_shown_and_never_fall() -> None:
    async def figures(front: Front, num_tokens: int) -> tuple[bytes, dict[str, Any]]:
        """Once so many tokens were reported: a report comes a moment behind its answer."""
        for _ in range(6000):
            _, _, metrics = await front.call("/metrics")
            if value(metrics, "slipstream_generation_tokens_total") >= num_tokens:
                break
            await asyncio.sleep(0.02)
        _, _, data = await front.call("/dashboard/data")
        return metrics, json.loads(data)

    async def scenario(front: Front) -> None:
        asked = {"prompt": "The sea is wide. " * 20, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
        asked |= {"task": "poem"}
        said = 0
        for _ in range(3):
            _, _, answer = await front.call("/v1/completions", asked)
            said += json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]
        before, data = await figures(front, 60)
        for name in SUMS[:1] + SUMS[3:5]:
            assert value(before, name) == 60, name
        assert value(before, "vllm:generation_tokens_total") == 60
        assert value(before, "slipstream_task_generation_tokens_total") == 60
        cached = value(before, "slipstream_prefix_cache_hits_total")
        assert 0 < cached == said == value(before, "slipstream_fleet_prompt_tokens_cached_total")
        assert [row["task"] for row in data["tasks"]] == ["poem"]
        assert sum(row["counts"]["num_output_tokens"] for row in data["replicas"]) == 60
        assert data["num_steps"] > 0

        [busy] = [row["replica"] for row in data["replicas"] if row["counts"]["num_output_tokens"]]
        await front.kill(busy)
        while len(json.loads((await front.call("/replicas/data"))[2])["replicas"]) > 1:
            await asyncio.sleep(0.01)
        gone, _ = await figures(front, 60)
        await front.add(busy)  # another engine under the old name
        while len(json.loads((await front.call("/replicas/data"))[2])["replicas"]) < 2:
            await asyncio.sleep(0.01)
        again, _ = await figures(front, 60)
        for name in SUMS:
            assert value(before, name) <= value(gone, name) <= value(again, name), name
        for n in range(4):
            assert (await front.call("/v1/completions", asked | {"prompt": f"Song {n}"}))[0] == 200
        after, _ = await figures(front, 140)
        for name in SUMS[:1] + SUMS[3:5]:
            assert value(after, name) == 140, name

    run(scenario, serve={"metrics_alias": "vllm"})
