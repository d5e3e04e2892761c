"""Top-level bindings of modules: the statements behind each name, and the imports, in the source that this process has read."""

from __future__ import annotations

import ast
import sys
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from puna.stages.identity import sources
from puna.stages.identity.modules import notebook, source_file
from puna.stages.identity.syntax import bound, canonical, statements, within
from puna.storage import PunaError

Target = tuple[str, str | None]
"""The target of an import: a module and None, or a module and one of its symbols."""


@dataclass(eq=False)
class Module:
    """The top-level bindings of one source file.

    symbols   name → the statements that bind or change it
    imports   name → its possible first-party targets, in the order of the statements
    foreign   name → the target of an unconditional import that is not first-party
    numerics  name → version of a tensor operation's numerical results, as the module's `NUMERICS` declares it"""

    name: str
    file: Path
    symbols: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, list[Target]] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)
    numerics: dict[str, int] = field(default_factory=dict)
    _canonical: dict[int, tuple[ast.AST, list[ast.AST]]] = field(default_factory=dict)

    def canonical(self, node: ast.AST) -> tuple[ast.AST, list[ast.AST]]:
        if id(node) not in self._canonical:
            self._canonical[id(node)] = canonical(node)
        return self._canonical[id(node)]


def load(name: str) -> Module:
    """Return the bindings of module `name`. Raise PunaError if its file has changed since this process imported it, or is not available."""
    file = source_file(name)
    if file is not None:
        stat = file.stat()
        return _at(name, file, stat.st_mtime_ns, stat.st_size, sources.source_digest(file))
    cells = notebook() if name == "__main__" else ""
    if not cells:
        raise PunaError(f"module {name}: its source is not available; declare the stage in a file, or give it version=")
    return _parse(name, Path("notebook"), cells)


@lru_cache(maxsize=1024)
def _at(name: str, file: Path, mtime: int, size: int, digest: str) -> Module:
    sources.check([file])
    return _parse(name, file, file.read_text(encoding="utf-8"))


def is_module(name: str) -> bool:
    return source_file(name) is not None


@lru_cache(maxsize=4096)
def is_followed(origin: str) -> bool:
    """True if the import target `origin` is in Puna, a plugin or a user's module, whose code is followed."""
    top = origin.split(".")[0]
    return top == "puna" or (top not in sys.stdlib_module_names and source_file(top) is not None)


# Python 3.11 has one depth counter for parsing in all threads: two threads that parse at once raise a mismatch error.
_PARSING = threading.Lock()


@lru_cache(maxsize=1024)
def _parse(name: str, file: Path, content: str) -> Module:
    module = Module(name, file)
    loose: list[tuple[ast.AST, ast.stmt]] = []
    with _PARSING:
        tree = ast.parse(content)
    for node in statements(tree.body):
        nodes = within([node])
        for inner in nodes:
            if isinstance(inner, ast.Import | ast.ImportFrom):
                for local, target in imported_names(inner, name).items():
                    module.imports.setdefault(local, []).append(target)
        if isinstance(node, ast.Import | ast.ImportFrom):
            module.foreign.update({local: origin for local, origin in origins(node).items() if not is_followed(origin)})
            continue
        # A conditional import counts like a definition.
        for symbol in sorted(bound(node)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list:
                module.symbols[symbol] = []  # a later definition replaces an earlier one, as when a notebook cell is run again
            module.symbols.setdefault(symbol, []).append(node)
        for inner in nodes:
            mentions = [inner] if isinstance(inner, ast.Expr) else getattr(inner, "decorator_list", [])
            loose += [(mention, node) for mention in mentions]
    # A registration (`@op.register_fake`, `register(op)`) changes what `op` does: it counts wherever op does.
    for mention, node in loose:
        for inner in ast.walk(mention):
            if isinstance(inner, ast.Name) and node not in module.symbols.get(inner.id, [node]):
                module.symbols[inner.id].append(node)
    for declared in module.symbols.get("NUMERICS", []):
        if isinstance(declared, ast.Assign):
            module.numerics.update(ast.literal_eval(declared.value))
    return module


def origins(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Return local name → dotted origin for each name that an import binds; a relative import's origin begins with `puna.`."""
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0] for alias in node.names}
    base = "puna." if node.level else f"{node.module}."
    return {alias.asname or alias.name: base + alias.name for alias in node.names}


def imported_names(node: ast.Import | ast.ImportFrom, where: str) -> dict[str, Target]:
    """Return local name → (module, symbol or None) of an import's first-party names. Raise PunaError for `import *` from followed code."""
    targets: dict[str, Target] = {}
    if isinstance(node, ast.Import):
        for alias in node.names:
            if is_followed(alias.name):
                top = alias.name.split(".")[0]
                targets[alias.asname or top] = (alias.name if alias.asname else top, None)
        return targets
    base = node.module or ""
    if node.level:
        package = where if (source_file(where) or Path()).name == "__init__.py" else where.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        base = f"{package}.{base}" if base else package
    if node.level or is_followed(base):
        for alias in node.names:
            if alias.name == "*":
                raise PunaError(f"module {where}: `from {base} import *` hides what is used; name the imports")
            targets[alias.asname or alias.name] = (base, alias.name)
    return targets
