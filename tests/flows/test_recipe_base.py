"""Recipes inherit from a base, and the shipped recipes share the rules of curation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from puna.flows.engine.recipe import BASE, Recipe, read_values, shipped_recipes
from puna.flows.engine.trace import flow_named, load, trace
from puna.flows.prefect.forms import values_of
from puna.stages.curate.select import SelectConfig, select
from puna.storage import PunaError

REASONS = {
    "demo": {
        "select.language": "the sample is English: other languages are too few to train on",
        "select.code_reasoning.min_code": "the demo trains the classifier of code",
        "select.code_reasoning.min_reasoning": "the demo trains the classifier of reasoning",
        "select_model.quality": "the quality classifier that the demo trains drops the worst tenth",
        "select_model.code_reasoning": "the pages with code that the classifier knows",
    },
    "clean": {"select_model.quality": "few pages: a bound on the shipped model's quality, not on the rank among them"},
}
"""Recipe → path of a rule or a group whose values differ from the base → the reason."""


def written(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)


def rules(name: str) -> dict[str, Any]:
    """Return the rules of a recipe's selections, by path."""
    found: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}")
        else:
            found[path] = value

    values, _ = read_values(name, [])
    for step in ("select", "select_model"):
        config = SelectConfig.model_validate(values.get(step) or {})
        walk(config.model_dump(mode="json"), step)
    return found


def test_every_shipped_recipe_inherits_and_gives_a_reason_for_each_departure() -> None:
    base = rules(BASE)
    for name in shipped_recipes():
        own = rules(name)
        different = {path for path in base.keys() | own.keys() if base.get(path) != own.get(path)}
        reasons = REASONS.get(name, {})
        covered = {path for path in different if any(path == known or path.startswith(f"{known}.") for known in reasons)}
        assert different - covered == set(), name
        unused = [known for known in reasons if not any(path == known or path.startswith(f"{known}.") for path in different)]
        assert unused == [], name
        assert own["select.fineweb.max_repeated_line_characters"] == 0.2
        assert own["select.gopher_repetition.max_duplicate_lines"] == own["select.gopher_repetition.max_duplicate_paragraphs"] == 0.6


def test_groups_merge_lists_are_replaced_and_null_leaves_out(tmp_path: Path) -> None:
    written(
        tmp_path,
        first="select: {gopher_quality: {min_words: 70, max_words: 900}}\nlanguage: {}\nprompts: {tasks: [{task: gsm_symbolic}]}",
        second="base: first.yaml\nselect: {gopher_quality: {min_words: 60}}\nlanguage: null\nprompts: {tasks: [{task: chain_sum}]}",
    )
    values, layers = read_values(str(tmp_path / "second.yaml"), ["select.gopher_quality.max_words=800"])
    assert values["select"]["gopher_quality"] == {"min_words": 60, "max_words": 800}
    assert values["language"] is None and values["prompts"]["tasks"] == [{"task": "chain_sum"}]
    assert values["name"] == "second" and "base" not in values and "second.yaml" in layers[1].where


def test_one_rule_alone_is_a_recipe(tmp_path: Path) -> None:
    """Without a base, the steps are those of the flow and the rules those of curation; `puna clean` starts from its own recipe."""
    text = "select: {gopher_quality: {min_words: 60}}"
    written(tmp_path, mine=text, named=f"base: clean\n{text}", bare=f"base: null\n{text}", heir="base: mine.yaml\nseed: 3")
    changed = load("clean", ["select.gopher_quality.min_words=60"], "curate")
    rules = changed.one("select", select, SelectConfig)
    for name in ("mine", "named", "heir"):
        assert load(str(tmp_path / f"{name}.yaml"), flow="curate").one("select", select, SelectConfig) == rules, name
    flow = flow_named("curate")
    derived = [step.label for step in trace(flow, Recipe("derived")).steps]
    assert [step.label for step in trace(flow, load(str(tmp_path / "mine.yaml"), flow="curate")).steps] == derived
    cleaning = load(str(tmp_path / "mine.yaml"), flow="curate", base="clean")
    assert {**cleaning.values} == {**changed.values} == {**load(str(tmp_path / "named.yaml"), flow="curate").values}
    own = load(str(tmp_path / "bare.yaml"), flow="curate").one("select", select, SelectConfig)
    assert own.gopher_repetition == SelectConfig().gopher_repetition != rules.gopher_repetition


def test_a_repeated_step_keeps_its_base(tmp_path: Path) -> None:
    written(tmp_path, twice="select: [{}, {gopher_quality: null}]", once="base: twice.yaml\nselect: {gopher_quality: {min_words: 60}}")
    first, second = load(str(tmp_path / "twice.yaml"), flow="curate").values["select"]
    shared = {"min_terminated_lines": 0.05, "max_short_lines": 0.75, "max_repeated_line_characters": 0.2}
    assert first["fineweb"] == second["fineweb"] == shared and second["gopher_quality"] is None
    with pytest.raises(PunaError, match=r"once\.yaml: select: the base repeats this step 2 times; write a list of its groups"):
        load(str(tmp_path / "once.yaml"), flow="curate")


def test_an_error_names_the_file_that_holds_it(tmp_path: Path) -> None:
    wrong = "select: {gopher_quality: {min_word: 60}}\npii: {nothing: 1}"
    written(tmp_path, base=wrong, mine="base: base.yaml\nselect: {gopher_quality: {max_words: 900}}\nurl_dedup: {what: 1}")
    with pytest.raises(PunaError) as raised:
        load(str(tmp_path / "mine.yaml"), ["line_dedup.other=2"], flow="curate")
    places = {line.partition(": no such field")[0].rpartition(" ")[2]: line for line in str(raised.value).splitlines()}
    assert {field: "base.yaml" in line for field, line in places.items()} == {
        "select.gopher_quality.min_word": True, "pii.nothing": True, "url_dedup.what": False, "line_dedup.other": False
    }  # fmt: skip
    assert "mine.yaml: url_dedup" in places["url_dedup.what"] and places["line_dedup.other"].startswith("line_dedup.other")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: mine.yaml", r"mine\.yaml: base: mine\.yaml: a recipe cannot inherit from itself"),
        ("base: nowhere.yaml", r"mine\.yaml: base: nowhere\.yaml: not found"),
        ("base: [clean]", r"mine\.yaml: base: takes the name"),
        ("base: other.yaml", r"other\.yaml: base: mine\.yaml: a recipe cannot inherit from itself"),
        ("select: {gopher_quality: {min_words: 60}}\nselect: {curated: null}", r"mine\.yaml: line 2: select appears twice"),
        ("seed: &n 3\nselect: {c4: {min_sentences: 1, min_sentences: 2}}", r"mine\.yaml: line 2: min_sentences appears twice"),
        ("base: clean\nselect: {gopher_quality: {min_word: 60}}", r"mine\.yaml: select\.gopher_quality\.min_word: no such field"),
    ],
)
def test_a_wrong_base_is_refused_with_file_and_field(tmp_path: Path, text: str, said: str) -> None:
    written(tmp_path, mine=text, other="base: mine.yaml")
    with pytest.raises(PunaError, match=said):
        load(str(tmp_path / "mine.yaml"), flow="curate")


def test_forms_show_inherited_values() -> None:
    values = values_of(select, "clean", "select")
    assert values is not None and values["fineweb"]["max_repeated_line_characters"] == 0.2
