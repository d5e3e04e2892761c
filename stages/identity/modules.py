"""Followed modules and their source files: those of Puna, of plugins, and of the user."""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

from puna.stages.identity import sources

GROUPS = ("puna.stages", "puna.signals", "puna.rules", "puna.verifiers", "puna.losses", "puna.optimizers", "puna.flows")
"""The entry point groups in which packages offer plugins."""

_places: dict[str, Path] = {}


def source_file(name: str) -> Path | None:
    """Return the source file of a followed module; None for a library's module or an unknown name."""
    top, *rest = name.split(".")
    if top == "puna":
        return _existing_file(sources.ROOT.joinpath(*rest)) if rest else None
    loaded = getattr(sys.modules.get(name), "__file__", None)
    file = Path(loaded) if loaded and loaded.endswith(".py") else _search(top, rest)
    return file if file is not None and _is_own(top, file) else None


def is_library(name: str) -> bool:
    if name.split(".")[0] in sys.stdlib_module_names:
        return True
    try:
        return importlib.util.find_spec(name.split(".")[0]) is not None and source_file(name) is None
    except (ImportError, ValueError):
        return False


def notebook() -> str:
    cells = getattr(sys.modules["__main__"], "In", None)
    return "\n".join(map(str, cells)) if isinstance(cells, list) else ""


def _existing_file(path: Path) -> Path | None:
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _search(top: str, rest: list[str]) -> Path | None:
    """Return the file from which Python would import a module, without importing it."""
    if top in sys.stdlib_module_names or top == "__main__":
        return None
    if top not in _places:
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return None
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            return None
        _places[top] = Path(spec.origin)
    origin = _places[top]
    return origin if not rest else _existing_file(origin.parent.joinpath(*rest)) if origin.name == "__init__.py" else None


def _is_own(top: str, file: Path) -> bool:
    """True if a module is followed: it is not in the standard library, and it offers plugins or its file is outside site-packages."""
    if top in sys.stdlib_module_names:
        return False
    return top in _offering() or not {"site-packages", "dist-packages"} & set(file.parts)


@functools.lru_cache(maxsize=1)
def entry_points_on(path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of all packages on `path` (`sys.path`), read once."""
    return entry_points()  # type: ignore[return-value]  # typeshed gives a dictionary for 3.11


@functools.cache
def _offering() -> frozenset[str]:
    everything = entry_points_on(tuple(sys.path))
    return frozenset(entry.value.split(":")[0].split(".")[0] for group in GROUPS for entry in everything.select(group=group))
