"""Imports of scripts that no test runs completely: every imported name exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for folder in ("tests/benchmarks", "deploy", "docs") for path in (ROOT / folder).glob("*.py"))


def file_of(module: str) -> Path | None:
    """Return the file of a module of the project, or of a package."""
    path = ROOT.joinpath(*module.removeprefix("puna.").split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def names(file: Path) -> set[str]:
    """Return the names that a module has after its import."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_imports_what_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.module.split(".")[0] not in ("puna", "tests"):
            continue
        file = file_of(node.module)
        for alias in node.names:
            inside = file is not None and alias.name in names(file)
            assert inside or file_of(f"{node.module}.{alias.name}") is not None, f"line {node.lineno}: {node.module} has no {alias.name}"
