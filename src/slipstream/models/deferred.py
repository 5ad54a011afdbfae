"""Modules of other packages that are imported when they are first used, not when something mentions them.

PyTorch and Transformers import, on the way to a decoder, what serves other ends: distributed tensors, the compiler,
continuous batching, losses of object detectors. Inside `deferred(…)` such a module is replaced by one whose names are
placeholders. A placeholder imports the real module when it is called or read, so that nothing that worked without this
file stops working; `isinstance(x, placeholder)` imports nothing, since a class that is not loaded has no instances.
The replacements leave `sys.modules` at the end of the block.

`defer_package` does the same for the `__init__` of a package whose submodules are wanted without it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, ModuleType
from typing import Any

_lock = threading.RLock()
"""Guards the finders. Nothing is imported while it is held."""
_package_lock = threading.RLock()
"""Held while the `__init__` of a deferred package runs: other threads that need its names wait for their end."""

DYNAMO = "torch._dynamo"
_DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")
"""Names in `torch._dynamo`; PyTorch and Transformers decorate functions with them that run without a compiler too."""


class Placeholder:
    """A name of a deferred module. Using it imports the module; mentioning it, or `isinstance`, does not."""

    def __init__(self, module: str, name: str) -> None:
        self.__dict__.update(_module=module, _name=name, __name__=name, __module__=module)

    def _real(self) -> Any:
        return getattr(_import_really(self._module), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not _is_loaded(self._module):
            raise AttributeError(name)  # `typing` and `functools` look such names up in everything
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._real()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._real()

    def __bool__(self) -> bool:
        return bool(self._real())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._real())

    def __len__(self) -> int:
        return len(self._real())

    def __instancecheck__(self, instance: Any) -> bool:
        return _is_loaded(self._module) and isinstance(instance, self._real())

    def __subclasscheck__(self, cls: type) -> bool:
        return _is_loaded(self._module) and issubclass(cls, self._real())

    def __or__(self, other: Any) -> Any:
        return Any  # in annotations that are computed

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (_stand_in(self._module, self._name),)


class _Deferred(ModuleType):
    """What is in `sys.modules` for a deferred module while a `deferred` block runs.

    Another thread that finds it there meanwhile, and code that has kept it, get the real module's names.
    """

    def __init__(self, name: str, finder: _Finder) -> None:
        super().__init__(name)
        self.__dict__["_finder"] = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._finder not in _finders or not self._finder.is_mine():
            return getattr(_import_really(self.__name__), name)
        if self.__name__ == DYNAMO and name in _DECORATORS:
            return _dynamo.decorator(name)
        return Placeholder(self.__name__, name)


class _Finder(MetaPathFinder, Loader):
    """Gives `_Deferred` modules for the named modules and what lies below them, until it is stopped.

    Only the thread that made it is answered, and only for packages that are installed.
    """

    def __init__(self, names: Sequence[str], known: Mapping[str, object]) -> None:
        self.names = tuple(names)
        self.known = known
        self._thread = threading.get_ident()

    def is_mine(self) -> bool:
        """Whether the calling thread is the one that made it."""
        return self._thread == threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not self.is_mine():
            return None
        if not any(name == deferred or name.startswith(deferred + ".") for deferred in self.names):
            return None
        if "." not in name and PathFinder.find_spec(name) is None:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in self.known.items():
            if name.rpartition(".")[0] == module.__name__:
                setattr(module, name.rpartition(".")[2], value)


class _Dynamo(MetaPathFinder):
    """Waits for a program that compiles something to import `torch._dynamo`, and then makes up for what was deferred:
    its decorators are applied, and placeholders, which it cannot trace, are replaced by what they stand for.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[ModuleType], object]] = []

    def decorator(self, name: str) -> Callable[..., Any]:
        """What one of the decorators does until the module is imported."""
        return self.disable if name == "disable" else functools.partial(self.mark, name)

    def mark(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.waiting.append(lambda module: getattr(module, name)(function))
        return function

    def disable(
        self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any
    ) -> Callable[..., Any]:
        """Nothing is compiled yet, so that a function which must not be compiled can be called as it is."""
        if function is None:
            return lambda function: self.disable(function, *args, **kwargs)
        called = [function]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return called[-1](*args, **kwargs)

        self.waiting.append(lambda module: called.append(module.disable(function, *args, **kwargs)))
        return call

    def watch(self) -> None:
        if DYNAMO not in sys.modules and self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._execute(execute, module)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        for apply in self.waiting:
            apply(module)
        self.waiting.clear()
        _replace_placeholders()


_dynamo = _Dynamo()
_finders: list[_Finder] = []


@contextlib.contextmanager
def deferred(names: Sequence[str], known: Mapping[str, object] | None = None) -> Iterator[None]:
    """Import the named modules, and what lies below them, only when their names are used; see above.

    `known` has the values of some names, by module and name, so that using these imports nothing.

    Modules that are imported already stay as they are. Once a placeholder is used inside the block, the rest of the
    block imports as usual.
    """
    finder = _Finder(names, known or {})
    with _lock:
        _finders.append(finder)
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        _stop(finder)
        _dynamo.watch()


def _stop(finder: _Finder) -> None:
    with _lock:
        if finder in _finders:
            _finders.remove(finder)
            sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _Deferred):
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if vars(sys.modules.get(parent, module)).get(child) is module:
                    delattr(sys.modules[parent], child)


