"""Commands in README and docs/ work: every command is parsed by the command line, its recipe and fields are checked, and commands that only
read a store are run. test_journey runs the README's five commands, test_questions the queries."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
import yaml
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.flows.engine.declare import first_sentence
from puna.flows.engine.launch import stage_config, target_named
from puna.flows.engine.trace import load
from puna.flows.prefect.forms import offers
from puna.flows.report.run import Run
from puna.flows.web.bounded import Asker
from puna.flows.web.frame import Site
from puna.flows.web.start import list_page
from puna.stages import executors
from puna.stages.contract import Stage
from puna.storage import PunaError, Store
from puna.storage.schemas import TABLES
from tests.flows.report.conftest import Built, everything

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = typer.main.get_command(app)
OWN = {"my.yaml", "only_titled", "tidy"}
"""A recipe, a stage and a flow that the reader is told to write."""
VERBS = re.compile(
    "align|apply|average|choose|classify|compare|copy|distil|draw|drop|encode|evaluate|find|finetune|generate|give|grade|hold|identify|import|join|keep|label|"
    "make|mask|measure|merge|pair|predict|read|record|remove|run|score|set|take|tell|train|turn|write"
)
"""Pattern of the first word of a step's description."""
LOOKING = ("list", "lineage", "show", "sql", "explain", "verify", "report", "stages", "fields", "why", "gc")


def typed(page: Path) -> list[str]:
    """Return the commands in the code blocks of a page, fenced or indented, one per line; a backslash joins two lines."""
    text = re.sub(r" \\\n *", " ", page.read_text(encoding="utf-8"))
    fenced = re.findall(r"^```(?:bash|sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in fenced for line in block.splitlines()] + re.findall(r"^    (\S.*)$", outside, re.MULTILINE)
    lines = [re.sub(r"^(\.venv/bin/|sbatch .*?deploy/slurm\.sh )", lambda at: "puna " if "sbatch" in at[1] else "", line) for line in lines]
    return [line for line in lines if line.startswith("puna ")]


COMMANDS = [(page.relative_to(ROOT), line) for page in PAGES for line in typed(page)]


def words_of(line: str) -> list[str]:
    return [word for word in shlex.split(line, comments=True)[1:] if word != "…"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    built = everything(tmp_path_factory.mktemp("documented"))
    for alias, step in (("documents", "decontaminate"), ("policy", "average_2"), ("smollm2", "average_2"), ("tuned", "dpo_2"), ("pairs", "preferences_1")):
        for project in ("default", "news", "law"):
            built.store.within(project).set_alias(f"{alias}@latest", built.at[step])
    return built.store


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 80 and {page.name for page, _ in COMMANDS} >= {"README.md", "tutorial.md", "model.md", "rule.md", "cluster.md", "schedule.md", "gpu.md", "slurm.md", "prefect.md"}


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}), ids=str)
def test_every_command_is_one(page: Path) -> None:
    """The command, its options and arguments exist; so do the flow, stage, recipe and each field that is set."""
    for line in (line for where, line in COMMANDS if where == page):
        name, *words = words_of(line)
        assert name in PROGRAM.commands, f"{page}: {line}"
        try:
            asked = PROGRAM.commands[name].make_context(name, words, resilient_parsing=False).params
        except Exception as error:
            raise AssertionError(f"{page}: {line}: {error}") from error
        what, recipe, changes = asked.get("what") or asked.get("name"), asked.get("recipe"), list(asked.get("changes") or [])
        if name not in ("run", "plan") or what is None or what in OWN or recipe in OWN or asked.get("modules"):
            continue
        found = target_named(what)
        if isinstance(found, Stage):
            stage_config(found, recipe, changes)
        else:
            load(recipe or "demo", changes, found.name)


