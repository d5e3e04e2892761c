"""`njit` with a cache on disk that is safe for several processes and notices edits of other files.

Numba's own cache looks for changes in the loop's file alone, although the machine code includes functions and constants of other files. It
also keeps one index for all signatures, which two processes that compile at once can corrupt, and it runs damaged files. Here each compiled
loop is a separate file with a checksum. The file's name holds a digest of the source files that the loop's file imports, of the signature
and of the processor.

The wheel and the image include loops compiled for common processors, in `SHIPPED`. A loop is loaded from this machine's cache, else from
`SHIPPED` if this processor has the target's instructions, else it is compiled. Loops that sum in any order are never shipped: their bits
depend on the processor."""

from __future__ import annotations

import glob
import hashlib
import os
import pickle
import platform
import re
import stat
import sys
import sysconfig
import tempfile
import uuid
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba.core.caching import CompileResultCacheImpl
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.core.types import containers

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = Path(__file__).parent / "compiled"  # shipped loops, in a folder per target; made by `deploy/compile.py --ship`
TARGETS = {"x86_64": ("x86-64-v3", "avx avx2 bmi bmi2 cx16 f16c fma lzcnt movbe popcnt sahf sse4.2 xsave"), "aarch64": ("generic", "")}
"""Machine → (LLVM's name of the processor that shipped loops are compiled for, instructions that it must have)."""
FILES_PER_LOOP = 64  # maximum files, for several signatures, processors and versions of the code
SUM_BYTES = 4  # bytes of the checksum after a compiled loop
APART = ("puna.storage", "puna.stages.contract")  # packages that hold no code that a loop could use
LIBRARIES = {"site-packages", "dist-packages"}  # folders of installed libraries, of any environment on the module path
FUNCTION = re.compile(r"^(?:@|def |class |async )[^\n]*\n(?:(?:[ \t)][^\n]*)?\n)*", re.MULTILINE)
"""Pattern of a top-level function or class: imports inside it do not run when the file is imported."""
IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (\([^)]*\)|[^\n#]+)|import ([^\n#]+))", re.MULTILINE)
Compiler = Callable[[Callable[..., Any]], Any]


def njit(*, cache: bool = True, borrows: bool = False, **options: Any) -> Compiler:
    """Return `numba.njit(**options)`; with `cache`, a compiled loop on disk is used until a source file on which the loop depends changes.

    `borrows`: compile without reference counts; numba then refuses a loop that creates or returns an array. A call that passes a tuple of
    ten arrays then takes about 10 ns, not 150."""
    if borrows:
        options["_nrt"] = False

    def compile(function: Callable[..., Any]) -> Any:
        loop = numba.njit(**options)(function)
        if cache:
            loop._cache = LoopCache(function, exact=not options.get("fastmath"))
        return loop

    return compile


class LoopCache:
    """The compiled versions of one loop on disk, with the interface of a cache that numba's dispatchers use."""

    def __init__(self, function: Callable[..., Any], exact: bool = True) -> None:
        self._function, self._results = function, _Results()
        file = Path(function.__code__.co_filename).resolve()
        inside = file.is_relative_to(ROOT)
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts) if inside else f"{file.stem}_{_sha(str(file))[:8]}"
        self.cache_path = str(folder(ROOT) / name)
        compiled = shipped_folder() if inside and exact else None
        self._shipped = compiled / name if compiled is not None else None
        self._name = re.sub(r"\W+", "_", function.__qualname__)

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the compiled loop for a signature; None if there is none, or the file is damaged or not trusted (`_own`)."""
        if not self._has_source:
            return None
        rtsys.initialize(context)  # numba's own method first loads the whole compiler, which takes .3 s
        loop = self._load(self._file(signature, context), context)
        if loop is None and self._shipped is not None:
            processor = (context.codegen().magic_tuple()[0], self._shipped.parent.name, "")
            loop = self._load(self._file(signature, context, self._shipped, processor), context)
        return loop

    def _load(self, path: Path, context: Any) -> Any:
        try:
            with path.open("rb") as file:
                # Whoever can write a shipped loop can write the code beside it, too.
                if path.parent != self._shipped and not _own(os.fstat(file.fileno())):
                    return None
                packed = file.read()
            sound = len(packed) > SUM_BYTES and packed[-SUM_BYTES:] == _checksum(packed[:-SUM_BYTES])
            return self._results.rebuild(context, pickle.loads(packed[:-SUM_BYTES])) if sound else None  # noqa: S301 - this user's own
        except (FileNotFoundError, PermissionError, ImportError, AttributeError):
            return None  # not compiled yet, another user's, or it names a class that is gone

    def save_overload(self, signature: Any, result: Any) -> None:
        """Write a compiled loop, unless it holds addresses of this process or has no source file; keep the last `FILES_PER_LOOP` files."""
        if not self._has_source or result.lifted or result.library.has_dynamic_globals:
            return
        file = self._file(signature, result.target_context)
        packed = dumps(self._results.reduce(result))
        temporary = file.with_suffix(f".{uuid.uuid4().hex[:16]}")
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(mode=0o644)
        temporary.write_bytes(packed + _checksum(packed))
        temporary.replace(file)
        for old in sorted(self._files(), key=_mtime, reverse=True)[FILES_PER_LOOP:]:
            old.unlink(missing_ok=True)

    @property
    def _has_source(self) -> bool:
        """True if the loop's source file can be read. Code of a notebook or of `python -c` has no file, so edits would go unnoticed."""
        return bool(_read(self._function.__module__)[0])

    def flush(self) -> None:
        """Delete all compiled versions of the loop."""
        for file in self._files():
            file.unlink(missing_ok=True)

    def _file(self, signature: Any, context: Any, place: Path | None = None, processor: tuple[str, ...] = ()) -> Path:
        cells = [cell.cell_contents for cell in self._function.__closure__ or ()]
        code = (source_digest(self._function.__module__), self._function.__qualname__, repr(cells))
        processor = processor or context.codegen().magic_tuple()
        target = (numba.__version__, str(signature), _tuples(signature), processor, sys.version_info[:2])
        return Path(place or self.cache_path, f"{self._name}.{_sha(repr((code, target)))[:24]}.nbc")

    def _files(self) -> list[Path]:
        return list(Path(self.cache_path).glob(f"{glob.escape(self._name)}.*.nbc"))


