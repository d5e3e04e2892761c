"""Data cannot name code: a prompt's verifier can use built-in verifiers, and functions only from modules that a user allowed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from puna.stages import plugins
from puna.stages.contract import External, execute
from puna.stages.io.imports import ImportPromptsConfig, import_prompts
from puna.stages.verifiers.registry import from_json
from puna.storage import Artifact, PunaError, Store
from tests.security import cases_code


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on the module path with a module whose import leaves a file, and an allowed module that imports a library."""
    monkeypatch.setattr(plugins, "_modules", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    cases_code.write_modules(tmp_path)
    plugins.add("kind_module")
    yield tmp_path
    for name in ("evil_module", "evil_package", "evil_package.evil", "kind_module"):
        sys.modules.pop(name, None)


def test_a_verifier_names_no_code_that_nobody_allowed(evil: Path) -> None:
    assert list(cases_code.accepted(evil)) == []


def test_a_function_of_an_allowed_module_goes_on_working(evil: Path) -> None:
    from_json({"name": "python", "function": "kind_module:kind"})
    with pytest.raises(PunaError, match="is not allowed: data may not choose code. If you trust that module, allow it: --module evil_module"):
        from_json({"name": "python", "function": "evil_module:go"})


def imported(folder: Path, rows: list[dict[str, object]], **settings: object) -> Artifact:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ImportPromptsConfig.model_validate(settings)
    return execute(import_prompts, config, {"inputs": External.resolve(f"rows={file}")}, Store.open(folder / "store"))


def test_an_import_refuses_rows_that_name_code(evil: Path) -> None:
    verifiers: list[object] = [
        {"name": "exact"}, {"name": "python", "function": "puna.stages.curate.signals.user_signals:_definition"}, {"name": "python", "function": "evil_module:go"},
        json.dumps({"name": "product", "of": [{"name": "python", "function": "os:system"}]}), {"name": "no_such"},
        {"name": "python", "function": "kind_module:kind"},
    ]  # fmt: skip
    rows: list[dict[str, object]] = [{"prompt": f"q{n}", "reference": "a", "verifier": verifier} for n, verifier in enumerate(verifiers)]
    with pytest.raises(PunaError, match=r"row 2, field verifier: .*is Puna's"):
        imported(evil, rows, bad_rows="refuse")
    made = imported(evil, rows, bad_rows="drop")
    assert made.rows() == 1 and made.manifest.metrics["dropped_names_code"] == 4 and made.manifest.metrics["dropped_no_verifier"] == 1
    # The allowed modules are part of the key: allowing one runs the import again.
    assert imported(evil, rows, bad_rows="drop", code_from=["kind_module"]).rows() == 2
    assert not list(evil.rglob("ran"))


def test_the_command_allows_a_module(evil: Path) -> None:
    file = evil / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "q", "verifier": {"name": "python", "function": "my_checks:right"}}) + "\n")
    (evil / "my_checks.py").write_text("def right(answer):\n    return answer == 'a'\n")
    command = [sys.executable, "-m", "puna.flows.cli.main", "import", "prompts", str(file), "--store", str(evil / "store")]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1 and "row 1, field verifier" in refused.stderr and "--module my_checks" in refused.stderr
    allowed = subprocess.run([*command, "--module", str(evil / "my_checks.py"), "--json"], capture_output=True, text=True)
    assert allowed.returncode == 0, allowed.stderr


@pytest.mark.parametrize(("column", "value"), [("choices", ["a", "b"]), ("instruction_id_list", ["punctuation:no_comma"]), ("test", "assert f(1)")])
def test_an_import_refuses_columns_without_which_a_row_means_something_else(tmp_path: Path, column: str, value: object) -> None:
    row: dict[str, object] = {"prompt": "q", "reference": "1", column: value}
    with pytest.raises(PunaError, match=f"column '{column}' contains"):
        imported(tmp_path, [row])
    # A verifier replaces the row's own checks, but not fields that the question lacks.
    more: dict[str, Any] = {"ignored_columns": ["choices"]} if column == "choices" else {}
    assert imported(tmp_path, [row | {"verifier": {"name": "exact"}}], **more).rows() == 1


def test_a_tenth_of_imported_prompts_is_held_out(tmp_path: Path) -> None:
    made = imported(tmp_path, [{"prompt": f"question {n}", "reference": "a"} for n in range(1000)])
    assert 60 < made.manifest.metrics["heldout"] < 140


PICKLES = {
    "stages/executors/worker.py", "stages/curate/signals/user_signals.py", "models/untrusted/bounded_process.py",  # a process and its own child or worker
    "kernels/cpu/numba_cache.py",  # compiled loops, read only from files that only this user can have written
}  # fmt: skip


def test_nothing_else_reads_or_writes_pickles() -> None:
    root = Path(__file__).parents[2]
    files = [file for folder in ("flows", "kernels", "models", "stages", "storage") for file in (root / folder).rglob("*.py")]
    names = re.compile(r"^\s*(import|from) (cloudpickle|dill|joblib|pickle|shelve)\b|\btorch\.load\(|allow_pickle=True", re.MULTILINE)
    assert {str(file.relative_to(root)) for file in files if names.search(file.read_text(encoding="utf-8"))} == PICKLES