def test_other_commands_name_files_and_targets_that_are_there() -> None:
    """Covers `make TARGET`, `docker compose -f FILE`, `python FILE` and `sbatch FILE`."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = re.findall(r"^    make (\w+)", text, re.MULTILINE)
    assert named and set(named) <= targets
    files = re.findall(r"^    .*?\b((?:deploy|tests)/[\w./-]+)", text, re.MULTILINE)
    assert {"deploy/slurm.sh", "deploy/compose.yaml", "tests/benchmarks/gpu.py"} <= set(files)
    assert all((ROOT / file).exists() for file in files)


@pytest.mark.parametrize(("tasks", "more"), [("1", ""), ("2", " --executor dask://node:20007")])
def test_the_job_of_slurm_runs_what_follows_puna(tasks: str, more: str, tmp_path: Path) -> None:
    """One task runs only the command; several tasks first start a Dask scheduler and workers. Stubs of Slurm, Dask and Puna print their
    arguments."""
    for name in ("puna", "dask", "srun", "hostname", "seq"):
        (tmp_path / name).write_text("#!/bin/sh\n" + {"hostname": "echo node", "seq": "true"}.get(name, f'echo {name} "$@"') + "\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "SLURM_NTASKS": tasks, "SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_ID": "7"}
    done = subprocess.run([ROOT / "deploy/slurm.sh", "run", "a flow"], env=environment, capture_output=True, text=True, timeout=60, check=True)
    called = set(done.stdout.splitlines())
    assert f"puna run a flow{more}" in called
    started = {"dask scheduler --port 20007 --no-dashboard", "srun dask worker tcp://node:20007 --nworkers 4 --nthreads 1 --no-dashboard"}
    assert called & started == (started if more else set())


def runnable() -> Iterator[str]:
    for _, line in COMMANDS:
        name, *words = words_of(line)
        # Capitals stand for what a reader fills in, or for the reader's ids or addresses.
        own = any(re.fullmatch(r"[A-Z]{2,}|.*[0-9a-f]{6}|https?://.*|2026.*", word) for word in words) or "--module" in words or "--output" in words
        if name in LOOKING and not own and words and line not in ("puna sql", "puna report latest"):
            yield shlex.join([name, *words])


@pytest.mark.parametrize("line", sorted(set(runnable())))
def test_what_looks_at_a_store_runs(store: Store, line: str) -> None:
    name, *words = shlex.split(line)
    if "explain" in name or "tidy" in words:
        words = [word.replace("policy@latest", "documents@latest") for word in words]
    place = [] if name in ("stages", "fields") else ["--store", str(store.root)]
    result = CliRunner().invoke(app, [name, *words, *place])
    assert result.exit_code == 0 and result.exception is None, f"{line}: {result.output}{result.exception}"


def test_the_code_blocks_are_code() -> None:
    """Each block is valid Python. (test_new and test_engines run the pages' stage, rule, verifier, loss and flow.)"""
    blocks = [block for page in PAGES for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)]
    assert len(blocks) > 5
    for block in blocks:
        ast.parse(block)


def anchors(page: Path) -> set[str]:
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)}


def script(name: str, folder: str = "docs") -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_lead_somewhere() -> None:
    made = {ROOT / "docs" / name for name in script("reference").PAGES}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if re.match(r"https?://", target):
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists() or file in made, f"{page.name}: {target}"
            assert not anchor or file in made or anchor in anchors(file), f"{page.name}: {target}"


def test_the_architecture_page_shows_the_tree() -> None:
    """Each top-level folder contains the folders in the picture; so do the flows and the files at the top of models."""
    picture = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("Imports go one way")[0]
    parts = re.split(r"^    (?=\w+/)", picture, flags=re.MULTILINE)[1:]
    rooms = {part.partition("/")[0]: part for part in parts}
    assert all((ROOT / room).is_dir() for room in rooms)
    for room in ("flows", "stages", "models", "kernels", "storage"):
        shown = {name for line in rooms[room].splitlines()[1:] for name in re.findall(r"\w+(?=/)", re.split(" {3,}", line.strip())[0])}
        folders = {folder.name for folder in (ROOT / room).iterdir() if folder.is_dir() and not folder.name.startswith("_")}
        assert shown == folders, room
    flows = re.findall(r"\w+", rooms["flows"].splitlines()[0].partition("WHEN")[2].partition(":")[0])
    assert set(flows) == {file.stem for file in (ROOT / "flows").glob("*.py")} - {"__init__"}
    at_top = re.findall(r"\w+", rooms["models"].splitlines()[0].partition("top:")[2])
    assert set(at_top) == {file.stem for file in (ROOT / "models").glob("*.py")} - {"__init__"}


def test_the_site_has_every_page() -> None:
    def pages(nav: Any) -> Iterator[str]:
        for entry in nav:
            (value,) = entry.values()
            yield from pages(value) if isinstance(value, list) else [value]

    listed = set(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]} | set(script("reference").PAGES)


