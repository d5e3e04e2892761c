"""The version of a stage's code: a hash over the syntax trees of all first-party code that it reaches.

The analyser follows the names in the stage's function and configuration, through imports (also inside functions). It reaches functions,
classes and constants of Puna, of plugins and of a user's modules. Comments, docstrings, annotations (except arguments of `Annotated`),
bounds in `Field`, error messages, local names, formatting and module names do not count. A tensor operation counts by its reference and by
the version in its module's `NUMERICS` (`tests/identity/numerics.py` compares the bits). Data files that the code opens and library versions
count. The contract and the store do not affect content and are not followed; `FORMAT`, here and in the manifest, stands for them."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from puna.stages.identity import data_files, libraries, sources
from puna.stages.identity.bindings import Module, Target, imported_names, is_followed, is_module, load, origins
from puna.stages.identity.modules import source_file
from puna.stages.identity.reach import Reach, cached_reach, keep
from puna.stages.identity.syntax import text
from puna.storage.manifest import MEANING

if TYPE_CHECKING:
    from puna.stages.contract.declaration import Stage

FORMAT = 1  # version of the contract: of the inputs that stages get, and of how parts are cut and joined. A new version changes every key
Name = tuple[str, str]
OUTSIDE = ("puna.storage", "puna.stages.contract", "puna.stages.identity", "puna.stages.executors", "puna.stages.plugins")


def symbols(stage: Stage, named: Iterable[Name] = ()) -> dict[str, str]:
    """Return name → hash of all code that affects a stage's output (or its `version`). `named`: symbols that the configuration names."""
    return reach(*named) | {"version": stage.version} if stage.version else reach(*_roots(stage), *named)


def check_unedited(stage: Stage, named: Iterable[Name] = ()) -> None:
    """Raise PunaError if a file that the stage reaches has changed since this process read it."""
    sources.check(_reach(*([] if stage.version else _roots(stage)), *named).files)


def _roots(stage: Stage) -> tuple[Name, Name]:
    return (stage.function.__module__, stage.function.__name__), (stage.config.__module__, stage.config.__qualname__.split(".")[0])


def reach(*roots: Name) -> dict[str, str]:
    """Return `module.symbol` → hash of these symbols (module, name) and of all that they reach, `module:path` → hash of data files, and
    `library:name` → version. A key uses only `contract`, the contract's version, and `meaning`, a hash of the rest without module names."""
    reach = _reach(*roots)
    hashes = {"contract": str(FORMAT), **reach.symbols}
    data = []
    for name, file in reach.data:
        # The stage may have read the file before it changed.
        sources.check([file])
        hashes[name] = sources.source_digest(file)
        data.append((os.path.basename(file), hashes[name]))
    versions = {f"library:{name}": version for name in reach.libraries if (version := libraries.version_in_key(name))}
    content = json.dumps([reach.meaning, sorted(set(data)), versions])
    return hashes | versions | {MEANING: hashlib.sha256(content.encode()).hexdigest()[:32]}


def _reach(*roots: Name) -> Reach:
    reach = cached_reach(roots)
    if reach is None:
        followed = _follow(*roots)
        reach = Reach(
            {f"{where}.{what}": symbol.hash for (where, what), symbol in followed.symbols.items()},
            {str(file): sources.source_digest(file) for file in followed.sources},
            [(f"{where}:{os.path.relpath(file, load(where).file.parent)}", str(file)) for where, file in followed.data()],
            sorted({library for symbol in followed.symbols.values() for library in symbol.libraries}),
            followed.meaning(roots),
        )
        keep(roots, reach)
    return reach


