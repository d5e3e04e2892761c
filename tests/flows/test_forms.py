"""The forms of stages: the command that a form stands for, files with odd names, the sample as default input, and a user's own stages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.flows.engine.cost import steps_of
from puna.flows.engine.inputs import sample_folder
from puna.flows.engine.launch import Request, changes_of, run_stage, stage_config
from puna.flows.engine.recipe import as_yaml
from puna.flows.engine.trace import load_stages
from puna.flows.prefect.forms import defaults, offers
from puna.flows.web import serve
from puna.flows.web.bounded import Asker, end_children
from puna.flows.web.forms import _missing, offer_of, request_of, values_given
from puna.stages import plugins
from puna.stages.contract import REGISTRY, Stage
from puna.storage import PunaError, Store
from puna.storage.explain import flat


def test_the_command_of_a_form_gives_the_forms_configuration() -> None:
    """A run's log shows this command, even if the form was filled from a recipe."""
    checked = 0
    for offer in offers():
        values = defaults(offer).get("config") if isinstance(offer.what, Stage) else None
        try:
            config = offer.what.config.model_validate(values) if isinstance(offer.what, Stage) and values else None
        except ValidationError:
            continue
        if config is not None and isinstance(offer.what, Stage):
            changes = changes_of(offer.what, {path: as_yaml(value) for path, value in flat(config.model_dump(mode="json")).items()})
            assert stage_config(offer.what, None, list(changes)) == config, offer.flow
            checked += bool(changes)
    assert checked > 10


def test_a_path_keeps_its_dots_in_the_middle() -> None:
    form = {"inputs": ["/data/a · b.jsonl\n\n /data/c.jsonl "]}
    assert values_given(offer_of("ingest").what.inputs[0], form) == ["/data/a · b.jsonl", "/data/c.jsonl"]
    assert request_of(offer_of("curate"), form).inputs == ("/data/a · b.jsonl", "/data/c.jsonl")
    model = offer_of("chosen").what.inputs[0]
    assert values_given(model, {model.name: ["preferences/aa11 · 41,203 rows"]}) == ["preferences/aa11"]


def test_a_form_that_may_be_empty_can_be_planned_before_and_after_the_sample_is_there(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    request = request_of(offer_of("ingest"), {})
    assert [(step.state, step.why) for step in steps_of(request, store.uri)[1]] == [("after", "input inputs")]
    sample_folder(store.root).mkdir()
    (sample_folder(store.root) / "web.warc.gz").write_bytes(b"not read by a plan")
    assert [(step.state, step.why) for step in steps_of(request, store.uri)[1]] == [("runs", "never ran")]


@pytest.mark.parametrize(
    ("name", "note"), [("import_prompts", "Choose inputs to see the plan."), ("sft", "Choose model and instructions to see the plan."), ("ingest", None)]
)
def test_a_new_form_asks_for_what_it_needs_instead_of_an_error(name: str, note: str | None) -> None:
    assert _missing(offer_of(name), {}) == note


@pytest.mark.parametrize("name", ["import_prompts", "import_documents", "import_model", "block_lists"])
def test_only_pages_come_from_the_sample(tmp_path: Path, name: str) -> None:
    with pytest.raises(PunaError, match=f"stage {name} needs the input"):
        run_stage(load_stages()[name], Request(f"stage:{name}"), Store.open(tmp_path))
    assert not sample_folder(tmp_path).exists()


STAGE = '''
from puna.stages.contract import StageConfig, StageRun, stage


class GreetConfig(StageConfig):
    pass


@stage(kind="evaluation")
def greet_{at}(config: GreetConfig, run: StageRun) -> None:
    """Write nothing."""
'''


def test_a_served_module_has_forms_and_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server names the module to its children: those that answer the pages' questions, and the worker, which publishes the forms."""
    at = f"m{os.getpid()}"
    file, store = tmp_path / f"greet_{at}.py", Store.open(tmp_path / "store")
    file.write_text(STAGE.format(at=at))
    monkeypatch.setenv("PUNA_SERVED_MODULES", "[]")
    monkeypatch.setattr(serve, "pages", lambda *settings: None)
    made = CliRunner().invoke(app, ["web", "--store", store.uri, "--module", str(file)])
    assert made.exit_code == 0 and json.loads(os.environ["PUNA_SERVED_MODULES"]) == [str(file)], made.output
    try:
        assert "1 run" in str(Asker(store, urls=False).ask("plan", name=f"greet_{at}", asked={}))
        looks = f"from puna.flows.prefect import deployments; print('greet_{at}' in deployments.OFFERS)"
        done = subprocess.run([sys.executable, "-c", looks], capture_output=True, text=True, timeout=300, check=True)
        assert done.stdout.strip() == "True"
    finally:
        end_children()
        REGISTRY.pop(f"greet_{at}")
        plugins._modules.pop(file.stem)
        sys.path.remove(str(tmp_path))
