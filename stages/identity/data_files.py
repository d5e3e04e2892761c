"""The data files that a statement opens, from path expressions evaluated without running them."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Value = Path | str | None
OS_PATH: dict[str, Callable[..., str]] = {"join": os.path.join, "dirname": os.path.dirname, "abspath": os.path.abspath}
Lookup = Callable[[str], Value]
"""A function from a name in a module (or `__file__`) to the path or text that the name is bound to, or None."""


@dataclass(frozen=True)
class Opened:
    """A file that code opens, or the folder of a file of unknown name. `names`: strings anywhere in the code may be the file's name."""

    path: Path
    names: bool = False


def opened_files(node: ast.AST, lookup: Lookup) -> Iterator[Opened]:
    """Yield the files and folders that a statement's path expressions denote, except a folder that is only assigned to a name."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(path := value(node.value, lookup), Path) and path.is_dir():
        return
    yield from _opened_in(node, lookup, names=False)


def _opened_in(node: ast.AST | None, lookup: Lookup, names: bool) -> Iterator[Opened]:
    if node is None:
        return
    if isinstance(node, ast.expr) and isinstance(path := value(node, lookup), Path):
        yield Opened(path, names)
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        yield from _opened_in(node.left, lookup, names=isinstance(node.right, ast.Name | ast.Attribute | ast.Constant))
        yield from _opened_in(node.right, lookup, names=False)
        return
    for child in ast.iter_child_nodes(node):
        yield from _opened_in(child, lookup, names=False)


def value(node: ast.AST | None, lookup: Lookup) -> Value:
    """Return the path or text of an expression, or None if only running the code would give it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return Path(str(lookup("__file__"))) if node.id == "__file__" else lookup(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        left, right = value(node.left, lookup), value(node.right, lookup)
        return left / right if isinstance(left, Path) and right is not None else None
    if isinstance(node, ast.Attribute) and node.attr == "parent":
        base = value(node.value, lookup)
        return base.parent if isinstance(base, Path) else None
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "parents":
        base = value(node.value.value, lookup)
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return base.parents[index] if isinstance(base, Path) and isinstance(index, int) and index < len(base.parents) else None
    return _call(node, lookup) if isinstance(node, ast.Call) else None


def _call(node: ast.Call, lookup: Lookup) -> Value:
    arguments = [str(argument) for item in node.args if (argument := value(item, lookup)) is not None]
    if len(arguments) < len(node.args):
        return None
    if isinstance(node.func, ast.Name):
        return Path(*arguments) if node.func.id == "Path" and arguments else None
    if not isinstance(node.func, ast.Attribute):
        return None
    name = node.func.attr
    if arguments and ast.unparse(node.func.value) == "os.path":
        return Path(OS_PATH[name](*arguments)) if name in OS_PATH else None
    base = value(node.func.value, lookup)
    if isinstance(base, Path) and name in ("resolve", "absolute", "expanduser"):
        return base
    if isinstance(base, Path) and name in ("joinpath", "with_name", "with_suffix") and arguments:
        return Path(getattr(base, name)(*arguments))
    return None


def texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for inner in nodes:
        word = inner.value if isinstance(inner, ast.Constant) else None
        if isinstance(word, str) and 0 < len(word) < 100 and word[0] not in "./" and all(c.isalnum() or c in "._-/" for c in word):
            yield word


def below(folder: Path) -> list[Path]:
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        files += [Path(place, name) for name in sorted(names) if not name.endswith((".py", ".pyc")) and not name.startswith(".")]
    return files