@dataclass
class Followed:
    """Code reached from some roots: symbols by (module, name), and their source files."""

    symbols: dict[Name, Symbol] = field(default_factory=dict)
    sources: set[Path] = field(default_factory=set)

    def meaning(self, roots: Iterable[Name]) -> str:
        """Return one hash of all reached statements and of the symbols that their names refer to.

        Symbols are told apart like the states of a minimal automaton (Hopcroft 1971, as colour refinement): a symbol's first colour is its
        text; each round adds the colours of the symbols that it uses, in order, until no colour splits. Module names do not count."""
        edges = {
            name: [end for use in (*symbol.uses, *load(name[0]).imports.get(name[1], [])) for end in self._ends(use)]
            for name, symbol in self.symbols.items()
        }
        colours = {name: symbol.hash for name, symbol in self.symbols.items()}
        classes = 0
        while (now := len(set(colours.values()))) > classes:
            classes = now
            colours = {name: _hash([colours[name], *(colours[end] for end in edges[name])]) for name in colours}
        return _hash([*sorted(colours[end] for root in roots for end in self._ends(root)), "", *sorted(set(colours.values()))])

    def _ends(self, target: Target, through: frozenset[Target] = frozenset()) -> list[Name]:
        """Return the reached symbols that `target`, a module and a name in it, refers to, directly or through imports."""
        where, what = target
        if what is None or target in through or where.startswith(OUTSIDE):
            return []
        if (where, what) in self.symbols:
            return [(where, what)]
        if targets := load(where).imports.get(what, []):
            return [end for one in targets for end in self._ends(one, through | {target})]
        module = f"{where}.{what}"
        return [name for name in sorted(self.symbols) if name[0] == module] if is_module(module) else []

    def data(self) -> Iterator[tuple[str, Path]]:
        """Yield (module, file) for each data file that a module opens."""
        words = {word for symbol in self.symbols.values() for word in symbol.texts}
        for (where, _), symbol in self.symbols.items():
            for opened in symbol.opened:
                if sources.ROOT.is_relative_to(opened.path):
                    continue  # Puna's own folder is not data
                if not opened.path.is_dir():
                    yield where, opened.path
                    continue
                # If a variable holds the file name, use all strings in the code that name files in the folder.
                files = [opened.path / word for word in sorted(words) if (opened.path / word).is_file()] if opened.names else []
                for file in files or data_files.below(opened.path):
                    yield where, file


def _follow(*roots: Name) -> Followed:
    followed = Followed()
    todo, visited = list(roots), set[Name]()
    while todo:
        where, what = todo.pop()
        if (where, what) in visited or where.startswith(OUTSIDE):
            continue
        visited.add((where, what))
        source = load(where)
        if source.file.is_file():
            followed.sources.add(source.file)
        for target in source.imports.get(what, []):
            todo.extend(_targets(*target))
        symbol = _symbol(source, what)
        if symbol is not None:
            followed.symbols[where, what] = symbol
            todo.extend(symbol.uses)
        elif what not in source.imports and is_module(f"{where}.{what}"):
            todo.extend((f"{where}.{what}", name) for name in load(f"{where}.{what}").symbols)
    return followed


@dataclass(frozen=True)
class Symbol:
    """A name's binding: the hash of its statements, and what they use. `uses` are in text order, with repetitions."""

    hash: str
    uses: tuple[Name, ...]
    opened: tuple[data_files.Opened, ...]
    texts: tuple[str, ...]
    libraries: tuple[str, ...]


@lru_cache(maxsize=8192)
def _symbol(source: Module, name: str) -> Symbol | None:
    statements = source.symbols.get(name)
    if statements is None:
        return None
    if name in source.numerics:
        return _operation(source, name)
    uses: list[Name] = []
    opened: list[data_files.Opened] = []
    words: list[str] = []
    foreign: dict[str, str] = {}
    parts: list[str] = []
    for node in statements:
        plain, annotations = source.canonical(node)
        inside = list(ast.walk(plain))
        imports: dict[str, list[Target]] = {}
        for inner in inside:
            if isinstance(inner, ast.Import | ast.ImportFrom):
                for own, target in imported_names(inner, source.name).items():
                    imports[own] = list(dict.fromkeys((*imports.get(own, []), target)))
                foreign.update({f" {origin}": origin for origin in origins(inner).values() if not is_followed(origin)})
            elif isinstance(inner, ast.Name) and inner.id in source.foreign:
                foreign[inner.id] = source.foreign[inner.id]
        local = source.imports | imports
        names, plain_text = _names_in(plain, source, local)
        parts.append(plain_text)
        uses += names
        for annotation in annotations:
            uses += _names_in(annotation, source, local)[0]
        words += data_files.texts(inside)
        foreign.update({f" {name}": name for name in _libraries_by_name(inside)})
        if any(isinstance(n, ast.Name) and isinstance(_constant(source, n.id), Path) for n in inside):
            opened += data_files.opened_files(plain, partial(_constant, source))
    opened += _beside(dict.fromkeys(words), source.file.parent)
    parts += sorted(f"{local}={origin}" for local, origin in foreign.items() if not local.startswith(" "))
    return Symbol(
        _hash(parts), tuple(uses), tuple(dict.fromkeys(one for one in opened if one.path.exists() and one.path.suffix != ".py")),
        tuple(dict.fromkeys(words)), tuple(sorted({origin.split(".")[0] for origin in foreign.values()} - _SILENT)),
    )  # fmt: skip


