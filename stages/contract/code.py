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

from puna.storage import PunaError
from puna.storage.digest import of_file, of_value
from puna.storage.manifest import FORMAT

ROOT = Path(__file__).parents[2]
OUTSIDE = ("puna.storage", "puna.stages.contract")
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Statement = ast.stmt


@dataclass(eq=False)
class Module:
    """The top-level bindings of one source file."""

    name: str
    file: Path
    symbols: dict[str, list[Statement]] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)


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
        if what in source.imports:
            todo.extend(_targets(*source.imports[what]))
            continue
        symbol = _symbol(source, what)
        if symbol is None:
            if _is_module(f"{where}.{what}"):
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
    statements = source.symbols.get(name)
    if statements is None:
        return None
    uses: list[tuple[str, str]] = []
    files: list[Path] = []
    for statement in statements:
        nodes = list(ast.walk(statement))
        local = dict(source.imports)
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                local.update(_imports(node, source.name))
        uses.extend(_uses(nodes, source, local))
        files.extend(_data_files(nodes, source.file.parent))
    return Symbol(_hash(statements), tuple(dict.fromkeys(uses)), tuple(dict.fromkeys(files)))


def version(symbols: dict[str, str]) -> str:
    """One hash for a set of reached symbols, 64 hex digits."""
    return of_value({"format": FORMAT, "symbols": symbols})


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
    loose: list[Statement] = []
    for statement in _flat(ast.parse(file.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            module.imports.update(_imports(statement, name))
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            module.symbols.setdefault(statement.name, []).append(statement)
            if statement.decorator_list:
                loose.append(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                for node in ast.walk(target):
                    if isinstance(node, ast.Name):
                        module.symbols.setdefault(node.id, []).append(statement)
        else:
            loose.append(statement)
    # A registration (`@op.register_fake`, `register(op)`) changes what `op` does: it counts wherever op does.
    for statement in loose:
        mentions = statement.decorator_list if isinstance(statement, ast.FunctionDef) else [statement]
        for mention in mentions:
            for node in ast.walk(mention):
                if isinstance(node, ast.Name) and node.id in module.symbols and statement not in module.symbols[node.id]:
                    module.symbols[node.id].append(statement)
    return module


def _flat(body: list[Statement]) -> Iterator[Statement]:
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _flat([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            yield from _flat([*statement.body, *statement.orelse, *statement.finalbody])
            for handler in statement.handlers:
                yield from _flat(handler.body)
        elif isinstance(statement, ast.With):
            yield from _flat(statement.body)
        else:
            yield statement


def _imports(node: ast.Import | ast.ImportFrom, where: str) -> dict[str, tuple[str, str | None]]:
    """Local name → (module, symbol or None) for the first-party names that an import binds."""
    found: dict[str, tuple[str, str | None]] = {}
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


def _uses(nodes: list[ast.AST], source: Module, local: dict[str, tuple[str, str | None]]) -> Iterator[tuple[str, str]]:
    """First-party symbols that a statement of these nodes names: bare names, and attributes of imported modules."""
    attributes: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            chain = _chain(node)
            if chain and chain[0] in local:
                target = _resolve(local[chain[0]], chain[1:])
                if target is not None:
                    yield target
                    for inner in ast.walk(node):
                        attributes.add(id(inner))
    for node in nodes:
        if isinstance(node, ast.Name) and id(node) not in attributes:
            if node.id in source.symbols:
                yield source.name, node.id
            elif node.id in local:
                yield from _targets(*local[node.id])


def _chain(node: ast.expr) -> list[str]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _resolve(bound: tuple[str, str | None], attributes: list[str]) -> tuple[str, str] | None:
    """`alias.a.b` where alias is a module: the symbol it means; None when alias is no module."""
    module = bound[0] if bound[1] is None else f"{bound[0]}.{bound[1]}"
    if bound[1] is not None and not _is_module(module):
        return None
    for index, name in enumerate(attributes):
        if _is_module(f"{module}.{name}") and index + 1 < len(attributes):
            module = f"{module}.{name}"
            continue
        return (module, name) if _is_module(module) else None
    return None


def _hash(statements: list[Statement]) -> str:
    return hashlib.sha256("\n".join(f"Module(body=[{_text(s)}], type_ignores=[])" for s in statements).encode()).hexdigest()[:16]


def _text(node: ast.AST) -> str:
    """The syntax tree as text, without what does not change behaviour: docstrings and the descriptions of configuration fields."""
    shown = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            if name == "body" and isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                value = value[1:] or [ast.Pass()]
            elif name == "keywords" and isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Field":
                value = [keyword for keyword in value if keyword.arg != "description"]
            shown.append(f"{name}=[{', '.join(_text(item) if isinstance(item, ast.AST) else repr(item) for item in value)}]")
        elif isinstance(value, ast.AST):
            shown.append(f"{name}={_text(value)}")
        elif (value is not None or isinstance(node, ast.Constant)) and name != "kind":
            shown.append(f"{name}={value!r}")
    return f"{type(node).__name__}({', '.join(shown)})"


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
