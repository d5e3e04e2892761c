"""Stages from other packages: entry points of installed packages, `--module`, and broken plugins."""

from __future__ import annotations

import importlib
import logging
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from puna.stages import plugins
from puna.stages.contract import REGISTRY, Facts, InputFacts, StageConfig, StageRun, stage
from puna.storage import PunaError

STAGE = """
    from puna.stages.contract import StageConfig, StageRun, stage

    class {name}Config(StageConfig):
        '''Nothing to choose.'''

    @stage(kind="signals")
    def {name}(config: {name}Config, run: StageRun) -> None:
        '''A stage from outside.'''
    """


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide plugins, modules and stages of one test from the next."""
    for name in ("_offers", "_broken", "_modules"):
        monkeypatch.setattr(plugins, name, {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    stages, modules = dict(REGISTRY), set(sys.modules)
    yield
    REGISTRY.clear()
    REGISTRY.update(stages)
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(file: Path, text: str, **names: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text).format(**names) if names else textwrap.dedent(text))
    return file


def install(folder: Path, package: str, entries: str) -> None:
    """Install a package as an installer does: its entry points beside it, on `sys.path`."""
    about = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    write(about / "METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    write(about / "entry_points.txt", entries)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def test_entry_points_give_modules_and_objects(tmp_path: Path) -> None:
    write(tmp_path / "outer_one.py", STAGE, name="outer_stage")
    install(tmp_path, "outer-one", "[puna.stages]\nwhole = outer_one\none = outer_one:outer_stage\n[puna.losses]\nx = math:exp\n")
    found = plugins.offers("puna.stages")
    assert set(found) == {"whole", "one"} and found["one"] is REGISTRY["outer_stage"]
    assert found["whole"] is sys.modules["outer_one"]
    assert list(plugins.offers("puna.losses")) == ["x"] and plugins.offers("puna.verifiers") == {} and plugins.broken_plugins() == []


def test_a_broken_plugin_is_named_and_the_others_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "outer_good.py", STAGE, name="outer_good_stage")
    write(tmp_path / "outer_bad.py", STAGE + "\n    import no_such_library\n", name="outer_bad_stage")
    write(tmp_path / "outer_exit.py", "raise SystemExit('went away')")
    lines = "[puna.stages]\nbad = outer_bad\ngood = outer_good\ngone = outer_exit\nlost = outer_good:nothing\n"
    install(tmp_path, "outer-two", lines)
    with caplog.at_level(logging.WARNING):
        assert list(plugins.offers("puna.stages")) == ["good"]
    assert "outer_good_stage" in REGISTRY and "outer_bad_stage" not in REGISTRY
    bad, gone, lost = plugins.broken_plugins()
    assert bad.startswith("plugin 'bad' (puna.stages, outer_bad, of outer-two 1.0): cannot be loaded: ModuleNotFoundError: No module named")
    assert f"{tmp_path / 'outer_bad.py'}, line" in bad
    assert "SystemExit: went away" in gone and "AttributeError" in lost
    plugins.offers("puna.stages")
    assert len(caplog.records) == 3


def test_two_plugins_of_one_name_are_told(tmp_path: Path) -> None:
    for name in ("outer-three", "outer-four"):
        install(tmp_path / name, name, f"[puna.rules]\nsame = {'math:exp' if name == 'outer-three' else 'math:log'}\n")
    assert len(plugins.offers("puna.rules")) == 1
    (said,) = plugins.broken_plugins()
    assert "'same'" in said and "has the same name" in said


def test_a_stage_that_is_declared_twice_is_a_broken_plugin(tmp_path: Path) -> None:
    for name in ("outer_five", "outer_six"):
        write(tmp_path / f"{name}.py", STAGE, name="outer_same")
    install(tmp_path, "outer-five", "[puna.stages]\na = outer_five\nb = outer_six\n")
    assert list(plugins.offers("puna.stages")) == ["a"] and REGISTRY["outer_same"].function.__module__ == "outer_five"
    assert "declared twice, in outer_five and in outer_six" in plugins.broken_plugins()[0]


def test_a_group_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PunaError, match="puna.stage is not a plugin group"):
        plugins.offers("puna.stage")


def test_a_file_is_a_module_with_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "own_helper.py", "VALUE = 3\n")
    file = write(tmp_path / "own_stage.py", STAGE + "\n    import own_helper\n", name="own_one")
    module = plugins.add(str(file))
    assert REGISTRY["own_one"].function.__module__ == "own_stage" and module.own_helper.VALUE == 3
    assert plugins.add(str(file)) is module and plugins.added_modules() == {"own_stage": str(file)}


def test_a_dotted_module(tmp_path: Path) -> None:
    write(tmp_path / "own_package" / "__init__.py", "")
    write(tmp_path / "own_package" / "work.py", STAGE, name="own_two")
    sys.path.insert(0, str(tmp_path))
    plugins.add("own_package.work")
    assert "own_two" in REGISTRY and plugins.added_modules() == {"own_package.work": ""}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.py", None, "no such file"),
        ("my-stage.py", "", "its name must be a Python name"),
        ("json.py", "", "there is another module named json"),
        ("own_wrong.py", "x = 1\nx.y", r"cannot be imported: AttributeError: .*own_wrong.py, line 2\)"),
        ("own_syntax.py", "x =", "cannot be imported: SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_a_module(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        write(tmp_path / name, text)
    with pytest.raises(PunaError, match=message):
        plugins.add(str(tmp_path / name))
    assert plugins.added_modules() == {}


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(PunaError, match="--module no.such: cannot be imported: ModuleNotFoundError: No module named 'no'"):
        plugins.add("no.such")


class WantingConfig(StageConfig):
    """A configuration without fields."""


def test_a_stage_says_which_needs_are_not_met() -> None:
    def needs(config: WantingConfig, facts: Facts) -> list[str]:
        (signals,) = facts.inputs["signals"]
        return [] if signals.tables is None or "words" in signals.tables["signals"] else ["column words is missing; run heuristics"]

    @stage(kind="signals", needs=needs)
    def wanting(config: WantingConfig, run: StageRun) -> None:
        """Need a column."""

    @stage(kind="signals")
    def content(config: WantingConfig, run: StageRun) -> None:
        """Need nothing."""

    def facts(*columns: str) -> Facts:
        return Facts({"signals": (InputFacts("signals", {"signals": columns}),)}, 10)

    assert wanting.unmet(WantingConfig(), facts("id")) == ["wanting: column words is missing; run heuristics"]
    assert wanting.unmet(WantingConfig(), facts("id", "words")) == [] and content.unmet(WantingConfig(), facts()) == []
    assert wanting.unmet(WantingConfig(), Facts({"signals": (InputFacts("signals"),)}, 10)) == []
