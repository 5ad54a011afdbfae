"""Deferred modules: not imported when they are mentioned, and the real ones when they are used."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.models.deferred import Placeholder, defer_package, deferred

USER = """
from heavy_kit.tensors import Sharded, scale, SIZES
from heavy_kit.mixins import Batching

class Model(Batching):
    def answer(self):
        return "answered"

def is_sharded(x):
    return isinstance(x, (Sharded, bytes))

def scaled(x: "Sharded") -> "Sharded | None":
    return scale(x)

def size(name):
    return SIZES[name], name in SIZES, len(SIZES), list(SIZES)
"""
TENSORS = """
class Sharded:
    pass

def scale(x):
    return 2 * x

SIZES = {"small": 1}
"""
MIXINS = """
class Batching:
    def batched(self):
        return "batched " + self.answer()

    @classmethod
    def kind(cls):
        return cls.__name__
"""
NAMES = ("heavy_kit.tensors", "heavy_kit.mixins")


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of three modules, two of them heavy, which nothing has imported."""
    package = tmp_path / "heavy_kit"
    package.mkdir()
    for name, text in {"__init__": "ALL = 3\n", "user": USER, "tensors": TENSORS, "mixins": MIXINS}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "heavy_kit"]:
        del sys.modules[name]


@pytest.fixture
def user(kit: Path) -> Any:
    """The module that mentions names of the heavy ones."""
    with deferred(NAMES):
        from heavy_kit import user  # type: ignore[import-not-found]

        assert {*NAMES} <= {*sys.modules}  # what stands for them
    return user


def loaded() -> list[str]:
    return [name for name in NAMES if name in sys.modules]


def test_what_is_mentioned_is_not_imported(user: Any) -> None:
    assert loaded() == []
    assert not hasattr(sys.modules["heavy_kit"], "tensors")
    assert type(user.Sharded) is Placeholder
    assert user.is_sharded(3) is False
    assert user.is_sharded(b"") is True
    assert user.Model().answer() == "answered"
    assert loaded() == []


@pytest.mark.parametrize(
    ("use", "result", "module"),
    [
        (lambda user: user.scaled(3), 6, "tensors"),
        (lambda user: user.size("small"), (1, True, 1, ["small"]), "tensors"),
        (lambda user: user.Model().batched(), "batched answered", "mixins"),
        (lambda user: user.Model.kind(), "Model", "mixins"),
    ],
    ids=["called", "read", "method", "classmethod"],
)
def test_what_is_used_is_the_real_one(user: Any, use: Callable[[Any], Any], result: Any, module: str) -> None:
    assert use(user) == result
    assert (
        f"heavy_kit.{module}" in loaded()
    )  # alone, unless PyTorch's compiler, which needs all of them, is there


def test_instances_of_a_class_that_is_loaded_later_are_known(user: Any) -> None:
    from heavy_kit.tensors import Sharded  # type: ignore[import-not-found]

    assert user.is_sharded(Sharded())
    assert issubclass(Sharded, user.Sharded)


def test_what_is_used_while_it_is_deferred_ends_the_deferring(kit: Path) -> None:
    (kit / "user.py").write_text("from heavy_kit.tensors import scale\nTWICE = scale(1)\n")
    finders = list(sys.meta_path)
    with deferred(NAMES):
        from heavy_kit import user
        from heavy_kit.mixins import Batching  # type: ignore[import-not-found]

        assert user.TWICE == 2
        assert type(Batching) is type
    assert [each for each in sys.meta_path if type(each).__name__ == "_Finder"] == [
        each for each in finders if type(each).__name__ == "_Finder"
    ]


def test_an_error_in_the_block_leaves_nothing_behind(kit: Path) -> None:
    (kit / "user.py").write_text("from heavy_kit.tensors import scale\nraise ValueError('broken')\n")
    with pytest.raises(ValueError, match="broken"), deferred(NAMES):
        import heavy_kit.user  # noqa: F401
    assert loaded() == []
    from heavy_kit.tensors import scale

    assert scale(2) == 4


def test_what_is_imported_already_stays(kit: Path) -> None:
    from heavy_kit.tensors import Sharded

    with deferred(NAMES):
        from heavy_kit import user
    assert user.Sharded is Sharded


def test_a_package_runs_when_one_of_its_names_is_asked_for(kit: Path) -> None:
    (kit / "__init__.py").write_text("from heavy_kit.tensors import SIZES\nALL = 3\n")
    defer_package("heavy_kit")
    from heavy_kit import mixins  # type: ignore[attr-defined]

    assert mixins.Batching.kind() == "Batching"
    assert "heavy_kit.tensors" not in sys.modules
    import heavy_kit  # type: ignore[import-not-found]

    assert not hasattr(heavy_kit, "nothing")
    assert heavy_kit.ALL == 3
    assert heavy_kit.SIZES == {"small": 1}
    with pytest.raises(AttributeError, match="nothing"):
        _ = heavy_kit.nothing


def test_other_threads_import_as_usual(kit: Path) -> None:
    """Beside a block that has deferred a module already, and without waiting for its end."""
    found: dict[str, Any] = {}

    def other() -> None:
        from heavy_kit.tensors import SIZES, Sharded

        found.update(SIZES, type=type(Sharded))

    with deferred(NAMES):
        import heavy_kit.user  # noqa: F401

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
    assert found == {"small": 1, "type": type}


def test_a_package_runs_once_for_all_threads(kit: Path) -> None:
    (kit / "__init__.py").write_text("import time\ntime.sleep(0.2)\nfrom heavy_kit.tensors import SIZES\n")
    defer_package("heavy_kit")
    import heavy_kit

    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(heavy_kit.SIZES)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == 4 * [{"small": 1}]


def test_packages_that_are_not_installed_are_not_deferred() -> None:
    with deferred(["a_package_of_nobody"]):
        assert importlib.util.find_spec("a_package_of_nobody") is None


def test_a_name_that_was_kept_is_true_or_false_as_the_real_one(user: Any) -> None:
    assert bool(user.scale) is True