def test_the_reference_is_of_the_code() -> None:
    written = {name: write() for name, write in script("reference").PAGES.items()}
    told = written["reference/commands.md"]
    for name, command in PROGRAM.commands.items():
        part = told.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert part and all(f"`{max(one.opts, key=len)}`" in part for one in command.params if one.param_type_name == "option" and not one.hidden), name
    assert "| `bands` | Bands of the index; documents that agree in a band are candidates | integer ≥ 1 ≤ 1000 | `18` |" in written["reference/stages.md"]
    assert "| `gopher_quality.min_words` |" in written["reference/stages.md"]
    for name, found in TABLES.items():
        part = written["reference/tables.md"].partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert all(f"| `{column}` |" in part for column in found.schema.names), name
    assert "| `minhash_dedup` | [minhash_dedup](stages.md#minhash_dedup) | documents |" in written["reference/flows.md"]


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [cell["source"] for cell in json.loads((ROOT / "docs/notebook.ipynb").read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    answers = []
    for source in cells:
        *before, last = ast.parse(source).body
        exec(compile(ast.Module(before, []), "notebook", "exec"), names)
        if isinstance(last, ast.Expr):
            answers.append(eval(compile(ast.Expression(last.value), "notebook", "eval"), names))
        else:
            exec(compile(ast.Module([last], []), "notebook", "exec"), names)
    made, kept, table, fate, same = answers
    assert made[1] == 3 and kept[0] == 2 and [row["rule"] for row in kept[1]] == ["gopher_quality.min_words"] and same is False
    assert table["url"].tolist() == ["https://example.org/puna", "https://example.org/grass"] and fate["what"].tolist() == ["kept", "scored", "dropped"]


def test_the_readmes_figures_and_picture_are_of_one_run() -> None:
    """README contains unchanged what docs/figures.py wrote for a run, and the picture from that run."""
    figures, known = script("figures"), json.loads((ROOT / "docs/figures.json").read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert figures.written(text, known) == text and f": {known['cpu_minutes']:.0f} minutes of CPU" in text
    assert hashlib.sha256((ROOT / "docs/pictures/report.png").read_bytes()).hexdigest() == known["picture"]
    other = json.loads(json.dumps(known))
    second = json.loads(json.dumps(other["rounds"][0] | {"number": 2}))
    second["over_strongest_control"]["accuracy"] = {"control": "x", "gain": [-0.25, -0.3, -0.2], "verdict": "cost"}
    gate = {"round": 2, "verdict": "refused", "metric": "liked", "gain": 0.1, "low": -0.1, "high": 0.3}
    passage = " ".join(figures.passage(other | {"rounds": [other["rounds"][0], second], "gates": [gate]}).split())
    assert "| round 2 over its strongest control | -.250 (-.300 to -.200) |" in passage
    assert passage.endswith("| round 2 over round 1, refused by its gate | | .100 (-.100 to .300) |")


def test_figures_are_read_from_a_run(tmp_path: Path) -> None:
    """Of four questions: one right before, three after the round, two with the strongest control."""
    built, right = Built(tmp_path), {"evaluate_sft": 1, "control_gold_1": 2, "evaluate_round_1": 3}
    for step, count in right.items():
        scores = [{"id": f"q{n}", "name": "score", "value": float(n < count)} for n in range(4)]
        built.add(step, {}, "evaluate", scores=scores)
    with pytest.raises(PunaError, match="no finished run"):
        script("figures").measured(Run.open(built.store, "latest"))
    built.store.record(built.run, {"event": "finished"})
    found = script("figures").measured(Run.open(built.store, "latest"))
    (one,) = found["rounds"]
    assert (found["heldout"], one["before"]["accuracy"], one["after"]["accuracy"]) == (4, 0.25, 0.75)
    claim = one["over_strongest_control"]["accuracy"]
    assert (claim["control"], claim["gain"][0], claim["verdict"]) == ("gold answers only", 0.25, "earned nothing")


def test_results_are_those_of_the_benchmarks() -> None:
    """RESULTS.md and docs/ show the numbers of results.json; a benchmark's output replaces those figures whose names it has all; commands
    exist."""
    results = script("results", "tests/benchmarks")
    areas = json.loads(results.FIGURES.read_text(encoding="utf-8"))
    for page, text in results.pages(areas).items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name}: run `python tests/benchmarks/results.py`"
    measured = [name for figures in areas.values() for one in figures for name in one.get("measured", ())]
    assert len(measured) == len(set(measured)) > 60
    for one in (one for figures in areas.values() for one in figures):
        for name in re.findall(r"\S+\.py\b", one.get("command", "")):
            assert (ROOT / name if "/" in name else ROOT / "tests/benchmarks" / name).exists(), one
    own = {"a": [{"figure": "speed", "value": "{speed:.1f}", "peer": "peer {peer:.0f}", "machine": "x", "date": "2026-01-01", "measured": {"speed": 1.0, "peer": 2}}]}
    page = "<!-- table: a -->\nold\n<!-- end --> Speed <!--speed:.0f-->1<!---->."
    assert results.take(own, [{"speed": 7.0}], "y", "2026-01-05") == []
    assert results.take(own, [{"speed": 7.26, "peer": 3}, {"speed": 6.0, "peer": 3}], "y", "2026-01-05") == ["speed"]
    own["b"] = [{"figure": "age", "value": "1", "command": "house.py", "machine": "z", "date": "2026-01-03"}]
    shown = results.render(page + "<!-- table: b -->\n<!-- end -->", own)
    assert "| speed | 6.0 to 7.3 | peer 3 |  | by hand | y | 2026-01-05 |" in shown
    assert "| age | 1 |  |  | `house.py` | z | not since 2026-01-03 |" in shown
    assert results.inline(page, own).endswith("Speed <!--speed:.0f-->6 to 7<!---->.")
    with pytest.raises(SystemExit, match="lacks the markers <!-- table: b -->"):
        results.render(page, own)


def test_the_readmes_clean_and_demo_are_what_they_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's `puna clean` line gives documents, the dropped records with reasons, and a report; `make demo` runs existing
    commands."""
    (line,) = [line for page, line in COMMANDS if page.name == "README.md" and line.startswith("puna clean")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(executors, "cores", lambda: 1)
    (tmp_path / "crawl").mkdir()
    (tmp_path / "crawl/page.html").write_text("<html><body><p>Too short to keep.</p></body></html>")
    pq.write_table(pa.table({"url": ["https://example.org/a"], "html": ["<html><body><p>Also short.</p></body></html>"]}), "more.parquet")
    done = CliRunner().invoke(app, ["clean", *words_of(line)[1:]])
    assert done.exit_code == 0, done.output
    gone = [json.loads(row) for row in Path("clean/documents.dropped.jsonl").read_text().splitlines()]
    assert len(gone) == 2 and all(row["rule"] for row in gone) and Path("clean/documents.jsonl").exists() and Path("clean/documents.report.html").exists()
    shown = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    asked = [shlex.split(row.partition(" -m puna.flows.cli.main ")[2]) for row in shown.splitlines() if " -m puna.flows.cli.main " in row]
    assert [words[0] for words in asked] == ["demo-pages", "run"]
    for name, *words in asked:
        PROGRAM.commands[name].make_context(name, words, resilient_parsing=False)


def test_the_readme_is_read_in_three_minutes() -> None:
    text = re.sub("<!--.*?-->", "", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(re.findall(r"[^\s|·#-]+", text)) <= 600
    for fact in ("simulated", "no number ends in 0, 1, 4 or 5", "nearest training question", "as many checked answers"):
        assert fact in " ".join(text.split())


def test_descriptions_are_whole_sentences() -> None:
    """The one-line description of each flow and stage is a sentence, not cut by a colon or by the end of a line."""
    own = [offer.what for offer in offers() if offer.what.function.__module__.startswith("puna.")]  # other tests declare stages, too
    described = {what.name: first_sentence(what.doc) for what in own}
    assert len(described) > 60
    for name, sentence in described.items():
        assert sentence.endswith(".") and "\n" not in sentence, f"{name}: {sentence}"
        assert all(sentence.count(a) == sentence.count(b) for a, b in ("()", "[]")) and sentence.count("`") % 2 == 0, f"{name}: {sentence}"
        # The sentence begins with a verb for the step's action: no "Pages to documents", no article, no question.
        first = re.split(r"\W", sentence, maxsplit=1)[0]
        assert VERBS.fullmatch(first.lower()), f"{name}: begin the docstring with a verb (got {first!r})"
    assert described["extract"] == "Turn pages into documents: the main content of HTML pages; plain text and code unchanged."
    assert first_sentence("Mask addresses: of mail, of\n    houses (Broder et al. 1997). Then more.\n\nA body.") == (
        "Mask addresses: of mail, of houses (Broder et al. 1997)."
    )


def test_the_start_page_and_the_command_line_show_them(store: Store) -> None:
    page, listed = unescape(str(list_page(Site(store, None, Asker(store, urls=False))))), CliRunner().invoke(app, ["stages"]).output
    sentence = "Turn pages into documents: the main content of HTML pages; plain text and code unchanged."
    assert sentence in page and sentence in listed
    assert "Turn raw pages or documents into an aligned model;" in page and "Turn raw pages or documents into an aligned model;" in listed
