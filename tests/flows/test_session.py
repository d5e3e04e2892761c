"""How runs that fail or are stopped are reported: in the terminal, in the log, and by commands that read the store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import Field

from puna.flows.engine.console import Console
from puna.flows.engine.plan import plan_stage
from puna.flows.engine.session import session
from puna.flows.report import place, write
from puna.stages.contract import Outcome, StageConfig, StageRun, stage
from puna.stages.curate.heuristics import HeuristicsConfig, heuristics
from puna.stages.prompts.prompts import PromptsConfig, Task, prompts
from puna.storage import Identity, PunaError, Store
from puna.storage.schemas import table_schema

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("error", "state", "said"), [
    (PunaError("field: wrong"), "failed", "field: wrong"), (ValueError(), "failed", "ValueError"), (KeyboardInterrupt(), "stopped", ""),
])  # fmt: skip
def test_the_log_tells_what_ended_a_run(tmp_path: Path, error: BaseException, state: str, said: str) -> None:
    store = Store.open(tmp_path)
    with pytest.raises(type(error)), session(store, flow="curate", workers=1) as now:
        assert store.log(now.run).state == "at work"
        raise error
    log = store.log(now.run)
    assert (log.flow, log.state, log.error) == ("curate", state, said)


def test_a_report_reads_and_writes_in_its_store_alone(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"event": "started", "flow": "curate"}\n')
    store = Store.open(tmp_path / "outer" / "store")
    for name in ("../../x", "../../../x", str(tmp_path / "x")):
        with pytest.raises(PunaError, match="no such run"):
            write(store, name, None)
    assert not list(tmp_path.rglob("*.html"))


def test_the_page_of_a_run_that_made_something_is_written_by_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path)
    monkeypatch.setattr("puna.flows.report.write", None)  # in this process; a worker has its own copy

    with session(store, flow="align", workers=2, report=True) as now:
        now.perform(prompts, PromptsConfig(tasks=(Task(task="gcd"),), train=2, heldout=0, draws=20), {}, "prompts")
    content = store.files.read(place(now.run))
    assert content.startswith(b"<!doctype html>") and now.run.encode() in content


class ResumedConfig(StageConfig):
    phases: tuple[dict[str, int], ...] = Field((), description="Phases")


@stage(kind="documents")
def resumed(config: ResumedConfig, run: StageRun) -> None:
    """Fail once in the second phase, with saved work."""
    if len(config.phases) > 1 and not (saved := run.scratch / "fit-1.json").exists():
        saved.write_text("{}")
        raise PunaError("stopped")
    row = {"id": "a", "url": "https://example.org", "fetched_at": datetime(2024, 1, 1, tzinfo=UTC), "source": "web", "title": None, "text": "x"}
    run.write(pa.Table.from_pylist([row], schema=table_schema("documents").schema))


def test_a_step_with_saved_work_goes_on_and_names_no_other_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, out = Store.open(tmp_path), list[str]()
    for phases in (({"steps": 40},), ({"steps": 60},), ({"steps": 60}, {"steps": 1}), ({"steps": 60}, {"steps": 1})):
        config, before = ResumedConfig(phases=phases), planned_reason(store, phases)
        with suppress(PunaError), session(store, flow="curate", workers=1) as now:
            now.perform(resumed, config, {}, "resumed")
        told = capsys.readouterr()
        out.append(" ".join((told.out + told.err).split()))
        assert before in out[-1]
    assert "runs again" not in out[0] and "resumed runs again: config phases.0.steps: 40 → 60" in out[1]
    assert "resumed runs again: config phases.1: None → {'steps': 1}" in out[2]
    assert "resumed goes on: 1 fit is saved" in out[3] and "runs again" not in out[3]


def planned_reason(store: Store, phases: tuple[dict[str, int], ...]) -> str:
    """Return the reason that a plan gives, and check that the plan makes no folder."""
    folders = sorted(store.root.rglob("work/*"))
    why = plan_stage(resumed, ResumedConfig(phases=phases), {}, store).why
    assert sorted(store.root.rglob("work/*")) == folders
    return "" if why == "never ran" else why


def test_the_first_run_on_a_processor_says_what_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("puna.kernels.cpu.numba_cache.folder", lambda root: tmp_path)
    store = Store.open(tmp_path / "store")
    row = {"id": "a", "url": "https://example.org", "fetched_at": datetime(2024, 1, 1, tzinfo=UTC), "source": "web", "title": None, "text": "x"}
    documents = store.import_table("documents", pa.Table.from_pylist([row]))
    messages = []
    for number in (2, 3):
        with session(store, flow="curate", workers=1) as now:
            now.perform(heuristics, HeuristicsConfig(coverage_n=number), {"documents": documents}, "heuristics")
        told = capsys.readouterr()
        messages.append((told.out + told.err).count("heuristics: compiling the loops of heuristics, only once: about 52 s"))
    assert messages == [1, 0]


def test_a_step_tells_the_rows_that_its_artifact_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model has no rows of its own: the line shows only the dropped rows, without a leading comma."""
    store = Store.open(tmp_path)
    dropped = pa.Table.from_pylist([{"id": "a", "rule": "r", "value": None, "threshold": None, "detail": None}], schema=table_schema("dropped").schema)
    identity = Identity("dpo")
    with store.work(identity.key) as work:
        (work.output / "weights.bin").write_bytes(b"whole")
        work.add("dropped", dropped, "one")
        model = work.commit("model", identity.key, identity)
    documents = store.import_table("prompts", pa.Table.from_pylist([], schema=table_schema("prompts").schema))
    with Console(json=False) as console:
        console.finish_step("dpo", Outcome(model, False, 2.0))
        console.finish_step("prompts", Outcome(documents, False, 2.0))
    told = capsys.readouterr()
    one, other = [" ".join(line.split()[2:]) for line in (told.out + told.err).splitlines() if line.strip()]
    assert (one, other) == ("2.0 s 1 dropped", "2.0 s 0 rows")


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """A path, a metric or a task may contain brackets."""
    with Console(json=False) as console:
        console.say("report: /data/[old]/runs/x.html, [/INST]")
        console.fail_step("[red]step")
    told = capsys.readouterr()
    assert (told.out + told.err).split() == ["report:", "/data/[old]/runs/x.html,", "[/INST]", "[red]step", "not", "finished"]


