"""A check that a stage runs no code and reads no data files of Puna that its key does not name.

The first run of each of some stages in a process is watched, in whichever test it occurs. Compiled loops and files opened by C++ code are
not seen.
"""

from __future__ import annotations

import ast
import cProfile
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from puna.stages.contract import Stage
from puna.stages.identity import code, sources, syntax
from tests.identity import numerics

ROOT = sources.ROOT
# These move artifacts or run stages, and do not affect content.
OUTSIDE = ("puna.storage", "puna.stages.contract", "puna.stages.identity", "puna.stages.executors", "puna.stages.plugins", "puna.flows")
# Keys contain their references and versions; tests/identity compares their code with a record.
OPERATIONS = frozenset(".".join(("puna", *file.relative_to(numerics.ROOT).with_suffix("").parts)) for file in numerics.files())
WATCHED = frozenset((
    "language", "line_dedup", "minhash_dedup", "mix", "pii", "pretrain", "select", "split", "tokenize", "url_dedup", "url_filter",
))  # fmt: skip
watched: set[str] = set()
"""Stages that were watched already."""
_opened: list[set[str]] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened and isinstance(arguments[0], str) and not set(str(arguments[1] or "r")) & set("wax+"):
        _opened[-1].add(arguments[0])


@cache
def listening() -> None:
    """Install a hook that sees every file that Python opens; such a hook cannot be removed."""
    sys.addaudithook(_hear)


def watching(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return `execute._make` with a check that fails if the stage ran or read something that is not in its key."""

    def made(stage: Stage, config: Any, given: Any, *more: Any) -> Any:
        if stage.name not in WATCHED - watched or stage.version:
            return make(stage, config, given, *more)
        watched.add(stage.name)
        named = code.symbols(stage, stage.reaches(config, given))
        for module in {name.rpartition(".")[0] for name in named if name.startswith("puna.") and ":" not in name}:
            importlib.import_module(module)  # code that runs when a module is loaded is not the stage's work
        profile = cProfile.Profile(builtins=False)
        listening()
        _opened.append(set())
        try:
            found = profile.runcall(make, stage, config, given, *more)
        finally:
            opened = _opened.pop()
        wrong = [*unnamed_code({entry.code for entry in profile.getstats() if isinstance(entry.code, CodeType)}, named)]
        wrong += unnamed_files(opened, named)
        assert not wrong, f"stage {stage.name}: not in its key: {', '.join(sorted(wrong))}"
        return found

    return made


def unnamed_code(ran: set[CodeType], named: dict[str, str]) -> Iterator[str]:
    """Yield functions of Puna that ran and whose top-level symbol is not in the key."""
    for one in ran:
        file = Path(one.co_filename)
        if not file.is_relative_to(ROOT) or one.co_name == "<module>":
            continue
        module = ".".join(("puna", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        symbols = _bound_at(file).get(one.co_firstlineno)
        if not module.startswith(OUTSIDE) and module not in OPERATIONS and symbols and not any(f"{module}.{symbol}" in named for symbol in symbols):
            yield f"{module}.{one.co_qualname}"


@cache
def _bound_at(file: Path) -> dict[int, set[str]]:
    """Return line of a file → the top-level names whose statement contains it."""
    found: dict[int, set[str]] = {}
    for node in syntax.statements(ast.parse(file.read_text(encoding="utf-8")).body):
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        for line in range(first, (node.end_lineno or first) + 1):
            found.setdefault(line, set()).update(syntax.bound(node))
    return found


def unnamed_files(opened: set[str], named: dict[str, str]) -> Iterator[str]:
    """Yield data files of Puna that were read and to which no name in the key belongs."""
    data = {os.path.normpath(code.load(m).file.parent / path) for m, _, path in (n.partition(":") for n in named if n.startswith("puna.")) if path}
    for name in map(os.path.normpath, opened):
        inside = any(Path(name).is_relative_to(ROOT / room) for room in sources.ROOMS)
        if inside and not name.endswith((".py", ".pyc")) and name not in data:
            yield name
