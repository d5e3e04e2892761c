"""Counts of Puna's source: lines, files, and signs of code that is hard to maintain.

    PYTHONPATH=.pkg python tests/benchmarks/house.py --json

`source_lines`: lines of Python in flows, stages, models, kernels and storage. `single_importer_small_files`: files under 90 lines with one
importer. `docstrings_by_question_word`: docstrings that begin with a question word. `functions_over_60`: functions of more than 60 lines.
`private_names_of_others`: underscore names read from another library or its objects. `stages_keyed_by_location`: stages whose key changes
when files are moved and renamed.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.identity.moving import ROOMS, copied, move_rooms, versions  # noqa: E402

QUESTION = re.compile(r"(What|Who|Whose|Whether|Where|How|Which|Why|When|As many|In how many)\b")
PUBLIC = {"os._exit", "_thread", "self._strip_protocol"}
"""Names with an underscore that the references of Python and fsspec document."""
TUPLE = {"_fields", "_asdict", "_replace", "_make"}
"""Attributes of named tuples, which Python's reference documents."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def module_of(file: Path) -> str:
    """Return the dotted name of a source file."""
    return ".".join(("puna", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def imports(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Yield the modules of Puna that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in modules or node.module in modules:
                    yield name if name in modules else node.module


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield names with one leading underscore that are taken from a module outside Puna."""
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {alias.asname or alias.name.split(".")[0] for alias in node.names if not alias.name.startswith("puna")}
            yield from (alias.name for alias in node.names if not alias.name.startswith("puna") and _private(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("puna") and not node.level:
            foreign |= {alias.asname or alias.name for alias in node.names}
            yield from (f"{node.module}.{alias.name}" for alias in node.names if _private(f"{node.module}.{alias.name}"))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=base, attr=name) | ast.Call(func=ast.Name(id="getattr"), args=[base, ast.Constant(value=str(name)), *_]):
                while isinstance(base, ast.Attribute):
                    base = base.value
                if _private(name) and isinstance(base, ast.Name) and base.id in foreign:
                    yield ast.unparse(node)


def names_of_own(trees: list[ast.Module]) -> set[str]:
    """Return the names that Puna's own code defines: functions, classes, attributes and variables."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {node.name for node in nodes if isinstance(node, (*FUNCTIONS, ast.ClassDef))}
    defined |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return defined | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def private_attributes(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Yield attributes with an underscore that no code of Puna defines: they belong to objects of another library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _private(node.attr) and node.attr not in own | TUPLE:
            yield ast.unparse(node)


def _private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split(".")) and not name.startswith("__future__")


def count() -> dict[str, int]:
    """Return the counts that need no process of their own."""
    files = sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    modules = {module_of(file): file for file in files}
    importers: dict[str, set[Path]] = defaultdict(set)
    for file, tree in trees.items():
        for name in imports(tree, set(modules)):
            importers[name].add(file)
    small = [f for name, f in modules.items() if len(importers[name] - {f}) == 1 and texts[f].count("\n") < 90 and f.name != "__init__.py"]
    documented = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, (*FUNCTIONS, ast.ClassDef, ast.Module))]
    functions = [n for n in documented if isinstance(n, FUNCTIONS)]
    own = names_of_own(list(trees.values()))
    foreign = {name for tree in trees.values() for name in (*private_names(tree), *private_attributes(tree, own))}
    return {
        "source_lines": sum(text.count("\n") for text in texts.values()),
        "files": len(files),
        "single_importer_small_files": len(small),
        "flat_files_flows": len([f for f in files if f.parent == ROOT / "flows" and f.name != "__init__.py"]),
        "docstrings_by_question_word": sum(bool(QUESTION.match(ast.get_docstring(n) or "")) for n in documented),
        "functions_over_60": sum((n.end_lineno or n.lineno) - n.lineno + 1 > 60 for n in functions),
        "private_names_of_others": len(foreign - PUBLIC),
    }


def keyed_by_location() -> int:
    """Return the number of stages whose key changes when files move and are renamed."""
    with tempfile.TemporaryDirectory() as folder:
        place = copied(Path(folder))
        before = versions(place)
        move_rooms(place)
        after = versions(place)
    return sum(after[name][0] != version for name, (version, _) in before.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Count Puna's source.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    as_json = parser.parse_args().json
    found = count() | {"stages_keyed_by_location": keyed_by_location()}
    if as_json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:32s}{value:8d}")


if __name__ == "__main__":
    main()
