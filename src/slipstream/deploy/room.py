"""Whether there is room for a deployment's replicas, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from slipstream.deploy.settings import DeploySettings

_WORDS = {"CPU": ("core", "--cpus"), "GPU": ("GPU", "--gpus")}


def shortage(settings: DeploySettings, has: Mapping[str, float], where: str) -> str:
    """What is missing for all replicas at once, and what would fit; empty where nothing is.

    `has` are the cores (`CPU`) and `GPU`s of `where`; a kind that it lacks is not looked at.
    """
    for kind, (word, flag) in _WORDS.items():
        each = settings.num_cpus if kind == "CPU" else settings.num_gpus
        if kind not in has or settings.num_replicas * each <= has[kind]:
            continue
        number = settings.num_replicas
        needed = f"{number} replicas of {_count(each, word)} need {_count(number * each, word)}"
        fit = math.floor(has[kind] / each)
        fewer = f"run {fit} (--replicas {fit})" if fit else "run them on a larger machine"
        share = f"give each less (as in {flag} {math.floor(100 * has[kind] / number) / 100:g})"
        advice = f"{fewer}, or {share}" if kind == "CPU" and has[kind] else fewer
        return f"{needed}, and {where} has {_count(has[kind], word)}: {advice}"
    return ""


def _count(number: float, word: str) -> str:
    return f"{number:g} {word}{'' if number == 1 else 's'}"
