"""Replicas of this machine on cores of their own, for measurements."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.deploy.local_replicas import LocalReplicas
from benchmarks.harness.models import expanded
from slipstream import SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.deploy.relay import Address, Relay
from slipstream.deploy.router import Router

Discover = Callable[[], Awaitable[Seq[Address]]]
ROOM: dict[str, Any] = {"kv_cache_bytes": 256 * 2**20, "max_num_seqs": 8, "num_threads": 1}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What the replicas run."""
    parser.add_argument("--expand", help="parameters of the enlarged target, as in 300M")
    parser.add_argument("--quantization", help="of the target")


def model_settings(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was asked for by `add_model_arguments`, and the engine's options for it."""
    settings = {"expand": options.expand, "quantization": options.quantization}
    return settings, {"quantization": options.quantization} if options.quantization else {}


@contextmanager
def target(size: str | None) -> Iterator[str]:
    """The embedded target, or one that is enlarged to so many parameters (`300M`) and costs as much."""
    with tempfile.TemporaryDirectory() as folder:
        yield EMBEDDED_TARGET if size is None else expanded(Path(folder) / "target", size)


@asynccontextmanager
async def pinned_replicas(num: int, model: str, options: dict[str, Any]) -> AsyncIterator[LocalReplicas]:
    """So many replicas, one core each from the first on; this process has the others, if any are left."""
    replicas = LocalReplicas(num, model, engine_options=ROOM | options)
    cores = sorted(os.sched_getaffinity(0))
    await replicas.start()
    try:
        for number, pid in enumerate(replicas.pids().values()):
            pin(pid, {cores[number % len(cores)]})
        pin(os.getpid(), set(cores[num:] or cores))
        yield replicas
    finally:
        pin(os.getpid(), set(cores))
        await replicas.close()


@asynccontextmanager
async def relayed(
    replicas: LocalReplicas, num: int, router: Router | None = None, discover: Discover | None = None
) -> AsyncIterator[Relay]:
    """A relay with a router before these replicas, from when `num` of them are ready."""
    relay = Relay(router or Router(), replicas.secret)
    keeping = asyncio.create_task(relay.run(discover or replicas.discover))
    try:
        while relay.router.fleet.num_ready < num:
            await asyncio.sleep(0.01)
        yield relay
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def pin(pid: int, cores: set[int]) -> None:
    """Keep all threads of a process, and those that they begin, on these cores."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def prompts(number: int, num_tokens: int, rng: random.Random) -> list[list[int]]:
    """Prompts of random tokens that no cache knows."""
    return [[rng.randrange(300, 4000) for _ in range(num_tokens)] for _ in range(number)]


def greedy(num_tokens: int) -> SamplingParams:
    """Answers of one length each."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=1)
