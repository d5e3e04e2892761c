"""The effect of a verifier's code on keys: those of stages whose prompts name it change, and no others; verifiers of installed packages."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from puna.stages import plugins
from puna.stages.align.refusal_prompts import refusal_prompts
from puna.stages.align.sample import SampleConfig, sample
from puna.stages.align.synthesize import synthesize
from puna.stages.contract import Prompts, StageConfig, StageRun, identify, stage
from puna.stages.conversations import asking
from puna.stages.identity import code, sources
from puna.stages.identity.modules import _places
from puna.stages.verifiers.base import Item, Question
from puna.stages.verifiers.registry import all_verifiers, from_text, to_text
from puna.stages.verifiers.scoring import child, verifiers_named
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

VERIFIER = """
    from typing import ClassVar

    from puna.stages.verifiers.base import Question, Score, Verifier

    def length(text):
        return len(text)

    class Short(Verifier):
        '''Short answers.'''

        name: ClassVar[str] = "short"

        def score(self, question: Question, answer: str) -> Score:
            '''1 where short.'''
            return Score(float(length(answer) < 5))

    def vowels(answer):
        return counted(answer) / len(answer)

    def counted(answer):
        return sum(c in "aeiou" for c in answer)
    """


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_modules", "_offers", "_broken"):
        monkeypatch.setattr(plugins, name, {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    before, modules = dict(all_verifiers()), set(sys.modules)
    child().close()
    yield
    all_verifiers().clear()
    all_verifiers().update(before)
    from_text.cache_clear()
    child().close()
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def asked(store: Store, *verifiers: str | None) -> Artifact:
    rows = [
        {"id": f"{i}", "task": "t", "split": "train", "messages": asking(f"question {i}"), "tools": None, "reference": "7", "verifier": text}
        for i, text in enumerate(verifiers)
    ]
    return store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))


def reached(*verifiers: str) -> set[str]:
    """Return what `sample` reaches with prompts that name these verifiers, beyond what it always reaches."""
    names = [name for text in verifiers for name in from_text(text).reaches()]
    return set(code.symbols(sample, names)) - set(code.symbols(sample))


def edited(file: Path, old: str, new: str) -> None:
    """Edit the file, and forget what this process cached of it."""
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    sources._AT_START.pop(str(file), None)


class AskingConfig(StageConfig):
    """A configuration without fields."""


@stage(kind="evaluation", named=verifiers_named)
def asking_stage(prompts: list[Prompts], config: AskingConfig, run: StageRun) -> None:  # pragma: no cover - only identified
    """Do nothing: only the stage's key is used."""


def key(prompts: Artifact) -> str:
    return identify(asking_stage, AskingConfig(), {"prompts": [prompts]}).key


def test_stages_that_give_prompts_a_verifier_and_run_it_follow_its_code() -> None:
    assert "puna.stages.verifiers.texts.RegularExpression" in code.symbols(refusal_prompts)
    assert "puna.stages.verifiers.python_code.Code" in code.symbols(synthesize)


def test_each_stage_follows_its_prompts_verifiers_alone() -> None:
    exact, numeric, program = to_text("exact"), to_text("numeric"), to_text("code", tests=["assert True"])
    always = " ".join(code.symbols(sample))
    for word in ("exact.Exact", "numeric.", "sandbox", "reasoning_gym", "constraints", "judge.Judge"):
        assert f"verifiers.{word}" not in always
    assert "puna.stages.verifiers.texts.Exact" in reached(exact) and not any("numeric" in name or "sandbox" in name for name in reached(exact))
    assert "puna.stages.verifiers.numeric.numbers" in reached(numeric) and not any("exact" in name for name in reached(numeric))
    assert "puna.stages.verifiers.sandbox_calls.become_nobody" in reached(program)
    both = to_text("product", of=[{"name": "exact"}, {"name": "weighted", "of": [{"name": "numeric"}], "weights": [1]}])
    assert reached(both) >= reached(exact) | reached(numeric) and "puna.stages.verifiers.combinations.Weighted" in reached(both)
    assert "puna.stages.verifiers.scoring.score_job" in code.symbols(sample)


