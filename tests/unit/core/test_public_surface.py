"""Tests see what users see: how often they reach for a private name of something else may only fall."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
LIMITS = {
    "bench": 6,
    "control": 3,
    "exact": 1,
    "serve": 20,
    "train": 2,
    "unit": 32,
}
"""The most accesses by folder; a folder that is not here has none. What is left injects faults for which there is no
public name. Lower a limit when a test no longer needs it."""
NOT_OURS = frozenset(
    {
        "_attn_implementation",
        "_backbone_forward",
        "_config",
        "_exit",
        "_extra_content",
        "_fields_",
        "_forward_backbone",
        "_from_config",
        "_get_dtype_plan",
        "_get_proto_job_config",
        "_model_mapping",
        "_name",
        "_patch_lang_tensor",
        "_predecessor_ids",
        "_py_driver_sys_path",
        "_replace",
    }
)
"""Names of the standard library, of Transformers, Ray and httpx2, of libraries that train heads, and of the OpenAI
client's messages."""


def private_accesses(source: str) -> list[str]:
    """`thing._name` where `thing` is neither `self` nor `cls` nor `super()`, and `setattr(thing, "_name", ...)`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and not _is_own(node.value):
            found += [node.attr] * _is_private(node.attr)
        elif isinstance(node, ast.Call) and _called(node) in ("setattr", "getattr", "delattr"):
            names = [part.value for part in node.args[:2] if isinstance(part, ast.Constant)]
            found += [last for name in names if _is_private(last := str(name).rpartition(".")[2])]
        elif isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names if _is_private(alias.name)]
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NOT_OURS and name != "_"


def _is_own(thing: ast.expr) -> bool:
    if isinstance(thing, ast.Call):
        return _called(thing) == "super"
    return isinstance(thing, ast.Name) and thing.id in ("self", "cls")


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def test_no_folder_reaches_for_more_private_names() -> None:
    counts: Counter[str] = Counter()
    where: list[str] = []
    for file in sorted(TESTS.rglob("*.py")):
        found = private_accesses(file.read_text(encoding="utf-8"))
        counts[file.relative_to(TESTS).parts[0]] += len(found)
        where += [f"{file.relative_to(TESTS)}: {name}" for name in found]
    too_many = {folder: number for folder, number in counts.items() if number > LIMITS.get(folder, 0)}
    assert too_many == {}, "\n".join(where)


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("engine._requests", 1),
        ("a.b._c._d()", 2),
        ("self._mine + cls._ours + super()._theirs()", 0),
        ("self.engine._requests", 1),
        ("engine.__class__", 0),
        ("monkeypatch.setattr(module, '_call', other)", 1),
        ("monkeypatch.setattr('package.module._call', other)", 1),
        ("monkeypatch.setattr(module, 'call', other)", 0),
        ("from package.module import _call, other", 1),
        ("os._exit(3)", 0),
    ],
)
def test_what_counts(source: str, number: int) -> None:
    assert len(private_accesses(source)) == number
