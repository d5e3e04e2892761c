"""numba's `njit` with a cache that knows everything a loop is compiled of.

Numba compiles a loop together with the loops that it calls and with the constants that it names, but looks for changes only
in the loop's own file: after an edit of another file it would go on with the old loop, and after a comment in the same file
it would compile anew. Here a compiled loop is kept as long as the state of what it reaches stays: its code and that of all
functions that it calls, the values that it names, its options, and the versions of the packages that it uses.
"""

from __future__ import annotations

import dis
import enum
import glob
import hashlib
import importlib
import inspect
import io
import os
import pickle
import stat
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.dispatcher import Dispatcher
from numba.core.environment import Environment, lookup_environment
from numba.core.extending import _Intrinsic
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.core.types import containers

from puna.kernels.cpu.placeholder import Placeholder

ROOT = Path(__file__).resolve().parents[2]
SUM_BYTES = 4  # of the checksum behind a compiled loop
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
            loop._cache = LoopCache(function, loop.targetoptions)
        return loop

    return compile


class LoopCache(FunctionCache):  # type: ignore[misc]
    """A loop's cache on disk: a file for each state of what the loop reaches, and each signature and processor."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._impl_class = _LoopCacheImpl
        super().__init__(function)
        self._cache_file = _Files(Path(self._cache_path), self._impl.filename_base)
        self._options = options

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The compiled loop, if there is one.

        Numba's own method first loads all that it compiles with, .3 s. A loop that is compiled needs what manages its arrays alone.
        """
        rtsys.initialize(context)
        return self._load_overload(signature, context)

    def _index_key(self, signature: Any, codegen: Any) -> str:
        # Not before the loop's first use: then all names of its file are bound.
        known = (state(self._py_func, self._options), numba.__version__, str(signature), _tuples(signature), codegen.magic_tuple())
        return hashlib.sha256(repr(known).encode()).hexdigest()[:24]


class _Files:
    """Compiled loops by key, each in a file of its own that ends with its checksum: damaged machine code could do anything.

    Numba keeps an index beside its files: of two processes that compile one loop for two signatures the later takes the
    earlier's entry away, or gives its own entry the earlier's file; and another state of the code empties the index.
    """

    KEPT = 64  # of one loop: signatures times processors times states that are gone to and fro between

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def save(self, key: str, data: Any) -> None:
        made = self._folder / f"{self._name}.{key}.nbc"
        begun = made.with_suffix(f".{uuid.uuid4().hex[:16]}")
        packed = dumps(data)
        begun.touch(mode=0o644)
        begun.write_bytes(packed + _checksum(packed))
        begun.replace(made)
        stored = sorted(self._folder.glob(f"{glob.escape(self._name)}.*.nbc"), key=_written, reverse=True)
        for old in stored[self.KEPT :]:
            old.unlink(missing_ok=True)

    def load(self, key: str) -> Any:
        try:
            with (self._folder / f"{self._name}.{key}.nbc").open("rb") as file:
                if not _own(os.fstat(file.fileno())):
                    return None
                whole = file.read()
            sound = len(whole) > SUM_BYTES and whole[-SUM_BYTES:] == _checksum(memoryview(whole)[:-SUM_BYTES])
            return _Reader(io.BytesIO(whole)).load() if sound else None  # a disk was full, or is damaged
        except (FileNotFoundError, ImportError, AttributeError):
            return None  # not compiled yet, or it names a class that is gone

    def flush(self) -> None:
        for file in self._folder.glob(f"{glob.escape(self._name)}.*.nbc"):
            file.unlink(missing_ok=True)


def _own(status: os.stat_result) -> bool:
    """True if nobody but this user and root can have written the file: to read it is to run it."""
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _checksum(packed: bytes | memoryview) -> bytes:
    return zlib.crc32(packed).to_bytes(SUM_BYTES, "little")


class _Reader(pickle.Unpickler):
    """Reads a compiled loop as numba does, but for the modules of its operations on arrays, which cost .2 s and stay unused."""

    def find_class(self, module: str, name: str) -> Any:
        return _environment if name == "_rebuild_env" else super().find_class(module, name)


def _environment(module: str, constants: list[Any], name: str) -> Environment:
    """What machine code needs of a function that was compiled into it: its constants, and that its module is imported where that may
    register something (texts' hashes)."""
    known = lookup_environment(name)
    if known is None:
        if not module.startswith("numba.np."):
            importlib.import_module(module)
        known = Environment({"__name__": module})
        known.consts[:], known.env_name = constants, name
        Environment._memo[name] = known
    return known


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # another process has just removed it


def _tuples(kind: Any) -> list[Any]:
    """The classes of named tuples in a signature, with their fields: numba's text of a type has neither their module nor these."""
    if isinstance(kind, containers.BaseNamedTuple):
        made = kind.instance_class
        return [(made.__module__, made.__qualname__, kind.fields), *(_tuples(one) for one in kind.types)]
    return [_tuples(one) for one in kind] if isinstance(kind, tuple | containers.BaseTuple) else []


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
    """Where compiled loops lie: NUMBA_CACHE_DIR, the checkout, or if that is read-only, the user's cache. OSError: nowhere.

    They are pickles of machine code: outside the checkout a folder that is not this user's is passed over.
    """
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(given)
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "puna"
    own = root / ".loops"
    for base in (own, home, Path(tempfile.gettempdir()) / f"puna-{os.getuid()}"):
        try:
            base.mkdir(mode=0o755, parents=True, exist_ok=True)
            strange = base != own and base.stat().st_uid != os.getuid()
        except OSError:
            continue
        if os.access(base, os.W_OK) and not strange:
            return base
    raise OSError(f"no place for compiled loops: neither {root / '.loops'} nor {home} can be written; set NUMBA_CACHE_DIR")


# --- what a loop reaches ---------------------------------------------------------------------------------


# Of a code object's flags those that say what the function is. Numba takes CO_OPTIMIZED away from a loop that runs under a profiler.
MEANT = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def state(function: Callable[..., Any], options: dict[str, Any] | None = None) -> str:
    """Hash of everything that `function` is compiled of, with these options."""
    found: dict[str, str] = {}
    todo: list[Any] = [function]
    seen: set[int] = set()
    while todo:
        following = todo.pop()
        given = following.targetoptions if isinstance(following, Dispatcher) else (options or {}) if following is function else {}
        plain = _plain(following)
        if id(plain) in seen:
            continue
        seen.add(id(plain))
        parts = [_of_code(plain.__code__, plain.__doc__), _of_options(given), *map(_of_value, plain.__defaults__ or ())]
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


@cache
def _of_code(code: CodeType, documentation: str | None) -> str:
    """The instructions of a function as text, without lines and its docstring."""
    constants = list(code.co_consts)
    if documentation is not None and constants[:1] == [documentation] and not _uses_first(code):
        constants[0] = None
    shown = [_of_code(c, None) if isinstance(c, CodeType) else _of_value(c) for c in constants]
    signature = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & MEANT)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return "\n".join([code.co_code.hex(), code.co_exceptiontable.hex(), repr(signature), repr(names), *shown])


def _uses_first(code: CodeType) -> bool:
    """Whether an instruction asks for the first constant."""
    return any(operation in dis.hasconst and at == 0 for operation, at in zip(code.co_code[::2], code.co_code[1::2], strict=True))


def _of_options(given: dict[str, Any]) -> str:
    """A loop's options; a set's order differs from process to process."""
    return repr([(name, sorted(value) if isinstance(value, set) else value) for name, value in sorted(given.items())])


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