class _Results(CompileResultCacheImpl):  # type: ignore[misc]
    """A serializer of compiled loops, without numba's choice of cache files."""

    def __init__(self) -> None:
        pass


@cache
def source_digest(module: str) -> str:
    """Return a digest of a module's source file and of the source files that it imports at import time, directly or not."""
    todo, digests = [module], dict[str, str]()
    while todo:
        name = todo.pop()
        if name not in digests:
            digests[name], imported = _read(name)
            todo += imported
    return _sha(repr(sorted(filter(None, digests.values()))))  # libraries have no digest


@cache
def _read(module: str) -> tuple[str, list[str]]:
    """Return the digest of a module's source, and the modules that it imports at top level; "" and [] for libraries and `APART`."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not file.endswith(".py") or module.startswith(APART):
        return "", []
    if module.partition(".")[0] != "puna" and (file.startswith(_library_folders()) or LIBRARIES & {*Path(file).parts}):
        return "", []
    text = Path(file).read_text(encoding="utf-8")
    names: list[str] = []
    for base, imported, plain in IMPORT.findall(FUNCTION.sub("", text)):
        names += [base, *(f"{base}.{word}" for word in re.findall(r"\w+", imported))] if base else re.findall(r"[\w.]+", plain)
    return _sha(text), [name for name in names if name in sys.modules]


@cache
def _library_folders() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def _tuples(kind: Any) -> list[Any]:
    """Return the classes of named tuples in a signature, with the tuples' fields: numba's name of a type omits the fields."""
    if isinstance(kind, containers.BaseNamedTuple):
        new = kind.instance_class
        return [(new.__module__, new.__qualname__, kind.fields), *(_tuples(one) for one in kind.types)]
    return [_tuples(one) for one in kind] if isinstance(kind, tuple | containers.BaseTuple) else []


@cache
def folder(root: Path) -> Path:
    """Return the folder of compiled loops: NUMBA_CACHE_DIR, else the first writable folder among the checkout's, the user's cache and a
    temporary one. Loops are pickles: outside the checkout, another user's folder is skipped. Raise OSError if no folder is left."""
    if path := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(path)
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


@cache
def processor() -> str:
    return str(numba.config.CPU_NAME or get_host_cpu_name())


def target() -> str | None:
    """Return the name of this machine's target in `TARGETS`; None if there is none or the processor lacks the target's instructions."""
    name, needs = TARGETS.get(platform.machine(), (None, ""))
    has = get_host_cpu_features()
    return name if all(has.get(instruction) for instruction in needs.split()) else None


@cache
def shipped_folder() -> Path | None:
    """Return the folder of shipped loops that this processor can run; None if there is none, or if NUMBA_CPU_NAME is set."""
    name = target() if numba.config.CPU_NAME is None else None
    return SHIPPED / name if name and (SHIPPED / name).is_dir() else None


def _own(status: os.stat_result) -> bool:
    """True if only this user or root can write the file, whose code runs when it is loaded."""
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _checksum(packed: bytes) -> bytes:
    return zlib.crc32(packed).to_bytes(SUM_BYTES, "little")


def _mtime(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # another process has just removed it


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
