"""The registry of verifiers: Puna's own, and those that other packages offer in the entry-point group `puna.verifiers`."""

from __future__ import annotations

import importlib
import json
import pkgutil
from functools import cache, lru_cache
from typing import Any, TypeVar

from puna.stages import plugins, verifiers
from puna.stages.contract import did_you_mean, parse
from puna.stages.verifiers.base import Verifier
from puna.storage import PunaError

V = TypeVar("V", bound=Verifier)
_KNOWN: dict[str, type[Verifier]] = {}


def register(verifier: type[V]) -> type[V]:
    """Register a verifier class under its `name` and return it (a decorator). Raise PunaError if it is invalid or the name is taken."""
    name = getattr(verifier, "name", None)
    if not (isinstance(verifier, type) and issubclass(verifier, Verifier)) or not isinstance(name, str) or not name:
        raise PunaError(f"{verifier!r} is not a verifier: it needs the base class Verifier and a `name`")
    namesake = _KNOWN.get(name)
    if namesake is not None and (namesake.__module__, namesake.__qualname__) != (verifier.__module__, verifier.__qualname__):
        raise PunaError(f"two verifiers have the name {name!r}: {namesake.__module__}.{namesake.__qualname__} and "
                        f"{verifier.__module__}.{verifier.__qualname__}")  # fmt: skip
    _KNOWN[name] = verifier
    from_text.cache_clear()
    code_of.cache_clear()
    return verifier


@cache
def all_verifiers() -> dict[str, type[Verifier]]:
    """Return the verifier classes registered so far, by name: Puna's own, and those of other packages that `kind_of` has loaded."""
    # No module is named here, so a stage's key covers only the code of verifiers that its prompts name.
    for module in pkgutil.iter_modules(verifiers.__path__):
        importlib.import_module(f"{verifiers.__name__}.{module.name}")
    return _KNOWN


def from_json(given: Any) -> Verifier:
    """Return the verifier described by a JSON value `{"name": …, …parameters}`. Raise PunaError if it is invalid."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise PunaError(f'a verifier is a JSON object {{"name": …, …parameters}}, not {str(given)[:80]}')
    return parse(kind_of(given["name"]), {key: value for key, value in given.items() if key != "name"}, given["name"])


def kind_of(name: str) -> type[Verifier]:
    """Return the verifier class with this name, loading other packages' verifiers if necessary. Raise PunaError if there is none."""
    if name not in all_verifiers():
        for offered in plugins.offers("puna.verifiers").values():
            if isinstance(offered, type) and issubclass(offered, Verifier):
                register(offered)
    if name not in all_verifiers():
        raise PunaError(f"there is no verifier {name!r}{did_you_mean(name, sorted(all_verifiers()))}")
    return all_verifiers()[name]


@lru_cache(maxsize=8192)
def from_text(text: str) -> Verifier:
    """Return the verifier described by a JSON text, from a cache if possible. Raise PunaError if the text is invalid."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PunaError(f"a verifier is JSON, not {text[:80]!r}") from error
    return from_json(value)


def to_text(name: str, /, **parameters: Any) -> str:
    """Return a verifier's JSON text for a prompt's column `verifier`. Raise PunaError if the name or a parameter is invalid."""
    text = json.dumps({"name": name, **parameters}, sort_keys=True)
    from_text(text)
    return text


@lru_cache(maxsize=8192)
def code_of(text: str) -> list[tuple[str, str]]:
    """Return (module, symbol) of the code that a verifier (JSON text) reaches. Check parameters only if its class overrides `reaches`."""
    values = json.loads(text)
    name = values.get("name") if isinstance(values, dict) else None
    if isinstance(name, str) and (kind := kind_of(name)).reaches is Verifier.reaches:
        return kind.of_class()
    return from_json(values).reaches()
