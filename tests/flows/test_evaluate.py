"""`puna evaluate` and `puna compare`, run from the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.stages.contract import External, Instructions, Model, StageConfig, StageRun, execute, stage
from puna.stages.conversations import dump
from puna.stages.io.import_model import ImportModelConfig, import_model
from puna.storage import PunaError, Store
from puna.storage.schemas import table_schema
from tests.flows.planted import pool
from tests.stages.evaluation.conftest import saved

TASK = {
    "task": "animals", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "../data/animals.jsonl"}}, "test_split": "test",
    "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "options", "doc_to_target": "right",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "tasks").mkdir()
    rows = [{"q": f"{n} eats", "options": ["grass", "stones"], "right": n % 2} for n in range(6)]
    (tmp_path / "data" / "animals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks" / "animals.yaml").write_text(yaml.safe_dump(TASK))
    for seed in (0, 1):
        saved(tmp_path / f"model{seed}", seed)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@stage(kind="model", version="1")
def trained(model: Model, instructions: list[Instructions], config: StageConfig, run: StageRun) -> None:
    """Stand in for a training step: return the same weights."""
    shutil.copytree(model.path(), run.folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json", ".*"))


def planted(folder: Path) -> None:
    """Write documents, and eight held-out prompts of two tasks."""
    store = Store.open(folder / "store")
    store.set_alias("prompts@latest", pool(store, 0, 4))
    store.set_alias("documents@latest", store.import_table("documents", pa.Table.from_pylist([], schema=table_schema("documents").schema)))


def puna(*words: str) -> Any:
    done = CliRunner().invoke(app, [*words, "--store", "store"])
    if isinstance(done.exception, PunaError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_models_in_folders_are_scored_and_compared(folder: Path) -> None:
    text = puna("evaluate", "model0", "--tasks", "tasks/animals.yaml", "-o", "results.json", "--limit", "5")
    (row,) = [line.split() for line in text.splitlines() if " acc " in line]
    results = json.loads((folder / "results.json").read_text())
    assert results["results"]["animals"]["acc,none"] == pytest.approx(float(row[2]), abs=1e-4) and results["n-samples"]["animals"] == {"effective": 5}
    ids = []
    for name in ("model0", "model1"):
        lines = [json.loads(line) for line in puna("evaluate", name, "--tasks", "tasks/animals.yaml", "--json").splitlines()]
        assert [line.get("stage") for line in lines[:-1]] == ["import_model", "benchmark"] and "animals" in lines[-1]["results"]
        ids.append([line["id"] for line in lines[:-1]])
    by_model, by_evaluation = (puna("compare", ids[0][at], ids[1][at], "--all", "--json").splitlines() for at in (0, 1))
    assert by_model == by_evaluation
    rows = [json.loads(line) for line in by_model]
    assert [(row["task"], row["metric"], row["n"]) for row in rows] == [("animals", "acc", 6), ("animals", "acc_norm", 6)]
    assert "p (Holm)" in puna("compare", ids[0][0], ids[1][0])
    board = json.loads(puna("sql", "select rank, model, n from leaderboard where metric = 'acc' and n = 6 and rank = 1 limit 1", "--json"))
    assert board["rank"] == 1 and board["n"] == 6


@pytest.mark.parametrize(("words", "message"), [
    (("--tasks", "none.yaml"), "--tasks none.yaml: there is no such task file or folder; tasks by name need --harness"),
    (("--tasks", "tasks/lost.yaml"), "data_files: gone.jsonl not found, neither beside the task file nor in the working directory"),
    (("--tasks", "tasks/animals.yaml", "--n", "4", "--harness"), "the harness takes options, answers and temperature from the task file"),
    (("--tasks", "gone@latest"), "gone@latest"),
    (("--tasks", "documents@latest"), "cannot be a task: name prompts, or a task file"),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused_before_anything_runs(folder: Path, words: tuple[str, ...], message: str) -> None:
    lost = TASK | {"dataset_kwargs": {"data_files": {"test": "gone.jsonl"}}}
    (folder / "tasks" / "lost.yaml").write_text(yaml.safe_dump(lost))
    planted(folder)
    with pytest.raises(PunaError) as refused:
        puna("evaluate", "model0", *words)
    assert message in str(refused.value) and not (folder / "store" / "objects" / "model").exists()


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="the harness is installed")
def test_a_missing_harness_is_one_clear_error(folder: Path) -> None:
    with pytest.raises(PunaError, match="is not installed: pip install 'puna\\[harness\\]', or leave --harness out"):
        puna("evaluate", "model0", "--tasks", "hellaswag", "--harness")


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="pip install 'puna[harness]'")
def test_the_harness_measures_the_same(folder: Path) -> None:
    own, its = (json.loads(puna("evaluate", "model0", "--tasks", "tasks/animals.yaml", "--json", *more).splitlines()[-1]) for more in ((), ("--harness",)))
    for metric in ("acc,none", "acc_norm,none"):
        assert own["results"]["animals"][metric] == its["results"]["animals"][metric]


def test_prompts_without_a_verifier_are_named_at_their_import(folder: Path) -> None:
    rows = [{"prompt": "Name a fruit."}, {"prompt": "1 + 1?", "answer": "2", "verifier": {"name": "numeric"}}]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = CliRunner().invoke(app, ["import", "prompts", "asked.jsonl", "--store", "store", "--json"])
    assert "1 of 2 prompts have no verifier: rounds and" in done.stderr and "import again with --verifier (numeric, exact" in done.stderr
    assert json.loads(done.stdout)["stage"] == "import_prompts"


def test_prompts_of_an_artifact_are_asked_beside_task_files(folder: Path) -> None:
    planted(folder)
    results = json.loads(puna("evaluate", "model0", "--tasks", "tasks/animals.yaml,prompts@latest", "--limit", "2", "--max-tokens", "4", "--json").splitlines()[-1])
    assert {name: one["effective"] for name, one in results["n-samples"].items()} == {"animals": 2, "a": 2, "b": 2}
    assert "verified,none" in results["results"]["a"]


def test_a_module_with_a_verifier_is_allowed_by_name(folder: Path) -> None:
    (folder / "short_checks.py").write_text("def always(answer):\n    return 1.0\n")
    rows = [{"prompt": f"question {n}", "split": "heldout", "verifier": {"name": "python", "function": "short_checks:always"}} for n in range(2)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = [sys.executable, "-m", "puna.flows.cli.main"]
    more = ["--store", "store", "--module", "short_checks.py", "--json"]
    made = json.loads(subprocess.run([*base, "import", "prompts", "asked.jsonl", *more], check=True, capture_output=True, text=True).stdout)
    asked = [*base, "evaluate", "model0", "--tasks", made["id"], "--max-tokens", "4"]
    refused = subprocess.run([*asked, *more[:2]], capture_output=True, text=True)
    assert refused.returncode == 1 and "allow it: --module short_checks" in refused.stderr
    allowed = subprocess.run([*asked, *more], check=True, capture_output=True, text=True)
    results = json.loads(allowed.stdout.splitlines()[-1])
    assert results["n-samples"]["asked"]["effective"] == 2 and "verified,none" in results["results"]["asked"]


def test_a_judge_grades_answers_where_one_is_named(folder: Path) -> None:
    spec = {"output_type": "generate_until", "doc_to_text": "q", "doc_to_target": "{{right}}", "generation_kwargs": {"max_gen_toks": 4}}
    own = {name: TASK[name] for name in ("dataset_path", "dataset_kwargs", "test_split")}
    judged = {**own, **spec, "task": "judged", "verifier": {"name": "judge", "rubric": "0 bad, 5 good"}}
    (folder / "tasks" / "judged.yaml").write_text(yaml.safe_dump(judged))
    with pytest.raises(PunaError, match="judged.yaml: verifier judge needs a language model, but the input `judges` has none"):
        puna("evaluate", "model0", "--tasks", "tasks/judged.yaml")
    judge = json.loads(CliRunner().invoke(app, ["import", "model", "model1", "--store", "store", "--json"]).stdout)["id"]
    text = puna("evaluate", "model0", "--tasks", "tasks/judged.yaml", "--judge", judge)
    (row,) = [line.split() for line in text.splitlines() if " verified " in line]
    assert 0 <= float(row[2]) <= 1


def test_the_lookup_in_training_data_can_be_left_out(folder: Path) -> None:
    text = "Question: 0 eats grass or stones, what does it eat? It eats grass, as all of them do here."
    store = Store.open(folder / "store")
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "grass"}]
    row = {"id": "t", "prompt_id": "t", "task": "t", "split": "train", "messages": dump(turns), "tools": None, "source": "s", "score": None}
    learned = store.import_table("instructions", pa.Table.from_pylist([row], schema=table_schema("instructions").schema))
    base = execute(import_model, ImportModelConfig(), {"model": External.resolve(f"model={folder / 'model0'}")[0]}, store)
    tuned = execute(trained, StageConfig(), {"model": base, "instructions": [learned]}, store)
    (folder / "data" / "animals.jsonl").write_text(json.dumps({"q": text, "options": ["grass", "stones"], "right": 0}) + "\n")
    for more, shown in (((), True), (("--no-contamination",), False)):
        assert ("contaminated" in puna("evaluate", tuned.id, "--tasks", "tasks/animals.yaml", *more)) == shown
