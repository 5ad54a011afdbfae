"""Versions on disk as one drafter may use them: which of them were learned on it, and each one loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

from slipstream.config import SpeculativeConfig
from slipstream.core.bounded import BoundedDict
from slipstream.draft.combine.versions import DraftVersion, VersionsDrafter
from slipstream.draft.methods import OWN_WEIGHTS
from slipstream.engine.engine import Engine
from slipstream.errors import LearnError
from slipstream.learn.learners.base_draft import BaseDraft, has_plain_head
from slipstream.learn.learners.learner_options import LearnerOptions
from slipstream.learn.learners.registry import make_learner
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.state import ScopeVersions
from slipstream.learn.versions.store import VersionStore

MAX_KNOWN = 1024
"""Versions of which is remembered on what drafter they were learned."""


class BaseVersions:
    """The versions of a folder besides the drafter that serves: those of others wait until theirs serves again."""

    def __init__(
        self,
        drafter: VersionsDrafter,
        base: BaseDraft,
        folder: LearnFolder,
        depth: int,
        on_waiting: Callable[[str], None],
    ) -> None:
        """`depth` is the length of the chains that are served; `on_waiting` gets each version of another drafter."""
        self._drafter, self._speculative = drafter, drafter.options.base()
        self.base, self.base_hash = base, base.digest()
        self._depth, self._on_waiting = depth, on_waiting
        self._store, self._files = VersionStore(folder), folder.checkpoints
        shutil.rmtree(self._files, ignore_errors=True)
        self._files.mkdir(mode=0o700, exist_ok=True)
        self._is_here: BoundedDict[str, bool] = BoundedDict(MAX_KNOWN)

    def has(self, version: str) -> bool:
        """Whether a version was learned on this drafter."""
        known = self._is_here.get(version)
        if known is None:
            known = self._is_here[version] = self._store.stands_on(version, self.base_hash)
            if not known:
                self._on_waiting(version)
        return known

    def known(self, scope: ScopeVersions) -> ScopeVersions:
        """The versions of a scope without those of other drafters."""
        return replace(
            scope,
            serving=scope.serving if scope.serving and self.has(scope.serving) else "",
            canary=scope.canary if scope.canary and self.has(scope.canary) else None,
            previous=tuple(version for version in scope.previous if not version or self.has(version)),
        )

    def load(self, version: str, tenant: str | None) -> DraftVersion:
        """Load a version, whose sha256 is checked, for its own tenant or else for `tenant`."""
        about = self._store.get(version)
        tensors = self._store.load(version)
        owner = about.tenant if about.tenant is not None else tenant
        folder = self._files / version
        try:
            learner = make_learner(about.learner, self.base, LearnerOptions(depth=self._depth))
            own = learner.version_options(tensors, folder)
            config = replace(self._speculative, options={**self._speculative.options, **own})
            return self._drafter.prepare(version, config, owner)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def promise(self, version: str) -> float:
        """The predicted speed of a version over what it was judged against; 1 for the base drafter, whose name is
        empty."""
        if not version:
            return 1.0
        try:
            return 1 + float(self._store.get(version).figures["judge"]["gain"])
        except (LearnError, KeyError, TypeError, ValueError):
            return 1.0


def base_of(engine: Engine) -> BaseDraft:
    """What an engine's `versions` stand on; raises `LearnError` where its logits are not those of the files and the
    weight format."""
    drafter = engine.drafter_as(VersionsDrafter)
    speculative: SpeculativeConfig = drafter.options.base()
    has_targets_weights = speculative.method in OWN_WEIGHTS
    if has_targets_weights and engine.config.lora is not None:
        raise LearnError(f"{speculative.method} does not learn with an adapter on the target; merge it first")
    drafting = engine.model if has_targets_weights else drafter.drafting_model()
    if drafting is not None and not has_plain_head(drafting.config):
        raise LearnError(f"{drafting.family} scales or caps its logits, and such models do not learn")
    return BaseDraft.of(speculative, engine.config.model, engine.model.weight_format.name)
