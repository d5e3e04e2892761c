"""The benchmark pages: their numbers equal those of `puna compare` and of the tables, question by question."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from puna.flows.web import application
from puna.flows.web.benchmarks import Candidate, rank
from puna.stages.contract import External, execute
from puna.stages.evaluation.benchmark import BenchmarkConfig, benchmark
from puna.stages.evaluation.comparison import differences, scores_of
from puna.storage import Artifact, Store
from tests.stages.evaluation.conftest import model, store, task  # noqa: F401
from tests.stages.evaluation.test_benchmark import CHOICE
from tests.stages.evaluation.test_comparison import ROWS
from tests.stages.evaluation.test_prompt_tasks import prompts

from .test_web import text as page_text

SCRIPT = "<script>alert(1)</script>"


def text(answer: Any) -> str:
    """Return the words of a page, joined by single spaces."""
    return " ".join(page_text(answer).split())


@pytest.fixture
def asked(store: Store, model: Callable[..., Artifact], task: Callable[..., External]) -> tuple[TestClient, list[Artifact]]:  # noqa: F811
    rows = [*ROWS[:-1], {"q": f"what is {SCRIPT}?", "options": ["a dog", SCRIPT], "right": 1}]
    tasks = [task(rows, **CHOICE), task([{"t": row["q"] * 2} for row in ROWS[:9]], task="texts", output_type="loglikelihood_rolling", doc_to_target="t")]
    made = [execute(benchmark, BenchmarkConfig(), {"model": model(seed), "tasks": tasks}, store) for seed in (0, 1)]
    return TestClient(application(store, prefect=None, auth="")), made


def test_two_models_are_compared_by_clicks(asked: tuple[TestClient, list[Artifact]]) -> None:
    client, made = asked
    board = client.get("/benchmarks")
    keys = re.findall(r'name="model" value="(\w+)"', board.text)
    said = text(board)
    for one in made:
        for row in one.read("task_scores").to_pylist():
            if row["metric"] in ("acc", "bits_per_byte"):
                assert f"{row['value']:.3f} {row['low']:.3f} to {row['high']:.3f}" in said
    sides = {one.manifest.inputs[0].key[:12]: scores_of([one]) for one in made}
    first, second = (sides[key] for key in keys)
    for gap in differences(first, second)[0]:
        assert f"{gap.difference.value:+.3f}, p {gap.holm:.2g}" in said
    assert "+" not in text(client.get(f"/benchmarks?beside={keys[0]}")).partition("reference")[0]

    page = client.get("/benchmarks/compare", params={"model": keys})
    for gap in differences(first, second)[0]:
        assert f"{gap.one:.4f} {gap.other:.4f} {gap.difference.value:+.4f} {gap.difference.low:+.4f} to {gap.difference.high:+.4f} {gap.n}" in text(page)
    errors = [f"{side['mine']['acc'][0]['calibration_error']:.3f}" for side in (first, second)]
    assert f"expected calibration error A B mine {' '.join(errors)}" in text(page) and page.text.count('class="plot"') == 2

    link = re.search(r'href="/puna(/benchmarks/questions[^"]*)">mine', page.text)[1].replace("&amp;", "&")  # type: ignore[index]
    verdicts = [{row["id"]: row["value"] for row in one.read("scores").to_pylist() if row["name"] == "mine/acc"} for one in made]
    differ = sum(verdicts[0][key] != verdicts[1][key] for key in verdicts[0])
    wrong = sum(verdicts[0][key] == verdicts[1][key] == 0 for key in verdicts[0])
    pages = [client.get(f"{link}&which={which}") for which in ("", "differ", "wrong")]
    assert [page.text.count("<details>") for page in pages] == [len(ROWS), differ, wrong]
    assert SCRIPT not in "".join(page.text for page in pages)
    assert f"{len(ROWS)} of the {len(ROWS)} questions stored with answers" in text(pages[0])


def test_one_question_shows_the_options_probabilities(asked: tuple[TestClient, list[Artifact]]) -> None:
    client, made = asked
    page = client.get("/benchmarks/questions", params={"task": "mine", "evaluation": made[0].key[:12]})
    shares = [float(one) for one in re.findall(r'class="n">([\d.]+) %', page.text)]
    assert len(shares) > 20 and page.text.count("which=wrong") == 1 and "which=differ" not in page.text
    sure = sorted(row["value"] for row in made[0].read("scores").to_pylist() if row["name"] == "mine/acc:confidence")
    assert sum(any(abs(share / 100 - one) < 0.0006 for one in sure) for share in shares) >= 15


def test_what_cannot_be_shown_is_an_error(asked: tuple[TestClient, list[Artifact]], tmp_path: Path) -> None:
    client, made = asked
    key = made[0].key[:12]
    for path, message in (
        ("/benchmarks/compare", "choose two models, not 0"),
        (f"/benchmarks/questions?task=none&evaluation={key}", "has no task none"),
        (f"/benchmarks/questions?task=mine&evaluation={key}&which=x", "choose one or two evaluations"),
    ):
        answer = client.get(path)
        assert answer.status_code == 404 and message in text(answer)
    empty = TestClient(application(Store.open(tmp_path / "empty"), prefect=None, auth="")).get("/benchmarks")
    assert empty.status_code == 200 and "No model was evaluated yet" in text(empty)


def test_the_model_that_beats_the_most_is_first(asked: tuple[TestClient, list[Artifact]]) -> None:
    """Lower bits per byte are better; on a task without results, a model beats no other."""
    rows = {"a": {"t": 0.5, "bits": 3.0}, "b": {"t": 0.4, "bits": 1.0}, "c": {"t": 0.6}}
    names = {"t": "acc", "bits": "bits_per_byte"}
    models = [Candidate(asked[1][0], name, {at: {names[at]: ({"value": value}, {})} for at, value in own.items()}) for name, own in rows.items()]
    # Of three: a beats 1, b none, c 2. Of two in bits: b beats 1. Means of the shares: a 1/6, b 1/4, c 1/3.
    assert [one.name for one in rank(models)] == ["c", "b", "a"]


def test_the_form_says_which_files_may_be_left_out(store: Store) -> None:  # noqa: F811
    client = TestClient(application(store, prefect=None, auth=""))
    assert "tasks: files or folders, one per line, optional" in text(client.get("/start/benchmark"))
    assert "inputs: files or folders, one per line, none: the sample of real pages" in text(client.get("/start/ingest"))


def test_answers_to_prompts_of_an_artifact_open_by_a_click(store: Store, model: Callable[..., Artifact]) -> None:  # noqa: F811
    made = [execute(benchmark, BenchmarkConfig(max_tokens=6), {"model": model(seed), "prompts": [prompts(store)]}, store) for seed in (0, 1)]
    client = TestClient(application(store, prefect=None, auth=""))
    keys = re.findall(r'name="model" value="(\w+)"', client.get("/benchmarks").text)
    compared = client.get(f"/benchmarks/compare?model={keys[0]}&model={keys[1]}")
    link = next(one for one in re.findall(r'href="/puna(/benchmarks/questions\?[^"]+)"', compared.text) if "task+1" in one)
    said = text(client.get(html.unescape(link)))
    answers = [row["text"] for one in made for row in one.read("examples").to_pylist() if row["id"].startswith("task 1-")]
    letters = re.sub("[^a-z]+", " ", said)
    assert len(answers) == 8 and all(re.sub("[^a-z]+", " ", answer) in letters for answer in answers)
    assert "what is 5 and cat?" in said and "right answer: r" in said
