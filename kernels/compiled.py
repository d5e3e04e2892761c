"""numba's `njit` with a cache that knows everything a loop is compiled of.

Numba compiles a loop together with the loops that it calls and with the constants that it names, but looks for changes only
in the loop's own file: after an edit of another file it would go on with the old loop, and after a comment in the same file
it would compile anew. Here a compiled loop is kept as long as the state of what it reaches stays: its code and that of all
functions that it calls, the values that it names, its options, and the versions of the packages that it uses.
"""

from __future__ import annotations

import dis
import enum
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, _CacheLocator
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic

from puna.kernels.placeholder import Placeholder

ROOT = Path(__file__).resolve().parents[1]
Compiler = Callable[[Callable[..., Any]], Any]


def njit(*, cache: bool = True, borrows: bool = False, **options: Any) -> Compiler:
    """`numba.njit(**options)`; with `cache` the compiled loop is kept on disk until something changes that it reaches.

    `borrows`: the loop makes no array and returns none, so that references need not be counted; numba refuses one that does.
    Where a tuple of ten arrays is handed on, a call takes some 10 ns in place of 150.
    """
    if borrows:
        options["_nrt"] = False

    def compile(function: Callable[..., Any]) -> Any:
        loop = numba.njit(**options)(function)
        if cache:
            loop._cache = LoopCache(function)
        return loop

    return compile


class LoopCache(FunctionCache):  # type: ignore[misc]
    """A loop's cache on disk; what it holds counts while the state of what the loop reaches is the same."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._impl_class = _LoopCacheImpl
        super().__init__(function)
        self._cache_file.__class__ = _Index

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        # Not before the loop's first use: then all names of its file are bound.
        self._cache_file._source_stamp = state(self._py_func)
        return super()._index_key(signature, codegen)


class _Index(IndexDataCacheFile):  # type: ignore[misc]
    """What a loop was compiled for: signatures, which name the classes of tuples that it was handed."""

    def _load_index(self) -> dict[Any, str]:
        try:
            found: dict[Any, str] = super()._load_index()
            return found
        except (ImportError, AttributeError):
            return {}  # another version of the program had such a class, this one has none


class _Locator(_CacheLocator):  # type: ignore[misc]
    """One folder per source file."""

    def __init__(self, file: str) -> None:
        path = Path(file).resolve()
        inside = path.is_relative_to(ROOT)
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts) if inside else path.stem
        place = name if inside else f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        self._folder = folder(ROOT) / place

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator:
        return cls(file)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return ""  # see LoopCache

    def get_disambiguator(self) -> str:
        return "loop"  # numba's is the line, which a comment moves


class _LoopCacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]


@cache
def folder(root: Path) -> Path:
    """Where compiled loops lie: NUMBA_CACHE_DIR, the checkout, or if that is read-only, the user's cache. OSError: nowhere."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(given)
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "puna"
    for base in (root / ".loops", home, Path(tempfile.gettempdir()) / "puna"):
        try:
            base.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(base, os.W_OK):
            return base
    raise OSError(f"no place for compiled loops: neither {root / '.loops'} nor {home} can be written; set NUMBA_CACHE_DIR")


# --- what a loop reaches ---------------------------------------------------------------------------------


def state(function: Callable[..., Any]) -> str:
    """Hash of everything that `function` is compiled of."""
    found: dict[str, str] = {}
    todo: list[Any] = [function]
    seen: set[int] = set()
    while todo:
        following = todo.pop()
        given = following.targetoptions if isinstance(following, Dispatcher) else {}
        # A set's order differs from process to process.
        options = repr([(name, sorted(value) if isinstance(value, set) else value) for name, value in sorted(given.items())])
        plain = _plain(following)
        if id(plain) in seen:
            continue
        seen.add(id(plain))
        parts = [_of_code(plain.__code__, plain.__doc__), options, *map(_of_value, plain.__defaults__ or ())]
        for name, value in _named(plain):
            if _plain(value) is None:
                parts.append(f"{name}={_of_value(value)}")
            else:
                parts.append(f"{name}:{_plain(value).__module__}.{_plain(value).__qualname__}")
                todo.append(value)
        name = f"{plain.__module__}.{plain.__qualname__}"
        found[name] = found.get(name, "") + hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return hashlib.sha256("\n".join(f"{name} {found[name]}" for name in sorted(found)).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """The Python function of a loop, a function or a placeholder of one; None of anything else.

    Numba's own functions are as its version, which its cache looks at.
    """
    if isinstance(value, Dispatcher):
        return value.py_func
    if isinstance(value, Placeholder):
        return value.function
    if isinstance(value, _Intrinsic):
        return value._defn
    return value if isinstance(value, FunctionType) and not value.__module__.startswith(("numba.", "llvmlite.")) else None


def _named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The global and enclosed values that a function may name, and what it may name in modules of ours."""
    names = sorted(set(_names(function.__code__)))
    scope = function.__globals__
    for name in names:
        if name in scope:
            yield name, scope[name]
            if isinstance(scope[name], ModuleType) and scope[name].__name__.partition(".")[0] == "puna":
                yield from ((f"{name}.{inner}", getattr(scope[name], inner)) for inner in names if hasattr(scope[name], inner))
    yield from zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _of_code(code: CodeType, documentation: str | None) -> str:
    """The instructions of a function as text, without lines and its docstring."""
    constants = list(code.co_consts)
    used = any(operation in dis.hasconst and at == 0 for operation, at in zip(code.co_code[::2], code.co_code[1::2], strict=True))
    if documentation is not None and constants[:1] == [documentation] and not used:
        constants[0] = None
    shown = [_of_code(c, None) if isinstance(c, CodeType) else _of_value(c) for c in constants]
    signature = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return "\n".join([code.co_code.hex(), code.co_exceptiontable.hex(), repr(signature), repr(names), *shown])


def _of_value(value: Any) -> str:
    """A value that numba can freeze into a loop, as text; of anything else its type, since no loop can hold it."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, np.ndarray):
        return f"array:{value.dtype.descr}:{value.shape}:{hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
    if isinstance(value, tuple):
        return f"{kind}({','.join(map(_of_value, value))})"
    if isinstance(value, frozenset):
        return f"{kind}({','.join(sorted(map(_of_value, value)))})"
    if isinstance(value, ModuleType):
        return f"module:{value.__name__}:{getattr(value, '__version__', '')}"
    if isinstance(value, type):
        return f"class:{value.__module__}.{value.__qualname__}:{getattr(value, '_fields', '')}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic | np.dtype | enum.Enum):
        return f"{kind}:{value!r}"
    return kind
