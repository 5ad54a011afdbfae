"""Older records, spread over tasks, that half of each batch is made of and that the judge looks at too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from slipstream.learn.records.served import Purpose, ServedRecord


def older_records(
    records: Iterable[ServedRecord], purpose: Purpose, num_records: int, seed: int = 0
) -> list[ServedRecord]:
    """Return at most `num_records` of a purpose, evenly from each task as far as there are. The seed decides which.

    A task that is not served any more keeps its share, so that it is not forgotten.
    """
    by_task: dict[str, list[ServedRecord]] = defaultdict(list)
    for record in records:
        if record.purpose is purpose:
            by_task[record.task].append(record)
    rng = np.random.default_rng(seed)
    orders = [[by_task[task][at] for at in rng.permutation(len(by_task[task]))] for task in sorted(by_task)]
    found: list[ServedRecord] = []
    for place in range(max(map(len, orders), default=0)):
        found += [order[place] for order in orders if place < len(order)]
    return found[:num_records]


def split(records: Seq[ServedRecord], purpose: Purpose) -> list[ServedRecord]:
    """Those of a purpose, in order."""
    return [one for one in records if one.purpose is purpose]


def training_parts(
    records: Seq[ServedRecord], num_latest: int, num_older: int, seed: int = 0
) -> tuple[list[ServedRecord], list[ServedRecord]]:
    """What a candidate learns from, of records in their order: the latest ones, and some of all of them.

    The latest count among all, so that some are learned again from the first candidate on: there is as much of a task
    that is seldom requested as of the others.
    """
    known = split(records, Purpose.TRAIN)
    return known[max(len(known) - num_latest, 0) :], older_records(known, Purpose.TRAIN, num_older, seed)


def judging_parts(
    held_out: Seq[ServedRecord], num_latest: int, num_older: int, seed: int = 0, *, least: int
) -> tuple[list[ServedRecord], list[ServedRecord]]:
    """What a candidate is judged on, from records in their order: the latest held-out ones, on which it must be faster,
    and of the older ones a holdout, which must not be forgotten.

    The figure of the old-data holdout counts without any benefit of doubt. Of fewer than `least` answers it would mean
    little, and one unlucky answer could refuse a good candidate for good: so few count among the latest.
    """
    known = split(held_out, Purpose.JUDGE)
    first = max(len(known) - num_latest, 0)
    if first < least:
        first = 0
    return known[first:], older_records(known[:first], Purpose.JUDGE, num_older, seed)
