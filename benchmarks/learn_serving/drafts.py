"""A draft that is worse than it need be, and versions of it: better ones, broken ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from slipstream.assets import EMBEDDED_DRAFT
from slipstream.learn.learners.base_draft import BaseDraft
from slipstream.learn.learners.learner_options import LearnerOptions
from slipstream.learn.learners.registry import make_learner
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import RingIdentity
from slipstream.learn.storage.state import StateStore
from slipstream.learn.versions.store import Version, VersionStore

BASE_NOISE = 0.35
"""Noise of the base drafter's weights, in deviations of each matrix: a learner has something to gain."""
BROKEN_NOISE = 1.0
PROMISE = 0.3
"""Speed over the base drafter that a version by hand is said to have."""


def shaken(noise: float, seed: int) -> dict[str, torch.Tensor]:
    """The embedded draft's weights with noise."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: (
            one + noise * one.std() * torch.randn(one.shape, generator=rng) if one.ndim == 2 else one
        ).half()
        for name, one in _weights().items()
    }


@cache
def _weights() -> dict[str, torch.Tensor]:
    learner = make_learner("whole", BaseDraft(EMBEDDED_DRAFT), LearnerOptions())
    model, _ = learner.begin(None)
    return learner.tensors(model)


def make_base(folder: Path, noise: float = BASE_NOISE, seed: int = 0) -> str:
    """The draft that a server is started with, as a folder; returns it."""
    if not folder.exists():
        make_learner("whole", BaseDraft(EMBEDDED_DRAFT), LearnerOptions()).checkpoint(
            shaken(noise, seed), folder
        )
    return str(folder)


def add_version(
    folder: LearnFolder,
    identity: RingIdentity,
    base: str,
    noise: float,
    seed: int = 0,
    tenant: str | None = None,
) -> str:
    """A version that is whole and promises to be faster, whatever its weights are, beside the draft in the folder
    `base`; returns its id."""
    version = Version(
        learner="whole",
        model_hash=identity.model_hash,
        template_hash=identity.template_hash,
        base_hash=BaseDraft(base).digest(),
        tenant=tenant,
        figures={"judge": {"gain": PROMISE}},
    )
    in_use = StateStore(folder).read().in_use
    return VersionStore(folder).add(version, shaken(noise, seed), in_use=in_use).id