def _is_loaded(name: str) -> bool:
    return name in sys.modules and not isinstance(sys.modules[name], _Deferred)


def _import_really(name: str) -> ModuleType:
    """The module itself. Ends every `deferred` block that runs, because what it imports must be real too.

    No lock is held while it is imported: other threads may wait for what this one imports.
    """
    if not _is_loaded(name):
        for finder in tuple(_finders):
            _stop(finder)
    module = importlib.import_module(name)  # waits where another thread is at it
    if DYNAMO in sys.modules:
        _replace_placeholders()
    return module


def _replace_placeholders() -> None:
    """Put the real objects where modules hold placeholders; those of a module that is half imported stay."""
    for user in list(sys.modules.values()):
        names = getattr(user, "__dict__", None) or {}  # some programs put None there
        for name, value in list(names.items()):
            if type(value) is Placeholder:
                with contextlib.suppress(Exception):
                    names[name] = getattr(importlib.import_module(value._module), value._name)


def _stand_in(module: str, name: str) -> type:
    """A base class with the methods of a class that is not imported; looking one up imports it.

    The methods' names are read from the module's compiled code, which does not run it.
    """
    spec = _without_finders(module)
    code = spec.loader.get_code(module) if spec is not None else None  # type: ignore[union-attr]
    body = next((part for part in code.co_consts if _is_code(part, name)), None) if code is not None else None
    if body is None:
        return _import_really(module).__dict__[name]  # type: ignore[no-any-return]
    methods = [part.co_name for part in body.co_consts if isinstance(part, CodeType)]
    return type(name, (), {"__module__": module} | {each: _Method(module, name, each) for each in methods})


def _is_code(part: object, name: str) -> bool:
    return isinstance(part, CodeType) and part.co_name == name


def _without_finders(module: str) -> ModuleSpec | None:
    """Where a module lies, found without the finders of this file."""
    parent = sys.modules[module.rpartition(".")[0]]
    return PathFinder.find_spec(module, parent.__path__)


class _Method:
    """A method of a stand-in: that of the real class, which is imported when the method is looked up."""

    def __init__(self, module: str, owner: str, name: str) -> None:
        self._where = module, owner, name

    def __get__(self, instance: Any, owner: type) -> Any:
        module, real, name = self._where
        method = inspect.getattr_static(getattr(_import_really(module), real), name)
        return method.__get__(instance, owner)


class _Package(ModuleType):
    """A package whose `__init__` runs when a name is looked up that is none of its submodules."""

    def __getattr__(self, name: str) -> Any:
        package = self.__name__
        if sys.modules.get(package) is not self:
            return getattr(sys.modules[package], name)
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        if PathFinder.find_spec(f"{package}.{name}", self.__path__) is not None:
            return importlib.import_module(f"{package}.{name}")
        if self.__dict__.get("_runs_in") == threading.get_ident():
            raise AttributeError(name)  # its `__init__` is to see an ordinary module
        with _package_lock:
            if sys.modules.get(package) is self and "_has_run" not in self.__dict__:
                self.__dict__["_runs_in"] = threading.get_ident()
                try:
                    self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
                    self.__dict__["_has_run"] = True
                finally:
                    del self.__dict__["_runs_in"]
        if sys.modules.get(package) is self:
            try:
                return self.__dict__[name]
            except KeyError:
                raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        return getattr(sys.modules[package], name)


def defer_package(name: str) -> None:
    """Let submodules of a package be imported without its `__init__`, which runs when one of its names is looked up.

    Does nothing where the package is imported already, or not installed. The packages above it must be imported.
    """
    with _lock:
        parent, _, child = name.rpartition(".")
        path = sys.modules[parent].__path__ if parent else None
        spec = PathFinder.find_spec(name, path)
        if name in sys.modules or spec is None or spec.submodule_search_locations is None:
            return
        package = importlib.util.module_from_spec(spec)
        package.__class__ = _Package
        if not parent:
            with contextlib.suppress(PackageNotFoundError):
                package.__dict__["__version__"] = version(name)
        sys.modules[name] = package
        if parent:
            setattr(sys.modules[parent], child, package)