def _operation(source: Module, name: str) -> Symbol:
    """Return the symbol of a tensor operation: its declared version, and a use of its reference if it has one."""
    reference = f"{name.rstrip('_')}_reference"
    uses = ((source.name, reference),) if reference in source.symbols else ()
    return Symbol(_hash(["numerics", str(source.numerics[name])]), uses, (), (), ())


_SILENT = frozenset(sys.stdlib_module_names) - {"re", "unicodedata"}


@lru_cache(maxsize=65536)
def _constant(source: Module, name: str, depth: int = 0) -> data_files.Value:
    """Return the path or text bound to `name` in a module, following first-party imports; None if it cannot be determined."""
    if name == "__file__":
        return source.file
    bindings = source.symbols.get(name, [])
    if len(bindings) == 1 and isinstance(node := bindings[0], ast.Assign | ast.AnnAssign) and depth < 20:
        return data_files.value(node.value, lambda inner: _constant(source, inner, depth + 1) if inner != name else None)
    if not bindings and len(targets := source.imports.get(name, [])) == 1 and depth < 20:
        module, symbol = targets[0]
        if symbol is not None and source_file(module) is not None:
            return _constant(load(module), symbol, depth + 1)
    return None


def _targets(module: str, symbol: str | None) -> list[tuple[str, str]]:
    return [] if symbol is None or module.startswith(OUTSIDE) else [(module, symbol)]


def _names_in(node: ast.AST, source: Module, local: dict[str, list[Target]]) -> tuple[list[Name], str]:
    """Return the first-party symbols in a tree, in order, and the tree's text with `module.symbol` written as `symbol`."""
    uses: list[Name] = []

    def reference(inner: ast.AST) -> str | None:
        if isinstance(inner, ast.Import | ast.ImportFrom):
            return "" if imported_names(inner, source.name) and not any(not is_followed(o) for o in origins(inner).values()) else None
        if isinstance(inner, ast.Attribute) and (chain := _chain(inner)):
            targets = [_resolve(target, chain[1:]) for target in local.get(chain[0], [])]
            uses.extend(target for target in targets if target is not None)
            # A conditionally imported module is a symbol too: its name counts together with the attribute.
            if targets and None not in targets and chain[0] not in source.symbols:
                return f"Name(id={chain[-1]!a})"
        elif isinstance(inner, ast.Name):
            if inner.id in source.symbols:
                uses.append((source.name, inner.id))
            uses.extend(name for target in local.get(inner.id, []) for name in _targets(*target))
        return None

    return uses, text(node, reference)


def _chain(node: ast.expr) -> list[str]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _resolve(target: Target, attributes: list[str]) -> Name | None:
    """Return the symbol that `alias.a.b` names, where alias and all but the last attribute are modules; None otherwise."""
    module = target[0] if target[1] is None else f"{target[0]}.{target[1]}"
    for name in attributes[:-1]:
        module = f"{module}.{name}"
    return (module, attributes[-1]) if attributes and is_module(module) else None


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _libraries_by_name(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the libraries named by a string in calls of `find_spec`, `files` or `import_module`."""
    for node in nodes:
        if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("find_spec", "files", "import_module") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def _beside(words: Iterable[str], folder: Path) -> Iterator[data_files.Opened]:
    """Yield the files in `folder`, or in its subfolder `data`, that are named by a string in the code."""
    for word in words:
        for path in (folder / word, folder / "data" / word):
            if path.is_file():
                yield data_files.Opened(path)
