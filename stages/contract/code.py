"""The version of a stage's code: a hash over the syntax trees of everything first-party that it reaches.

From the stage's function the names it uses are followed, through imports (also those inside functions),
to functions, classes and constants of `puna`. Comments, docstrings, formatting and the descriptions of
configuration fields do not count; data files that reached code names do. The contract and the store are
not followed: they move artifacts and do not decide their content; `FORMAT` stands for them.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from puna.stages.contract.syntax import Binding, bound, statements
from puna.storage import PunaError
from puna.storage.digest import of_file
from puna.storage.manifest import code_version

ROOT = Path(__file__).parents[2]
Target = tuple[str, str | None]
OUTSIDE = ("puna.storage", "puna.stages.contract")


@dataclass(eq=False)
class Module:
    """The top-level bindings of one source file.

    `symbols`: name → the statements that bind or change it. `imports`: name → what it may be, first-party, in the order
    of the statements. `foreign`: name → where an unconditional import from outside Puna takes it.
    """

    name: str
    file: Path
    symbols: dict[str, list[Binding]] = field(default_factory=dict)
    imports: dict[str, list[Target]] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)


def reached(module: str, name: str) -> dict[str, str]:
    """`module.symbol` → hash, for everything that symbol `name` of `module` reaches, itself included."""
    found: dict[str, str] = {}
    todo = [(module, name)]
    seen: set[tuple[str, str]] = set()
    while todo:
        where, what = todo.pop()
        if (where, what) in seen or where.startswith(OUTSIDE):
            continue
        seen.add((where, what))
        source = load(where)
        for target in source.imports.get(what, []):
            todo.extend(_targets(*target))
        symbol = _symbol(source, what)
        if symbol is None:
            if what not in source.imports and _is_module(f"{where}.{what}"):
                todo.extend((f"{where}.{what}", name) for name in load(f"{where}.{what}").symbols)
            continue
        found[f"{where}.{what}"] = symbol.hash
        todo.extend(symbol.uses)
        for file in symbol.files:
            found[f"{where}:{file.relative_to(source.file.parent)}"] = of_file(file)[:16]
    return found


@dataclass(frozen=True)
class Symbol:
    """What one binding is made of: the hash of its statements, the first-party names and data files it uses."""

    hash: str
    uses: tuple[tuple[str, str], ...]
    files: tuple[Path, ...]


@lru_cache(maxsize=8192)
def _symbol(source: Module, name: str) -> Symbol | None:
    bindings = source.symbols.get(name)
    if bindings is None:
        return None
    uses: list[tuple[str, str]] = []
    files: list[Path] = []
    foreign: set[str] = set()
    for node in (node for binding in bindings for node in binding.nodes):
        local = {**source.imports}
        inside = list(ast.walk(node))
        for inner in inside:
            if isinstance(inner, ast.Import | ast.ImportFrom):
                local.update({n: [t] for n, t in _imports(inner, source.name).items()})
            elif isinstance(inner, ast.Name) and inner.id in source.foreign:
                foreign.add(f"{inner.id}={source.foreign[inner.id]}")
        uses.extend(_uses(inside, source, local))
        files.extend(_data_files(inside, source.file.parent))
    text = "\n".join([*(binding.text() for binding in bindings), *sorted(foreign)])
    return Symbol(hashlib.sha256(text.encode()).hexdigest()[:16], tuple(dict.fromkeys(uses)), tuple(dict.fromkeys(files)))


def version(symbols: dict[str, str]) -> str:
    """One hash for a set of reached symbols, 64 hex digits."""
    return code_version(symbols)


def load(name: str) -> Module:
    """The parsed bindings of module `name` (read again when the file changed)."""
    file = _file(name)
    if file is None:
        raise PunaError(f"module {name}: no source file below {ROOT}")
    stat = file.stat()
    return _parse(name, file, stat.st_mtime_ns, stat.st_size)


def _file(name: str) -> Path | None:
    if name.split(".")[0] != "puna":
        # A stage that a user declares outside Puna: its own file counts, and what it reaches in Puna.
        file = getattr(sys.modules.get(name), "__file__", None)
        return Path(file) if file else None
    path = ROOT.joinpath(*name.split(".")[1:])
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _is_module(name: str) -> bool:
    return name.startswith("puna.") and _file(name) is not None


@lru_cache(maxsize=1024)
def _parse(name: str, file: Path, mtime: int, size: int) -> Module:
    module = Module(name, file)
    loose: list[Binding] = []
    for binding in statements(ast.parse(file.read_text(encoding="utf-8")).body):
        node = binding.node
        if isinstance(node, ast.Import | ast.ImportFrom):
            for local, target in _imports(node, name).items():
                module.imports.setdefault(local, []).append(target)
            for local, origin in _origins(node).items():
                # An import that a condition decides counts as a definition does.
                if binding.guards:
                    module.symbols.setdefault(local, []).append(binding)
                elif origin.split(".")[0] != "puna":
                    module.foreign[local] = origin
            continue
        names = bound(node)
        for symbol in sorted(names):
            module.symbols.setdefault(symbol, []).append(binding)
        if not names or getattr(node, "decorator_list", None):
            loose.append(binding)
    # A registration (`@op.register_fake`, `register(op)`) changes what `op` does: it counts wherever op does.
    for binding in loose:
        for mention in getattr(binding.node, "decorator_list", None) or [binding.node]:
            for inner in ast.walk(mention):
                if isinstance(inner, ast.Name) and binding not in module.symbols.get(inner.id, [binding]):
                    module.symbols[inner.id].append(binding)
    return module


def _origins(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Local name → what an import binds to it, dotted."""
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0] for alias in node.names}
    base = "puna." if node.level else f"{node.module}."
    return {alias.asname or alias.name: base + alias.name for alias in node.names}


