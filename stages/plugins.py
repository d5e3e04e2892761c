"""Plugins: stages, signals, rules, verifiers, losses and flows from other packages and from a user's own files.

A package offers plugins through entry points in the `GROUPS`. An entry point names an object, or a module whose import runs declarations
(`@stage`, …). A user's own file is named on the command line, `--module mine.py`, and may declare any of these."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from puna.stages.identity import sources
from puna.stages.identity.modules import GROUPS, entry_points_on
from puna.storage import PunaError

T = TypeVar("T")

_offers: dict[str, dict[str, object]] = {}
_broken: dict[str, str] = {}
_modules: dict[str, str] = {}
_registries: list[tuple[dict[str, Any], Callable[[Any], str]]] = []


def registry(entries: dict[str, T], module_of: Callable[[T], str]) -> dict[str, T]:
    """Register and return the dict `entries`. If a module's import fails, the entries that the module declared are removed again."""
    _registries.append((entries, module_of))
    return entries


def offers(group: str) -> dict[str, object]:
    """Return name → plugin (module or object, imported once) of installed packages in `group`. Raise PunaError if `GROUPS` lacks it.

    A plugin that cannot be imported, or whose name is taken, is left out, logged, and listed by `broken_plugins`."""
    if group not in GROUPS:
        raise PunaError(f"{group} is not a plugin group; the groups are {', '.join(GROUPS)}")
    if group not in _offers:
        _offers[group] = {}
        for entry in sorted(entry_points_on(tuple(sys.path)).select(group=group), key=lambda e: (e.name, e.value)):
            _load(entry)
    return _offers[group]


def broken_plugins() -> list[str]:
    """Return one message for each plugin that `offers` failed to load so far: name, package, reason."""
    return list(_broken.values())


def _load(entry: EntryPoint) -> None:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "no package"
    title = f"plugin {entry.name!r} ({entry.group}, {entry.value}, of {package})"
    offers = _offers[entry.group]
    if entry.name in offers:
        problem = "a plugin of another package has the same name; uninstall one of them"
    else:
        try:
            offers[entry.name] = entry.load()
            return
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may fail in any way, and the others go on
            _forget()
            problem = f"cannot be loaded: {_error_text(error)}. Repair or uninstall the package"
    _broken[f"{entry.group}:{entry.name}:{entry.value}"] = f"{title}: {problem}"
    logging.getLogger("puna").warning("%s: %s", title, problem)


def add(text: str) -> ModuleType:
    """Import and return the Python file or dotted module given by `--module`. Raise PunaError if the import fails.

    A file's folder is appended to `sys.path`, so that the file can import its neighbours. No other module may have the file's name."""
    name, file = _at(Path(text)) if text.endswith(".py") or "/" in text else (text, "")
    if file:
        sources.source_digest(Path(file))
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        _forget()
        raise PunaError(f"--module {text}: cannot be imported: {_error_text(error)}") from error
    _modules[name] = str(file)
    return module


def added_modules() -> dict[str, str]:
    """Return name → file ("" for a dotted module) of the modules that `add` imported, in order, for workers to import."""
    return dict(_modules)


def is_allowed(module: str) -> bool:
    """True if rows of data may name functions of `module`: `--module` added it or a package above it, or it offers an installed plugin.

    Puna's own modules are not allowed, since data refer to Puna's verifiers by name."""
    if module.split(".")[0] == "puna":
        return False
    return is_offered(module) or any(module == name or module.startswith(f"{name}.") for name in _modules)


def is_offered(module: str) -> bool:
    """True if an installed package offers plugins from the module, or from a package that contains the module."""
    offered = {entry.value.partition(":")[0] for group in GROUPS for entry in entry_points_on(tuple(sys.path)).select(group=group)}
    return any(module == name or module.startswith(f"{name}.") for name in offered)


def _at(path: Path) -> tuple[str, Path]:
    file = path.expanduser().resolve()
    name = file.stem
    if not file.is_file():
        raise PunaError(f"--module {path}: no such file")
    if not name.isidentifier() or file.suffix != ".py":
        raise PunaError(f"--module {path}: its name must be a Python name and end in .py, for example my_stages.py")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
        importlib.invalidate_caches()
    loaded = sys.modules.get(name)
    if loaded is not None:
        other = getattr(loaded, "__file__", None)
    else:
        spec = importlib.util.find_spec(name)
        other = spec.origin if spec else None
    if other is None or not Path(other).exists() or not Path(other).samefile(file):
        raise PunaError(f"--module {path}: there is another module named {name} ({other or 'built in'}); rename the file")
    return name, file


def _forget() -> None:
    """Remove the declarations of modules whose import failed from all registries."""
    for entries, module_of in _registries:
        for name in [name for name, entry in entries.items() if module_of(entry) not in sys.modules]:
            del entries[name]


def _error_text(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen") and f.filename != __file__]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames and "importlib" not in frames[-1].filename else ""
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}{where}"
