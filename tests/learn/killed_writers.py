"""A server and a learner that are killed at random instants, again and again, over the same folder.

`python killed_writers.py FOLDER NUMBER SEED` kills them NUMBER times. After each time all that either of them had
said to be written must be there, whole. Prints what was written in all.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import safetensors.torch  # noqa: F401  # once, not in every child
from learn_cases import some_record, some_tensors

from slipstream.learn.storage.events import EventLog
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import MIN_BYTES, Ring, RingIdentity, read_ring
from slipstream.learn.storage.state import StateStore
from slipstream.learn.versions.store import DataWindow, Version, VersionStore

NUM_KEPT = 4
Tell = Callable[[str], None]


def serve(folder: LearnFolder, tell: Tell) -> None:
    """Append records as a server does."""
    ring = Ring(folder, RingIdentity("model-a", "template-a"), MIN_BYTES)
    number = ring.status().last + 1
    while True:
        given = ring.append(some_record(number, num_tokens=number % 30))
        assert given == number, (given, number)
        tell(f"record {number}")
        number += 1


def learn(folder: LearnFolder, tell: Tell) -> None:
    """Add versions and promote them as a learner and a server do."""
    store, states, log = VersionStore(folder, NUM_KEPT), StateStore(folder), EventLog(folder)
    while True:
        read_s = time.time()
        records = list(read_ring(folder))[-3:]
        version = Version("whole", "model-a", "template-a", "base", window=DataWindow.of(records, read_s))
        version = store.add(version, some_tensors(len(records)), in_use=states.read().in_use)
        tell(f"version {version.id}")
        promoted = version.id
        states.change(lambda state, new=promoted: state.with_scope(state.scope().promoted(new)))
        tell(f"serving {version.id}")
        log.add("promoted", version=version.id)


def start(work: Callable[[LearnFolder, Tell], None], folder: LearnFolder) -> tuple[int, int]:
    """(process, pipe of what it says) of a child that does `work`."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    try:
        work(folder, lambda line: os.write(write, line.encode() + b"\n") and None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def end(child: int, pipe: int) -> list[list[str]]:
    """Kill the child; what it had said."""
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it ended by itself"
    with os.fdopen(pipe) as stream:
        return [line.split() for line in stream.read().splitlines()]


def check(folder: LearnFolder, said: list[list[str]]) -> None:
    """Everything that was said to be written is there, whole, as far as the bounds keep it."""
    records = {one.number: one for one in read_ring(folder)}
    numbers = sorted(records)
    assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True, numbers
    for number, record in records.items():
        assert record.encoded() == some_record(number, num_tokens=number % 30).encoded(), number
    store, state = VersionStore(folder, NUM_KEPT), StateStore(folder).read()
    assert store.faults() == {}
    there = [one.id for one in store.all()]
    for what, name in said:
        if what == "record":
            assert numbers, name
            assert int(name) in records or int(name) < numbers[0], (name, numbers[0], numbers[-1])
        elif what == "version":
            newer = [one for one in there if one > name]
            assert name in there or len(newer) >= NUM_KEPT, (name, there)
        else:
            assert state.scope().serving >= name
    if state.scope().serving:
        store.load(state.scope().serving)
    EventLog(folder).read()


def main(path: str, number: int, seed: int) -> None:
    folder, rng = LearnFolder(Path(path)), random.Random(seed)
    folder.create()
    said: list[list[str]] = []
    for instant in range(number):
        server, learner = start(serve, folder), start(learn, folder)
        if instant % 2:  # the others may be killed before they have written anything
            for _, pipe in (server, learner):
                select.select([pipe], [], [])
        time.sleep(rng.uniform(0.002, 0.06))
        children = [server, learner]
        rng.shuffle(children)
        said += end(*children[0])
        time.sleep(rng.uniform(0.0, 0.01))
        said += end(*children[1])
        check(folder, said)
        if not sys.stdout.isatty() and instant % 25 == 24:
            print(f"{instant + 1} instants", flush=True)
    kinds = [what for what, _ in said]
    print(" ".join(f"{what} {kinds.count(what)}" for what in ("record", "version", "serving")))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
