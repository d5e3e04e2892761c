"""The version of a stage's code: a hash over the syntax trees of everything first-party that it reaches.

From the stage's function and its configuration the names they use are followed, through imports (also those inside
functions), to functions, classes and constants of Puna, of plugins and of a user's own modules. Comments, docstrings,
annotations, bounds, error texts, names of local variables and formatting do not count. Data files that reached code opens
do, and so do the versions of the libraries that it uses (see `libraries`). The contract and the store are not followed:
they move artifacts and do not decide their content; `FORMAT`, here and of the manifest, stands for them.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from puna.stages.contract import data_files, libraries, sources
from puna.stages.contract.canonical import canonical
from puna.stages.contract.modules import notebook, source_file
from puna.stages.contract.reach import Reach, keep, kept
from puna.stages.contract.syntax import Binding, bound, statements, text
from puna.storage import PunaError
from puna.storage.manifest import code_version

if TYPE_CHECKING:
    from puna.stages.contract.declaration import Stage

FORMAT = 1
"""Of the contract: what stages are given and how parts are cut and joined. A change of it makes every artifact anew."""
Target = tuple[str, str | None]
Name = tuple[str, str]
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
    _canonical: dict[int, tuple[ast.AST, list[ast.AST]]] = field(default_factory=dict)

    def canonical(self, node: ast.AST) -> tuple[ast.AST, list[ast.AST]]:
        """See `canonical`; one statement may bind several names."""
        if id(node) not in self._canonical:
            self._canonical[id(node)] = canonical(node)
        return self._canonical[id(node)]


def symbols(stage: Stage, named: Iterable[Name] = ()) -> dict[str, str]:
    """What decides what a stage makes, apart from its configuration's values and inputs: name → hash or version.

    `named`: the symbols that the configuration names, which are reached too.
    """
    if stage.version:
        return reached(*named) | {"version": stage.version}
    return reached(*_roots(stage), *named)


def check_unedited(stage: Stage, named: Iterable[Name] = ()) -> None:
    """PunaError where a file that the stage reaches is no longer what this process imported or read."""
    sources.check(_reach(*([] if stage.version else _roots(stage)), *named).files)


def _roots(stage: Stage) -> tuple[Name, Name]:
    return (stage.function.__module__, stage.function.__name__), (stage.config.__module__, stage.config.__qualname__.split(".")[0])


def reached(*roots: Name) -> dict[str, str]:
    """`module.symbol` → hash, for everything that these symbols (module, name) reach, themselves included.

    Data files are there as `module:path`, libraries as `library:name` → version.
    """
    found = _reach(*roots)
    made = {"contract": str(FORMAT), **found.symbols}
    for name, file in found.data:
        # It may have been read already, and kept.
        sources.check([file])
        made[name] = sources.seen(file)
    for library in found.libraries:
        if version := libraries.version_in_key(library):
            made[f"library:{library}"] = version
    return made


def _reach(*roots: Name) -> Reach:
    """What these symbols reach: as it was kept, or found out."""
    found = kept(roots)
    if found is None:
        followed = _followed(*roots)
        found = Reach(
            {f"{where}.{what}": symbol.hash for (where, what), symbol in followed.symbols.items()},
            {str(file): sources.seen(file) for file in followed.sources},
            [(f"{where}:{os.path.relpath(file, load(where).file.parent)}", str(file)) for where, file in followed.data()],
            sorted({library for symbol in followed.symbols.values() for library in symbol.libraries}),
        )
        keep(roots, found)
    return found


@dataclass
class Followed:
    """What was reached: the symbols by (module, name), and the source files that they come from."""

    symbols: dict[Name, Symbol] = field(default_factory=dict)
    sources: set[Path] = field(default_factory=set)

    def data(self) -> Iterator[tuple[str, Path]]:
        """The data files, each with the module that opens it."""
        said = {word for symbol in self.symbols.values() for word in symbol.texts}
        for (where, _), symbol in self.symbols.items():
            for opened in symbol.opened:
                if sources.ROOT.is_relative_to(opened.path):
                    continue  # where Puna lies, not what it reads
                if not opened.path.is_dir():
                    yield where, opened.path
                    continue
                # A name that is passed on: one of those that the code writes down, where they are files of the folder.
                named = [opened.path / word for word in sorted(said) if (opened.path / word).is_file()] if opened.names else []
                for file in named or data_files.below(opened.path):
                    yield where, file


def _followed(*roots: Name) -> Followed:
    found = Followed()
    todo, seen = list(roots), set[Name]()
    while todo:
        where, what = todo.pop()
        if (where, what) in seen or where.startswith(OUTSIDE):
            continue
        seen.add((where, what))
        source = load(where)
        if source.file.is_file():
            found.sources.add(source.file)
        for target in source.imports.get(what, []):
            todo.extend(_targets(*target))
        symbol = _symbol(source, what)
        if symbol is not None:
            found.symbols[where, what] = symbol
            todo.extend(symbol.uses)
        elif what not in source.imports and _is_module(f"{where}.{what}"):
            todo.extend((f"{where}.{what}", name) for name in load(f"{where}.{what}").symbols)
    return found


@dataclass(frozen=True)
class Symbol:
    """What one binding is made of: the hash of its statements; the first-party names, data files, texts and libraries it uses."""

    hash: str
    uses: tuple[Name, ...]
    opened: tuple[data_files.Opened, ...]
    texts: tuple[str, ...]
    libraries: tuple[str, ...]


@lru_cache(maxsize=8192)
def _symbol(source: Module, name: str) -> Symbol | None:
    bindings = source.symbols.get(name)
    if bindings is None:
        return None
    uses: list[Name] = []
    opened: list[data_files.Opened] = []
    words: list[str] = []
    foreign: dict[str, str] = {}
    shown: list[str] = []
    for binding in bindings:
        shown += [guard.branch for guard in binding.guards]
        for node in binding.nodes:
            plain, annotations = source.canonical(node)
            shown.append(text(plain))
            inside = list(ast.walk(plain))
            local = {**source.imports}
            for inner in inside:
                if isinstance(inner, ast.Import | ast.ImportFrom):
                    local.update({n: [t] for n, t in _imports(inner, source.name).items()})
                    foreign.update({f" {origin}": origin for origin in _origins(inner).values() if not _is_followed(origin)})
                elif isinstance(inner, ast.Name) and inner.id in source.foreign:
                    foreign[inner.id] = source.foreign[inner.id]
            uses.extend(_uses(inside + [n for annotation in annotations for n in ast.walk(annotation)], source, local))
            words += data_files.texts(inside)
            foreign.update({f" {name}": name for name in _found_packages(inside)})
            if any(isinstance(n, ast.Name) and isinstance(_constant(source, n.id), Path) for n in inside):
                opened += data_files.opened(plain, partial(_constant, source))
    opened += _beside(dict.fromkeys(words), source.file.parent)
    shown += sorted(f"{local}={origin}" for local, origin in foreign.items() if not local.startswith(" "))
    return Symbol(
        hashlib.sha256("\n".join(shown).encode()).hexdigest()[:16],
        tuple(dict.fromkeys(uses)),
        tuple(dict.fromkeys(one for one in opened if one.path.exists() and one.path.suffix != ".py")),
        tuple(dict.fromkeys(words)),
        tuple(sorted({origin.split(".")[0] for origin in foreign.values()} - _SILENT)),
    )


_SILENT = frozenset(sys.stdlib_module_names) - {"re", "unicodedata"}


@lru_cache(maxsize=65536)
def _constant(source: Module, name: str, depth: int = 0) -> data_files.Value:
    """The path or text that a name of a module stands for, followed through first-party imports."""
    if name == "__file__":
        return source.file
    bindings = source.symbols.get(name, [])
    if len(bindings) == 1 and isinstance(node := bindings[0].node, ast.Assign | ast.AnnAssign) and not bindings[0].guards and depth < 20:
        return data_files.value(node.value, lambda inner: _constant(source, inner, depth + 1) if inner != name else None)
    if not bindings and len(targets := source.imports.get(name, [])) == 1 and depth < 20:
        module, symbol = targets[0]
        if symbol is not None and source_file(module) is not None:
            return _constant(load(module), symbol, depth + 1)
    return None


def version(symbols: dict[str, str]) -> str:
    """One hash for a set of reached symbols, 64 hex digits."""
    return code_version(symbols)


def load(name: str) -> Module:
    """The parsed bindings of module `name`; PunaError where its file is no longer what this process imported."""
    file = source_file(name)
    if file is not None:
        return _read(name, file)
    cells = notebook() if name == "__main__" else ""
    if not cells:
        raise PunaError(f"module {name}: its source is kept nowhere; declare the stage in a file, or give it version=")
    return _parse(name, Path("notebook"), cells)


def _read(name: str, file: Path) -> Module:
    stat = file.stat()
    return _at(name, file, stat.st_mtime_ns, stat.st_size, sources.seen(file))


@lru_cache(maxsize=1024)
def _at(name: str, file: Path, mtime: int, size: int, digest: str) -> Module:
    sources.check([file])
    return _parse(name, file, file.read_text(encoding="utf-8"))


def _is_module(name: str) -> bool:
    return source_file(name) is not None


@lru_cache(maxsize=4096)
def _is_followed(origin: str) -> bool:
    """Whether what an import names comes from a module that is followed."""
    top = origin.split(".")[0]
    return top == "puna" or (top not in sys.stdlib_module_names and source_file(top) is not None)


# Python 3.11 counts the depth of the trees of all threads in one place, and calls a mismatch what two of them built at once.
_PARSING = threading.Lock()


@lru_cache(maxsize=1024)
def _parse(name: str, file: Path, content: str) -> Module:
    module = Module(name, file)
    loose: list[Binding] = []
    with _PARSING:
        tree = ast.parse(content)
    for binding in statements(tree.body):
        node = binding.node
        if isinstance(node, ast.Import | ast.ImportFrom):
            for local, target in _imports(node, name).items():
                module.imports.setdefault(local, []).append(target)
            for local, origin in _origins(node).items():
                # An import that a condition decides counts as a definition does.
                if binding.guards:
                    module.symbols.setdefault(local, []).append(binding)
                elif not _is_followed(origin):
                    module.foreign[local] = origin
            continue
        names = bound(node)
        for symbol in sorted(names):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not binding.guards and not node.decorator_list:
                module.symbols[symbol] = []  # a later definition replaces an earlier one: a notebook's cell that was run again
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
            if _is_followed(alias.name):
                top = alias.name.split(".")[0]
                found[alias.asname or top] = (alias.name if alias.asname else top, None)
        return found
    base = node.module or ""
    if node.level:
        package = where if (source_file(where) or Path()).name == "__init__.py" else where.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        base = f"{package}.{base}" if base else package
    if node.level or _is_followed(base):
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


def _found_packages(nodes: list[ast.AST]) -> Iterator[str]:
    """Libraries whose files are read without importing them: `find_spec("name")`, `files("name")`."""
    for node in nodes:
        if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("find_spec", "files", "import_module") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def _beside(words: Iterable[str], folder: Path) -> Iterator[data_files.Opened]:
    """Files beside the module, or in the folder `data` there, that a string names."""
    for word in words:
        for path in (folder / word, folder / "data" / word):
            if path.is_file():
                yield data_files.Opened(path)