def test_a_step_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    words = [sys.executable, "-m", "puna.flows.cli.main", "run", "ingest", "--store", str(tmp_path / "store"), "--input", str(tmp_path / "empty.jsonl")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg"), "PREFECT_API_URL": ""}
    done = subprocess.run([*words, "--workers", "1", "--json"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1 and done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.split() == ["ingest", "not", "finished"] and second.startswith("error: ingest: ")
    listed = subprocess.run(
        [sys.executable, "-m", "puna.flows.cli.main", "list", "--runs", "--json", "--store", str(tmp_path / "store")],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    row = json.loads(listed.stdout)
    assert (row["state"], row["artifacts"]) == ("failed", 0) and second == f"error: {row['error']}"


@pytest.mark.parametrize(("words", "status"), [(["list", "--help"], 0), (["show", "nothing", "--store", "nowhere"], 1)])
def test_a_command_ends_with_its_status_after_exit_handlers_and_frees_nothing(words: list[str], status: int) -> None:
    code = """if True:
        import os, sys, weakref
        from puna.flows.cli import main
        class Freed:
            def __del__(self): os.write(2, b"freed")
        sys.kept = Freed()
        weakref.finalize(main, os.write, 2, b"handler ran")
        main.main()
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg")}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, "handler ran" in done.stderr, "freed" in done.stderr) == (status, True, False), done.stderr
    assert ("Usage" in done.stdout) == (status == 0)


WAITING = """
import time
from datetime import UTC, datetime
from pathlib import Path
from puna.flows.report import write
from puna.flows.engine.console import Console
from puna.flows.engine.session import session
from puna.stages.executors import map_in_order
from puna.storage import Store

def wait(name):
    Path(name).touch()
    time.sleep(60)

if __name__ == "__main__":
    import sys
    with session(Store.open(sys.argv[1]), flow="curate", workers=2) as now:
        list(map_in_order(now.executor, wait, [sys.argv[1] + "/a", sys.argv[1] + "/b"], ()))
"""


def test_ctrl_c_ends_the_driver_and_its_workers_in_peace(tmp_path: Path) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg"), "PREFECT_API_URL": ""}
    # A shell starts background jobs with SIGINT ignored; a terminal does not.
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not ((tmp_path / "a").exists() and (tmp_path / "b").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert "Stopped. Every step that started is finished. Go on with the same call" in out
    assert error.count("Traceback") == 1 and "_process_worker" not in error  # the script's own traceback: `puna` prints none
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
