"""Scores of answers in a stage: each prompt's own verifier, failures, time-outs, models, and the docs page on writing a verifier."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from puna.models.untrusted import bounded_process
from puna.stages import plugins
from puna.stages.contract import StageConfig, StageRun, execute, stage
from puna.stages.conversations import asking
from puna.stages.verifiers.base import Item, Question, Score, ScoringConfig
from puna.stages.verifiers.registry import all_verifiers, from_text, to_text
from puna.stages.verifiers.scoring import Scorer, child
from puna.storage import PunaError, Store

DOCS = Path(__file__).parents[3] / "docs"
FOUND: list[Score] = []
JOBS: list[tuple[dict[str, Any], str]] = []


class ScoreAllConfig(StageConfig):
    """The maximum time for an answer."""

    seconds: float = Field(10.0, description="Longest computing for an answer")


@stage(kind="evaluation", version="1")
def score_all(config: ScoreAllConfig, run: StageRun) -> None:
    """Score the jobs of a test."""
    scorer = Scorer([row for row, _ in JOBS], ScoringConfig(seconds=config.seconds), run)
    FOUND[:] = scorer.scores(JOBS)
    scorer.report()
    run.write_rows([])


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugins, "_modules", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(all_verifiers())
    child().close()
    yield
    all_verifiers().clear()
    all_verifiers().update(before)
    from_text.cache_clear()
    child().close()


def row(name: str, verifier: str | None, reference: str | None = "7") -> dict[str, Any]:
    return {"id": name, "task": "t", "split": "heldout", "messages": asking("How many?"), "tools": None, "reference": reference, "verifier": verifier}


def scored(folder: Path, jobs: list[tuple[dict[str, Any], str]], **config: float) -> tuple[list[Score], dict[str, Any]]:
    JOBS[:] = jobs
    made = execute(score_all, ScoreAllConfig(**config), {}, Store.open(folder))
    return list(FOUND), made.manifest.metrics


def test_each_answer_by_its_own_verifier_and_failures_have_no_score(tmp_path: Path) -> None:
    mine = tmp_path / "my_functions.py"
    mine.write_text("def fail(answer):\n    raise ValueError('no')\n\n"
                    "def big(answer, most):\n    return len(answer) / most\n\ndef leave(answer):\n    import os; os._exit(3)\n")  # fmt: skip
    plugins.add(str(mine))
    function = [to_text("python", function=f"my_functions:{name}") for name in ("fail", "leave")]
    both = to_text("product", of=[{"name": "numeric"}, {"name": "python", "function": "my_functions:big", "parameters": {"most": 4}}])
    jobs = [
        (row("a", to_text("numeric")), "7"), (row("b", None), "7"), (row("c", function[0]), "7"), (row("e", function[1]), "7"),
        (row("f", both), " 7"), (row("g", to_text("python", function="my_functions:big", parameters={"most": 1})), "77"), (row("h", to_text("exact")), "8"),
    ]  # fmt: skip
    found, metrics = scored(tmp_path / "store", jobs)
    assert [one.value for one in found] == [1.0, None, None, None, 0.5, None, 0.0]
    details = [one.detail for one in found]
    assert "no verifier" in details[1] and "ValueError: no" in details[2] and "process ended" in details[3]
    assert "returned 2.0, not a Score from 0 to 1" in details[5] and metrics["unscored_answers"] == 3 and metrics["unscored_example"].startswith("prompt c: ")


SLOW = """
import os, time

def hang(answer):
    while True: pass

def wait(answer):
    time.sleep(float(answer))
    return 1.0
"""


def test_computing_counts_and_waiting_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer waits like one that sleeps: its score stays the same. An answer that waits forever is stopped, too."""
    mine = tmp_path / "my_loops.py"
    mine.write_text(SLOW)
    plugins.add(str(mine))
    hang, wait = (to_text("python", function=f"my_loops:{name}") for name in ("hang", "wait"))
    with monkeypatch.context() as busy:
        busy.setattr(bounded_process, "CLOCK", 200.0)  # a busy machine may give less than a tenth of a core
        (waited, looped), metrics = scored(tmp_path / "store", [(row("a", wait), "1.2"), (row("b", hang), "7")], seconds=0.8)
    assert waited.value == 1.0
    assert looped.value is None and "takes more than 0.8 s of CPU time" in looped.detail and metrics["unscored_answers"] == 1
    (slept,), _ = scored(tmp_path / "store", [(row("a", wait), "60")], seconds=0.3)
    assert slept.value is None and "no answer within 3 seconds" in slept.detail


@pytest.mark.parametrize(
    ("verifier", "reference", "message"),
    [
        ('{"name": "nothing"}', "7", "prompt p .task t.: there is no verifier 'nothing'"), (to_text("exact"), None, "prompt p: verifier exact needs `answer`"),
        (to_text("reward_model"), None, "needs a reward model, but the input `judges` has none"),
        (to_text("judge", rubric="r", model="0123456789"), None, "not exactly one model of the input `judges` has the data digest 0123456789"),
    ],
)  # fmt: skip
def test_what_could_not_be_scored_is_refused_first(tmp_path: Path, verifier: str, reference: str | None, message: str) -> None:
    with pytest.raises(PunaError, match=message):
        scored(tmp_path, [(row("p", verifier, reference), "7")])


def test_a_full_stop_and_words_do_not_mark_a_right_answer_down() -> None:
    entry = {"question": "3 - 7", "answer": "-4", "metadata": {}}
    verifier = from_text(to_text("reasoning_gym", generator="chain_sum", entry=entry))
    question = Question("q", "t", "3 - 7", "-4")
    assert [verifier.score(question, text).value for text in ("-4", "The answer is -4.", "-4 it is")] == [1.0, 1.0, 2 / 8]


def test_the_page_on_ones_own_verifier(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "verifiers.md").read_text(), re.DOTALL)
    file = tmp_path / "my_verifiers.py"
    file.write_text(code)
    plugins.add(str(file))
    text = to_text("palindrome", min_letters=5)
    found, _ = scored(tmp_path / "store", [(row("a", text), "Never odd or even"), (row("b", text), "level"), (row("c", text), "noon"), (row("d", text), "llama")])
    assert [one.value for one in found] == [1.0, 1.0, 0.0, 0.0] and found[1].detail == "5 letters"
    assert child().score(Item(from_text(text), Question("q", "t", "", None), "level"), 60.0).value == 1.0