def test_an_edit_of_an_outside_verifier_is_another_key(tmp_path: Path) -> None:
    file = tmp_path / "outer_keys.py"
    file.write_text(textwrap.dedent(VERIFIER))
    (tmp_path / "outer_keys_rest.py").write_text("def other(answer):\n    return 1\n")
    install(tmp_path, "outer-keys", "[puna.verifiers]\nshort = outer_keys:Short\nvowels = outer_keys:vowels\n")
    plugins.add("outer_keys_rest")
    store = Store.open(tmp_path / "store")
    by_class, by_name = to_text("short"), to_text("python", function="vowels")
    by_path, nested = to_text("python", function="outer_keys:vowels"), to_text("product", of=[{"name": "short"}, {"name": "exact"}])
    unrelated = to_text("python", function="outer_keys_rest:other")
    prompts = {name: asked(store, None, text) for name, text in
               {"class": by_class, "name": by_name, "path": by_path, "nested": nested, "unrelated": unrelated, "exact": to_text("exact")}.items()}  # fmt: skip
    before = {name: key(one) for name, one in prompts.items()}
    assert before == {name: key(one) for name, one in prompts.items()}

    def changed() -> set[str]:
        return {name for name, one in prompts.items() if key(one) != before[name]}

    edited(file, "return sum(c in", "return 1 + sum(c in")
    assert changed() == {"name", "path"}
    edited(file, "return len(text)", "return len(text) + 1")
    assert changed() == {"class", "name", "path", "nested"}
    edited(file, "'''1 where short.'''", "'''One where it is short.'''")  # docstrings do not count
    edited(file, "return len(text) + 1", "return len(text)")
    assert changed() == {"name", "path"}


def test_a_verifier_that_is_wrong_has_a_key_and_damage_is_named(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    wrong = asked(store, "{", "[]", "3", '{"name": "nothing"}', '{"name": "python", "function": "no_such:thing"}', '{"name": "exact"}')
    assert "puna.stages.verifiers.texts.Exact" in identify(asking_stage, AskingConfig(), {"prompts": [wrong]}).code
    file = wrong.path("prompts.parquet")
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(PunaError, match="prompts/.* is damaged: prompts.parquet has"):
        key(wrong)


def test_a_verifier_of_an_installed_package_scores(tmp_path: Path) -> None:
    (tmp_path / "outer_short.py").write_text(textwrap.dedent(VERIFIER))
    install(tmp_path, "outer-short", "[puna.verifiers]\nshort = outer_short:Short\nvowels = outer_short:vowels\n")
    question = Question("q", "t", "?", None)
    for text, answer, value in ((to_text("short"), "long answer", 0.0), (to_text("short"), "yes", 1.0), (to_text("python", function="vowels"), "aerial", 4 / 6)):
        verifier = from_text(text)
        assert verifier.score(question, answer).value == pytest.approx(value)
        assert child().score(Item(verifier, question, answer), 20.0).value == pytest.approx(value)
    with pytest.raises(PunaError, match="there is no verifier 'shor'; did you mean short"):
        from_text('{"name": "shor"}')


@pytest.mark.parametrize("function", ["os:system", "subprocess:getoutput", "numpy:mean", "shutil:rmtree"])
def test_a_prompt_names_no_function_of_a_library(function: str) -> None:
    with pytest.raises(PunaError, match="is a library's; a prompt may only name functions of your own modules and of plugins"):
        to_text("python", function=function)


def install(folder: Path, package: str, entries: str) -> None:
    """Install a package as an installer does: its entry points beside it, on `sys.path`."""
    about = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entries)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    _places.clear()


def test_the_stages_that_score_declare_it() -> None:
    from puna.stages.align.reinforcement import ppo
    from puna.stages.evaluation.evaluate import evaluate

    assert {one.named for one in (sample, ppo, evaluate)} == {verifiers_named} and SampleConfig().reaches() == []
