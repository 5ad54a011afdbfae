"""What the engine's thread posts reaches the loop: soon, whole, in its order, and in few deliveries."""

from __future__ import annotations

import asyncio
import random
import sys
import time

import pytest

from slipstream.core.request import FinishReason
from slipstream.engine.mailbox import Item, Mailbox, joined
from slipstream.engine.outputs import Update
from slipstream.text.stream import Piece

LONG_S = 3600.0
SHORT_S = 0.05


def update(token_id: int, index: int = 0, end: bool = False, request_id: str = "r") -> Update:
    pieces = [Piece(f"{token_id},", False)]
    return Update(request_id, index, [token_id], pieces, None, FinishReason.LENGTH if end else None, None)


class Reader:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def put(self, item: Item) -> None:
        self.items.append(item)

    @property
    def token_ids(self) -> list[int]:
        return [token for item in self.items if isinstance(item, Update) for token in item.token_ids]


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_what_follows_a_delivery_waits_for_the_next() -> None:
    async def main() -> Reader:
        mailbox, reader = Mailbox(asyncio.get_running_loop(), LONG_S), Reader()
        mailbox.post([(reader.put, update(0))], urgent=True)
        await settle()
        for token_id in (1, 2, 3):
            mailbox.post([(reader.put, update(token_id))], urgent=False)
            await settle()
        assert reader.token_ids == [0]
        mailbox.post([(reader.put, update(4, end=True))], urgent=True)
        await settle()
        return reader

    reader = asyncio.run(main())
    assert reader.token_ids == [0, 1, 2, 3, 4]
    assert len(reader.items) == 2
    last = reader.items[-1]
    assert isinstance(last, Update)
    assert last.text == "1,2,3,4,"
    assert last.finish_reason == FinishReason.LENGTH


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its clock moves when a test moves it, and then only."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


def test_what_waits_comes_in_its_time_though_nothing_follows() -> None:
    loop = SimulatedLoop()

    async def main() -> None:
        mailbox, reader = Mailbox(loop, SHORT_S), Reader()
        for token_id in (0, 1, 2):
            mailbox.post([(reader.put, update(token_id))], urgent=False)
            await settle()
        loop.now_s = 0.9 * SHORT_S
        await settle()
        assert reader.token_ids == [0], "its time has not come"
        loop.now_s = 1.1 * SHORT_S
        await settle()
        assert reader.token_ids == [0, 1, 2]
        loop.now_s = 4 * SHORT_S
        await settle()
        mailbox.post([(reader.put, update(3))], urgent=False)  # long after the last delivery: at once
        await settle()
        assert reader.token_ids == [0, 1, 2, 3]
        assert len(reader.items) == 3

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


def test_what_is_urgent_does_not_shorten_the_interval() -> None:
    """Two calls are on their way to the loop then, and the second one finds nothing."""

    async def main() -> Reader:
        mailbox, reader = Mailbox(asyncio.get_running_loop(), LONG_S), Reader()
        mailbox.post([(reader.put, update(0))], urgent=False)
        mailbox.post([(reader.put, update(1))], urgent=True)
        await settle()
        mailbox.post([(reader.put, update(2))], urgent=False)
        await settle()
        return reader

    assert asyncio.run(main()).token_ids == [0, 1]


def test_without_an_interval_every_update_comes_at_once_and_alone() -> None:
    async def main() -> Reader:
        mailbox, reader = Mailbox(asyncio.get_running_loop(), 0.0), Reader()
        for token_id in range(6):
            mailbox.post([(reader.put, update(token_id))], urgent=False)
            if token_id % 2:  # the loop may be late
                await settle()
                assert len(reader.items) == token_id + 1
        return reader

    assert len(asyncio.run(main()).items) == 6


def test_nothing_is_lost_between_two_threads() -> None:
    num = 20_000
    switching_s = sys.getswitchinterval()

    async def main(interval_s: float) -> Reader:
        mailbox, reader = Mailbox(asyncio.get_running_loop(), interval_s), Reader()
        end_s = time.monotonic() + 280

        def post_all() -> None:
            for token_id in range(num):
                mailbox.post([(reader.put, update(token_id))], urgent=token_id % 97 == 0)

        await asyncio.to_thread(post_all)
        while len(reader.token_ids) < num and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        return reader

    sys.setswitchinterval(1e-6)
    try:
        for interval_s in (0.0, 0.0005, 0.01):
            assert asyncio.run(main(interval_s)).token_ids == list(range(num))
    finally:
        sys.setswitchinterval(switching_s)


def test_a_loop_that_has_closed_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    mailbox, reader = Mailbox(loop, LONG_S), Reader()
    loop.close()
    for urgent in (True, False, False):
        mailbox.post([(reader.put, update(0))], urgent)
    assert reader.items == []
    assert mailbox.num_posted == 0


def test_updates_are_joined_by_answer_and_what_ends_stays_last() -> None:
    one, other = Reader(), Reader()
    posted: list[tuple[Reader, Item]] = [
        (one, update(0)),
        (other, update(10)),
        (one, update(1, index=1, end=True)),
        (one, update(2, end=True)),
        (other, RuntimeError("broken")),
    ]
    for put, item in joined([(reader.put, item) for reader, item in posted]):
        put(item)
    assert one.token_ids == [1, 0, 2]
    assert isinstance(one.items[-1], Update)
    assert one.items[-1].finish_reason is not None
    assert other.token_ids == [10]
    assert isinstance(other.items[-1], RuntimeError)


def test_requests_that_share_a_reader_are_not_joined_nor_are_errors() -> None:
    reader = Reader()
    first, second = RuntimeError("one"), RuntimeError("two")
    items = [update(0, request_id="a"), update(1, request_id="b"), first, second, update(2, request_id="a")]
    for put, item in joined([(reader.put, item) for item in items]):
        put(item)
    told = {item.request_id: item.token_ids for item in reader.items if isinstance(item, Update)}
    assert told == {"a": [0, 2], "b": [1]}
    assert [item for item in reader.items if isinstance(item, Exception)] == [first, second]


@pytest.mark.parametrize("seed", range(20))
def test_joining_keeps_each_answers_tokens_in_their_order(seed: int) -> None:
    rng, readers = random.Random(seed), [Reader() for _ in range(3)]
    posted = [(rng.randrange(3), update(number, index=rng.randrange(2))) for number in range(40)]
    for put, item in joined([(readers[reader].put, item) for reader, item in posted]):
        put(item)
    for number, reader in enumerate(readers):
        for index in (0, 1):
            mine = [each.token_ids[0] for to, each in posted if to == number and each.index == index]
            told = [item for item in reader.items if isinstance(item, Update) and item.index == index]
            assert [item.token_ids for item in told] == ([mine] if mine else [])
