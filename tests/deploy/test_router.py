"""The router alone, without sockets, clocks or tensors: where requests go, and where they go on."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from slipstream.core.request import tenant_account
from slipstream.deploy.config import RouterConfig
from slipstream.deploy.fingerprint import Fingerprint
from slipstream.deploy.fleet import Health, ReplicaInfo, ReplicaReport
from slipstream.deploy.orders import Cancel, Fail, Order, SetPaused, Start
from slipstream.deploy.prefixes import FleetPrefixes, blocks_of
from slipstream.deploy.router import Router
from slipstream.deploy.work import Work
from slipstream.errors import DeployError, OverloadedError

PRINT = Fingerprint("model", "bits")
OTHER_BITS = Fingerprint("model", "other bits")


def info(
    name: str, capacity: int = 4, fingerprint: Fingerprint = PRINT, num_slots: int = 4096
) -> ReplicaInfo:
    return ReplicaInfo(name, fingerprint, capacity, num_slots)


def router_of(*names: str, capacity: int = 4, **config: Any) -> Router:
    router = Router(RouterConfig(**config))
    for name in names:
        assert router.join(info(name, capacity), 0.0) == []
    return router


def work(name: str, text: str = "", tenant: str = "", **claims: Any) -> Work:
    blocks = blocks_of([ord(c) for c in text], tenant, 4)
    return Work(name, blocks, tenant=tenant, account=tenant_account(tenant), **claims)


def start_of(orders: list[Order]) -> Start:
    [start] = [order for order in orders if isinstance(order, Start)]
    return start


def submit(router: Router, each: Work, now_s: float = 0.0) -> str:
    return start_of(router.submit(each, now_s)).replica


# --- the choice ------------------------------------------------------------------------------------------------


def test_requests_go_to_the_shortest_queue() -> None:
    router = router_of("a", "b", "c")
    given = Counter(submit(router, work(str(n))) for n in range(12))
    assert given == {"a": 4, "b": 4, "c": 4}
    assert router.submit(work("one more"), 0.0) == [], "all are full, so it waits"


def test_a_prompt_goes_where_its_beginning_is_known() -> None:
    router = router_of("a", "b", "c", capacity=16)
    first = submit(router, work("1", "system prompt one, question"))
    second = submit(router, work("2", "another prompt altogether"))
    assert first != second
    assert submit(router, work("3", "system prompt one, and more")) == first
    assert submit(router, work("4", "another prompt altogether, longer")) == second


def test_the_longest_known_beginning_wins() -> None:
    router = router_of("a", "b", capacity=16)
    one = submit(router, work("1", "shared beginning, the first"))
    for number in range(3):  # the other gets its own end of the same beginning once the first is too full
        submit(router, work(f"x{number}", "shared beginning, the first"))
    two = submit(router, work("2", "elsewhere"))
    assert one != two
    router.chooser.prefixes.use(two, work("", "shared beginning, the second").blocks)
    assert submit(router, work("3", "shared beginning, the second!")) == two


def test_affinity_gives_way_to_the_shortest_queue() -> None:
    router = router_of("a", "b", "c", "d", capacity=8, max_imbalance=0.25)
    given = Counter(submit(router, work(str(n), "the same prompt for everybody")) for n in range(32))
    assert given == {"a": 8, "b": 8, "c": 8, "d": 8}
    hot = router_of("a", "b", capacity=8, max_imbalance=1.0)
    assert len({submit(hot, work(str(n), "the same prompt for everybody")) for n in range(8)}) == 1


def test_another_tenants_prefix_is_nobodys_business() -> None:
    text = [ord(c) for c in "the very same prompt"]
    assert not set(blocks_of(text, "one", 4)) & set(blocks_of(text, "two", 4))
    router = router_of("a", "b", capacity=16)
    first = submit(router, work("1", "the very same prompt", tenant="one"))
    assert submit(router, work("2", "the very same prompt", tenant="two")) != first, "it is the shorter queue"


def test_a_tenants_task_goes_where_drafters_have_learned_it() -> None:
    router = router_of("a", "b", "c", capacity=16)
    first = submit(router, work("1", tenant="t", task="sql"))
    submit(router, work("2", tenant="u", task="sql"))
    router.finish("1", 0.0)
    assert submit(router, work("3", tenant="t", task="sql")) == first
    assert submit(router, work("4", tenant="v", task="sql")) not in (first,)


def test_what_a_replica_holds_is_bounded_and_forgotten_from_the_end() -> None:
    index = FleetPrefixes()
    index.add_replica("a", 6)
    long, other = blocks_of(range(20), "", 4), blocks_of(range(50, 62), "", 4)
    index.use("a", long)
    index.use("a", other)
    assert index.num_blocks("a") == 6
    assert index.num_known("a", other) == 3
    assert index.num_known("a", long) == 3, "its last two blocks went first"
    index.drop_replica("a")
    assert not index.holders(long[0])
    assert index.known_anywhere(long) == 0


# --- the queue in front ----------------------------------------------------------------------------------------


def test_the_queue_is_bounded_and_says_when_to_come_again() -> None:
    router = router_of("a", capacity=1, max_waiting=3)
    for n in range(4):
        router.submit(work(str(n)), 0.0)
    with pytest.raises(OverloadedError, match="too many") as refused:
        router.submit(work("4"), 0.0)
    assert refused.value.retry_after_s == 1
    for n in range(3):
        router.finish(str(n), 10.0 * (n + 1))
        router.submit(work(f"new {n}"), 10.0 * (n + 1))
    with pytest.raises(OverloadedError) as refused:
        router.submit(work("5"), 30.0)
    assert refused.value.retry_after_s == 40, "an answer in ten seconds, four of them"
    assert router.integrity() == []


def test_accounts_take_turns_whatever_users_they_name() -> None:
    router = router_of("a", capacity=2)
    for account in ("loud", "quiet"):
        assert submit(router, work(f"{account} running", tenant=account)) == "a"
    for n in range(4):
        assert router.submit(work(f"loud {n}", tenant=f"loud/user {n}"), 0.0) == []
    for n in range(2):
        assert router.submit(work(f"quiet {n}", tenant="quiet/one"), 0.0) == []
    order, running = [], ["loud running", "quiet running"]
    for _ in range(6):
        start = start_of(router.finish(running.pop(0), 0.0))
        running.append(start.request)
        order.append(start.request)
    assert order == ["loud 0", "quiet 0", "loud 1", "quiet 1", "loud 2", "loud 3"]
    assert router.integrity() == []


def test_an_account_with_nothing_running_does_not_wait_for_another_ones_answers() -> None:
    """The engine of a replica shares its places by account; it is given answers of so many accounts and no more."""
    router = router_of("a", "b", capacity=2)
    for n in range(6):
        router.submit(work(f"loud {n}", tenant="loud"), 0.0)
    assert router.queue.num_answers == 2
    given = Counter(submit(router, work(f"quiet {n}", tenant=f"quiet {n}")) for n in range(6))
    assert given == {"a": 3, "b": 3}
    assert router.submit(work("its second", tenant="quiet 0"), 0.0) == [], "it has one running"
    assert router.submit(work("late", tenant="late"), 0.0) == [], (
        "twice as many accounts as places are enough"
    )
    assert start_of(router.abandon("quiet 1", 0.0)).request == "late", "before what the others have waiting"
    assert router.integrity() == []


@pytest.mark.parametrize("how", ["many", "resumed"])
def test_however_much_one_account_has_at_a_replica_another_one_gets_its_share(how: str) -> None:
    router = router_of("a", capacity=2)
    if how == "many":
        submit(router, work("loud", tenant="loud", num_answers=40))
    else:
        for n in range(20):
            submit(router, work(str(n), tenant="loud"))
            router.set_paused(str(n), True, 0.0)
        for n in range(20):
            router.set_paused(str(n), False, 0.0)
    assert router.fleet["a"].load >= 20
    assert submit(router, work("quiet", tenant="quiet", num_answers=3)) == "a"
    assert router.submit(work("more", tenant="loud"), 0.0) == []
    assert router.integrity() == []


def test_what_goes_on_is_not_overtaken_by_new_accounts_without_end() -> None:
    router = router_of("a", "b", capacity=1, hang_timeout_s=1e6)
    for name in ("1", "2", "3", "4"):
        submit(router, work(name, tenant=name))
    assert router.leave("b", 0.0) == [], "a has twice its capacity"
    assert [ticket.work.id for ticket in router.queue] == ["2", "4"]
    for n in range(3):
        assert router.submit(work(f"new {n}", tenant=f"new {n}"), 1.0) == []
    assert router.finish("1", 2.0) == []
    assert router.finish("3", 3.0) == [Start("2", "a", 2)]
    assert router.finish("2", 4.0) == [Start("4", "a", 2), Start("new 0", "a", 1)]
    assert router.integrity() == []


def test_what_waits_for_its_turn_at_a_full_replica_has_not_stalled() -> None:
    router = router_of("a", capacity=1, stall_timeout_s=5.0)
    for account in ("one", "two"):
        submit(router, work(account, tenant=account))
    router.passed_on("two", 1, 1, 4.0)
    router.hear("a", ReplicaReport(), 6.0)
    assert router.tick(6.0) == []
    assert router.join(info("b", 1), 6.0) == []
    assert router.tick(6.0) == [Cancel("one", "a", 1), Start("one", "b", 2)], "here it need not wait"
    router.hear("a", ReplicaReport(), 10.0)
    assert router.tick(10.0) == [Cancel("two", "a", 1), Start("two", "a", 2)], "this one was alone"
    assert router.integrity() == []


def test_of_stalled_answers_only_those_move_for_which_a_place_is_free() -> None:
    router = router_of("a", capacity=2, stall_timeout_s=5.0)
    for n in range(4):
        submit(router, work(str(n), tenant=str(n)))
    router.join(info("b", 1), 1.0)
    for name in ("a", "b"):
        router.hear(name, ReplicaReport(), 6.0)
    assert router.tick(6.0) == [Cancel("0", "a", 1), Start("0", "b", 2)]
    assert router.fleet["a"].load == 3
    assert router.integrity() == []


# --- answers that are not read ---------------------------------------------------------------------------------


def test_a_paused_answer_leaves_its_place_to_others_and_takes_it_back() -> None:
    router = router_of("a", capacity=2)
    submit(router, work("unread", num_answers=2))
    router.submit(work("1"), 0.0)
    router.submit(work("2"), 0.0)
    orders = router.set_paused("unread", True, 1.0)
    assert orders == [SetPaused("unread", "a", 1, True), Start("1", "a", 1), Start("2", "a", 1)]
    assert (router.fleet["a"].load, router.num_paused) == (2, 2)
    assert router.set_paused("unread", True, 1.0) == []
    assert router.passed_on("unread", 1, 1, 1.0), "it was under way"
    assert router.set_paused("unread", False, 2.0) == [SetPaused("unread", "a", 1, False)]
    assert (router.fleet["a"].load, router.num_paused) == (4, 0), "more than its capacity"
    assert router.integrity() == []
    assert router.submit(work("3"), 2.0) == []
    assert router.finish("1", 3.0) == []
    assert router.finish("2", 3.0) == []
    router.set_paused("unread", True, 4.0)
    assert router.abandon("unread", 4.0) == [Cancel("unread", "a", 1)]
    assert (router.fleet["a"].load, router.num_paused) == (1, 0)
    assert router.set_paused("unread", False, 4.0) == []
    assert router.integrity() == []


def test_a_paused_answer_does_not_stall_but_has_its_deadline() -> None:
    router = router_of("a", "b", stall_timeout_s=5.0, hang_timeout_s=1e6)
    name = submit(router, work("1", deadline_s=100.0))
    router.set_paused("1", True, 1.0)
    assert router.tick(60.0) == []
    router.set_paused("1", False, 60.0)
    assert router.tick(64.0) == []
    assert router.tick(66.0)[0] == Cancel("1", name, 1)
    router.set_paused("1", True, 67.0)
    assert isinstance(router.tick(100.0)[1], Fail)
    assert router.integrity() == []


def test_a_paused_answer_bars_no_new_ones_while_another_replica_drains() -> None:
    router = router_of("a", "b", capacity=4, max_waiting=3)
    for n in range(8):
        submit(router, work(str(n)))
    router.drain("a", 0.0)
    router.set_paused(next(iter(router.fleet["b"].requests)), True, 0.0)
    assert (router.fleet["a"].load, router.fleet["b"].load, router.num_paused) == (3, 4, 1)
    assert router.submit(work("new"), 0.0) == [], "it waits"
    assert router.integrity() == []


@pytest.mark.parametrize("how", ["lost", "drained", "given back"])
def test_a_paused_answer_goes_on_elsewhere_paused_without_free_places(how: str) -> None:
    router = router_of("a", capacity=1, max_fruitless_attempts=1)
    submit(router, work("unread"))
    router.passed_on("unread", 1, 5, 0.0)
    router.set_paused("unread", True, 0.0)
    if how == "given back":
        submit(router, work("other"))
        orders, where = router.give_back("unread", 1, 1.0), "a"
    else:
        router.join(info("b", 1), 0.0)
        given = Counter(submit(router, work(tenant, tenant=tenant)) for tenant in "opqr")
        assert given == {"a": 2, "b": 2}, "twice the capacity: they take nothing more that makes tokens"
        orders, where = (router.leave if how == "lost" else router.drain)("a", 1.0), "b"
    moved = [order for order in orders if order.request == "unread" and not isinstance(order, Cancel)]
    assert moved == [Start("unread", where, 2), SetPaused("unread", where, 2, True)]
    load = router.fleet[where].load
    assert router.integrity() == []
    assert router.set_paused("unread", False, 2.0) == [SetPaused("unread", where, 2, False)]
    assert router.fleet[where].load == load + 1
    assert router.integrity() == []


def test_what_is_paused_while_it_waits_stays_so() -> None:
    router = router_of("a", capacity=1)
    submit(router, work("unread"))
    router.leave("a", 0.0)
    assert router.set_paused("unread", True, 1.0) == []
    assert router.join(info("b"), 2.0) == [Start("unread", "b", 2), SetPaused("unread", "b", 2, True)]
    assert router.fleet["b"].load == 0


def test_what_is_paused_before_it_has_begun_waits_and_others_go_before_it() -> None:
    """A request of several prompts has one reader, who may have enough to read from the first of them."""
    router = router_of("a", capacity=2)
    submit(router, work("1", num_answers=2))
    for name in ("2", "3"):
        router.submit(work(name), 0.0)
    assert router.set_paused("2", True, 0.0) == []
    assert router.finish("1", 1.0) == [Start("3", "a", 1)]
    assert submit(router, work("4"), 2.0) == "a"
    router.drain("a", 2.0)
    moved = router.join(info("b", 2), 2.0)
    assert [order for order in moved if isinstance(order, Start)] == [Start("3", "b", 2), Start("4", "b", 2)]
    assert router.set_paused("2", False, 3.0) == []
    assert router.finish("4", 3.0) == [Start("2", "b", 1)]
    assert router.integrity() == []


def test_lost_paused_answers_are_spread_over_equal_replicas() -> None:
    router = router_of("a")
    for n in range(4):
        submit(router, work(str(n)))
        router.set_paused(str(n), True, 0.0)
    for name in ("b", "c"):
        router.join(info(name), 0.0)
    moved = Counter(order.replica for order in router.leave("a", 1.0) if isinstance(order, Start))
    assert moved == {"b": 2, "c": 2}


def test_paused_answers_are_bounded_as_waiting_ones_are() -> None:
    router = router_of("a", capacity=2, max_waiting=3)
    for n in range(4):
        submit(router, work(str(n)))
        router.set_paused(str(n), True, 0.0)
    assert submit(router, work("4")) == "a"
    with pytest.raises(OverloadedError, match="too many"):
        router.submit(work("5"), 0.0)
    router.abandon("0", 0.0)
    assert submit(router, work("6")) == "a"
    with pytest.raises(OverloadedError, match="too many"):
        router.submit(work("7"), 0.0)
    router.abandon("1", 0.0)
    assert router.submit(work("8"), 0.0) == [], "it waits"
    with pytest.raises(OverloadedError, match="too many"):
        router.submit(work("9"), 0.0)
    assert router.counts.refused == 3
    assert router.integrity() == []


def test_a_deadline_that_cannot_be_met_is_refused_early_and_one_that_passes_ends_the_request() -> None:
    router = router_of("a", capacity=1)
    with pytest.raises(OverloadedError, match="cannot be complete"):
        router.submit(work("gone", deadline_s=0.0), 0.0)
    for n in range(4):
        router.submit(work(str(n)), 0.0)
    for n in range(3):
        router.passed_on(str(n), 1, 1, 10.0 * n + 1)
        router.finish(str(n), 10.0 * (n + 1))
    router.submit(work("4"), 30.0)
    with pytest.raises(OverloadedError, match="it would take") as refused:
        router.submit(work("tight", deadline_s=35.0), 30.0)
    assert refused.value.is_deadline
    router.submit(work("fits", deadline_s=60.0), 30.0)
    assert submit(router, work("of another account", tenant="new", deadline_s=42.0), 30.0) == "a", (
        "it need not wait"
    )
    orders = router.tick(60.0)
    assert Fail("fits", "the answer was not complete by its deadline", True) in orders
    assert router.integrity() == []


def test_one_slow_answer_does_not_bar_all_others() -> None:
    router = router_of("a", capacity=2)
    router.submit(work("slow"), 0.0)
    router.passed_on("slow", 1, 1, 100.0)
    router.finish("slow", 100.0)
    assert submit(router, work("next", deadline_s=110.0), 100.0) == "a"


# --- failover --------------------------------------------------------------------------------------------------


def test_a_dead_replicas_requests_go_on_elsewhere_first() -> None:
    router = router_of("a", "b", capacity=1)
    assert submit(router, work("1")) == "a"
    assert submit(router, work("2")) == "b"
    router.submit(work("waits"), 0.0)
    assert router.passed_on("1", 1, 5, 0.0)
    assert router.leave("a", 1.0) == [], "there is no room yet"
    [start] = router.finish("2", 2.0)
    assert start == Start("1", "b", 2), "before those that have not begun"
    assert not router.passed_on("1", 1, 3, 2.0), "what the dead one still says is dropped"
    assert router.passed_on("1", 2, 3, 2.0)
    assert router.integrity() == []


def test_a_silent_replica_loses_its_requests_and_is_ready_again_when_it_speaks() -> None:
    router = router_of("a", "b", hang_timeout_s=5.0)
    name = submit(router, work("1"))
    other = "b" if name == "a" else "a"
    router.hear(other, ReplicaReport(), 6.0)
    assert router.tick(6.0) == [Start("1", other, 2)]
    assert router.fleet[name].health is Health.SILENT
    assert submit(router, work("2"), 6.0) == other
    router.hear(name, ReplicaReport(), 7.0)
    assert submit(router, work("3"), 7.0) == name


def test_a_request_that_stalls_on_a_living_replica_moves() -> None:
    router = router_of("a", "b", stall_timeout_s=5.0)
    name = submit(router, work("1"))
    for at in range(1, 7):
        for replica in "ab":
            router.hear(replica, ReplicaReport(), float(at))
        orders = router.tick(float(at))
    assert orders[0] == Cancel("1", name, 1)
    assert isinstance(orders[1], Start)


def test_a_draining_replica_keeps_its_requests_until_there_is_room() -> None:
    router = router_of("a", "b", capacity=1)
    submit(router, work("1"))
    submit(router, work("2"))
    assert router.drain("a", 1.0) == []
    assert router.passed_on("1", 1, 1, 1.0), "it goes on meanwhile"
    assert router.finish("2", 2.0) == [Cancel("1", "a", 1), Start("1", "b", 2)]
    assert router.leave("a", 3.0) == []
    assert router.counts.lost_replicas == 0
    assert router.integrity() == []


def test_what_stops_every_replica_that_it_is_given_to_ends_with_an_error() -> None:
    router = router_of(*"abcdef", max_fruitless_attempts=3)
    name = submit(router, work("poison"))
    for _ in range(2):
        name = start_of(router.leave(name, 1.0)).replica
    [fail] = router.leave(name, 1.0)
    assert isinstance(fail, Fail)
    assert "one after another" in fail.message
    assert router.num_under_way == 0
    assert router.integrity() == []


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_a_replica_that_is_lost_gets_nothing_of_what_is_shared_out(how: str) -> None:
    router = router_of(max_fruitless_attempts=2, hang_timeout_s=5.0)
    router.join(info("r1", 1), 0.0)
    assert submit(router, work("a")) == "r1"
    router.join(info("r2", 2), 0.0)
    assert [submit(router, work("b")), submit(router, work("c"))] == ["r2", "r2"]
    assert router.submit(work("d"), 0.0) == []
    router.leave("r1", 0.0)
    assert start_of(router.abandon("b", 0.0)) == Start("a", "r2", 2)
    orders = router.leave("r2", 0.0) if how == "gone" else router.tick(6.0)
    assert [type(order) for order in orders] == [Fail]
    assert router.integrity() == []
    assert router.num_under_way == 2


def test_without_any_replica_it_waits_for_one_but_not_for_ever() -> None:
    router = router_of("a", failover_timeout_s=30.0)
    submit(router, work("1"))
    router.leave("a", 0.0)
    assert router.tick(29.0) == []
    assert router.join(info("c"), 29.5) == [Start("1", "c", 2)]
    router.leave("c", 30.0)
    assert isinstance(router.tick(61.0)[0], Fail)


# --- unlike replicas -------------------------------------------------------------------------------------------


def test_a_replica_of_another_model_is_refused_in_a_line() -> None:
    router = router_of("a")
    with pytest.raises(DeployError, match="replica b serves another model than replica a") as error:
        router.join(info("b", fingerprint=Fingerprint("another", "bits")), 0.0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("policy", ["refuse", "say"])
def test_an_answer_crosses_to_other_arithmetic_only_where_it_is_said(policy: str) -> None:
    router = router_of("a", unlike_replicas=policy, failover_timeout_s=10.0)
    router.join(info("z", fingerprint=OTHER_BITS), 0.0)
    assert submit(router, work("1")) == "a"
    router.passed_on("1", 1, 2, 0.0)
    fresh = router.submit(work("fresh"), 0.0)
    assert start_of(fresh).replica == "z", "a new request may begin anywhere"
    orders = router.leave("a", 1.0)
    ticket = router.ticket("1")
    assert ticket is not None
    if policy == "say":
        assert start_of(orders).replica == "z"
        assert ticket.crossed_unlike
        return
    assert orders == []
    router.hear("z", ReplicaReport(), 12.0)
    assert Fail("1", "no replica was there to go on with the answer") in router.tick(12.0)


def test_what_has_not_begun_may_go_to_any_replica() -> None:
    router = router_of("a")
    router.join(info("z", fingerprint=OTHER_BITS), 0.0)
    assert submit(router, work("1")) == "a"
    assert start_of(router.leave("a", 1.0)).replica == "z"


def test_like_replicas_come_first_where_it_may_cross() -> None:
    router = router_of("a", "b", unlike_replicas="say")
    router.join(info("z", fingerprint=OTHER_BITS), 0.0)
    name = submit(router, work("1"))
    router.passed_on("1", 1, 1, 0.0)
    other = ({"a", "b"} - {name}).pop()
    submit(router, work("2"))
    router.fleet.add_load(router.fleet[other], "", 2)  # more than z has
    assert start_of(router.leave(name, 1.0)[:1]).replica == other
    router.fleet.add_load(router.fleet[other], "", -2)


# --- random histories ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_request_ends_once_and_no_token_counts_twice(seed: int) -> None:
    rng = random.Random(seed)
    router = Router(
        RouterConfig(
            max_waiting=rng.choice([5, 200]),
            hang_timeout_s=rng.choice([3.0, 20.0]),
            stall_timeout_s=30.0,
            failover_timeout_s=1e6,
            max_fruitless_attempts=1000,
        )
    )
    running: dict[str, Start] = {}  # what replicas work on, as the orders say
    paused: dict[str, bool] = {}  # what they were told last of each
    length, ended = {}, Counter[str]()
    now_s, names = 0.0, [f"r{n}" for n in range(rng.randint(1, 5))]

    def obey(orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, Start):
                running[order.request] = order
                paused[order.request] = False
            elif isinstance(order, SetPaused):
                assert running[order.request] == Start(order.request, order.replica, order.attempt)
                assert paused[order.request] is not order.paused
                paused[order.request] = order.paused
            elif isinstance(order, Cancel):
                if running.get(order.request) == Start(order.request, order.replica, order.attempt):
                    del running[order.request]
            else:
                ended[order.request] += 1
                running.pop(order.request, None)

    for number in range(1500):
        now_s += rng.random()
        name, event = rng.choice(names), rng.random()
        if event < 0.08:
            obey(router.join(info(name, rng.randint(1, 6)), now_s))
        elif event < 0.12:
            obey(router.leave(name, now_s))
        elif event < 0.15:
            obey(router.drain(name, now_s))
        elif event < 0.3:
            obey(router.hear(name, ReplicaReport(), now_s))
        elif event < 0.4:
            obey(router.tick(now_s))
        elif event < 0.6 and running:
            start = running[rng.choice(sorted(running))]
            attempt = start.attempt - (rng.random() < 0.2)
            counted = router.passed_on(start.request, attempt, rng.randint(0, 3), now_s)
            assert not (counted and attempt != start.attempt)
            if counted and rng.random() < 0.5:
                ended[start.request] += 1
                del running[start.request]
                obey(router.finish(start.request, now_s))
        elif event < 0.7 and length:
            obey(router.set_paused(rng.choice(list(length)[-40:]), rng.random() < 0.6, now_s))
        elif event < 0.73 and length:
            request = rng.choice(sorted(length))
            if router.ticket(request) is not None:
                ended[request] += 1
                obey(router.abandon(request, now_s))
                running.pop(request, None)
        else:
            deadline_s = now_s + rng.uniform(1, 100) if rng.random() < 0.2 else None
            text, tenant = "abcd" * rng.randint(0, 9), rng.choice(["t", "u/1", "u/2"])
            num_answers = rng.choice([1, 1, 3])
            each = work(str(number), text, tenant, num_answers=num_answers, deadline_s=deadline_s)
            length[each.id] = 1
            try:
                obey(router.submit(each, now_s))
            except OverloadedError:
                ended[each.id] += 1
        assert router.integrity() == []
        for request in running:
            ticket = router.ticket(request)
            assert ticket is None or ticket.replica is None or ticket.is_paused is paused[request]
    for request in sorted(length):
        obey(router.set_paused(request, False, now_s))
    for name in names:
        obey(router.join(info(f"new {name}"), now_s))
    while router.num_under_way:
        now_s += 0.1
        for name in names:
            router.hear(f"new {name}", ReplicaReport(), now_s)
        obey(router.tick(now_s))
        for request in sorted(running):
            start = running[request]
            if router.passed_on(request, start.attempt, 1, now_s):
                ended[request] += 1
                del running[request]
                obey(router.finish(request, now_s))
    assert set(ended) == set(length)
    assert set(ended.values()) == {1}
    assert router.integrity() == []