def _imports(node: ast.Import | ast.ImportFrom, where: str) -> dict[str, Target]:
    """Local name → (module, symbol or None) for the first-party names that an import binds."""
    found: dict[str, Target] = {}
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "puna":
                found[alias.asname or "puna"] = (alias.name if alias.asname else "puna", None)
        return found
    base = node.module or ""
    if node.level:
        package = where if (_file(where) or Path()).name == "__init__.py" else where.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        base = f"{package}.{base}" if base else package
    if base.split(".")[0] == "puna":
        for alias in node.names:
            if alias.name == "*":
                raise PunaError(f"module {where}: `from {base} import *` hides what is used; name the imports")
            found[alias.asname or alias.name] = (base, alias.name)
    return found


def _targets(module: str, symbol: str | None) -> list[tuple[str, str]]:
    if symbol is None or module.startswith(OUTSIDE):
        return []
    return [(module, symbol)]


def _uses(nodes: list[ast.AST], source: Module, local: dict[str, list[Target]]) -> Iterator[tuple[str, str]]:
    """First-party symbols that a statement of these nodes names: bare names, and attributes of imported modules."""
    attributes: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            chain = _chain(node)
            targets = [_resolve(target, chain[1:]) for target in local.get(chain[0], [])] if chain else []
            yield from (target for target in targets if target is not None)
            # A module under a condition is a symbol too: its name counts with the attribute.
            if targets and None not in targets and chain[0] not in source.symbols:
                attributes.update(id(inner) for inner in ast.walk(node))
    for node in nodes:
        if isinstance(node, ast.Name) and id(node) not in attributes:
            if node.id in source.symbols:
                yield source.name, node.id
            for target in local.get(node.id, []):
                yield from _targets(*target)


def _chain(node: ast.expr) -> list[str]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _resolve(target: Target, attributes: list[str]) -> tuple[str, str] | None:
    """`alias.a.b` where alias is a module: the symbol it means; None when alias is no module."""
    module = target[0] if target[1] is None else f"{target[0]}.{target[1]}"
    if target[1] is not None and not _is_module(module):
        return None
    for index, name in enumerate(attributes):
        if _is_module(f"{module}.{name}") and index + 1 < len(attributes):
            module = f"{module}.{name}"
            continue
        return (module, name) if _is_module(module) else None
    return None


def _data_files(nodes: list[ast.AST], folder: Path) -> Iterator[Path]:
    """Files (and folders of files) beside the module that a statement of these nodes names in a string."""
    for node in nodes:
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) < 100):
            continue
        if not all(c.isalnum() or c in "._-/" for c in node.value) or node.value.startswith((".", "/")):
            continue
        for path in (folder / node.value, folder / "data" / node.value):
            if path.is_file() and path.suffix != ".py":
                yield path
            elif path.is_dir() and node.value == "data":
                yield from sorted(f for f in path.rglob("*") if f.is_file() and f.suffix != ".py")
