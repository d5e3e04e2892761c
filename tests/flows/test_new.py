"""`puna new` writes a project that passes its own test, and whose recipe contains the project's stage and rule in the right places."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from puna.flows.cli.authoring import TEMPLATES
from puna.flows.cli.authoring import write_project as new
from puna.storage import PunaError

ROOT = Path(__file__).parents[2]
PLAN = """
import json, sys
from puna.stages import plugins
for module in ("my_own.stages", "my_own.rules"):
    plugins.add(module)
from puna.flows.engine.trace import flow_named, load, trace
found = trace(flow_named("curate"), load("recipe.yaml", flow="curate"))
step = next(step for step in found.steps if step.label == "only_titled")
print(json.dumps([found.complaints, dict(step.inputs), [s.label for s in found.steps if "only_titled" in s.inputs.get("documents", ())]]))
"""


def test_a_new_project_passes_its_test_and_its_recipe_has_its_steps(tmp_path: Path) -> None:
    folder = tmp_path / "my_own"
    files = new(folder)
    assert {file.relative_to(folder).as_posix() for file in files} >= {"pyproject.toml", "my_own/stages.py", "tests/test_my_own.py"}
    assert not any("PROJECT" in file.read_text() for file in files)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / ".pkg"), str(folder)])}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout[-3000:]
    planned = subprocess.run([sys.executable, "-c", PLAN], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert planned.returncode == 0, planned.stderr[-3000:]
    assert json.loads(planned.stdout) == [[], {"documents": ["select"]}, ["pii"]]


@pytest.mark.parametrize("name", ["My-Own", "2nd", "class", "puna"])
def test_a_name_that_is_no_package_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PunaError, match="the name is the package's"):
        new(tmp_path / name)
    (tmp_path / "there").mkdir()
    with pytest.raises(PunaError, match="already exists"):
        new(tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_the_page_shows_the_code_that_is_tested() -> None:
    for name, place in {"rules": "how-to/rule.md", "stages": "how-to/stage.md", "verifiers": "verifiers.md"}.items():
        page = (ROOT / "docs" / place).read_text(encoding="utf-8")
        assert f"```python\n{(TEMPLATES / 'PROJECT' / f'{name}.py.txt').read_text(encoding='utf-8')}```" in page


def test_the_flow_on_the_page_has_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from puna.flows.engine.declare import FLOWS
    from puna.flows.engine.trace import load, load_flows, trace
    from puna.stages import plugins

    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    (code,) = [block for block in page.split("```python\n") if "@flow" in block]
    (tmp_path / "own_flow_of_the_page.py").write_text(code.partition("```")[0])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(plugins, "_modules", {})
    plugins.add(str(tmp_path / "own_flow_of_the_page.py"))
    try:
        found = trace(load_flows()["tidy"], load("clean", ["pii=null"], "tidy"))
        assert found.complaints == [] and [step.label for step in found.steps] == ["line_dedup"]
        assert found.aliases == {"tidy@latest": ("line_dedup",)}
    finally:
        FLOWS.pop("tidy", None)
        sys.modules.pop("own_flow_of_the_page", None)
