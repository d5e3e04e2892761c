"""Topics of instructions: learned from labelled examples, compared with two controls, and balanced."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from puna.models.training.state import load_record
from puna.stages.align.topics import Labelled, TopicsConfig, by_words, coarse, fit, probabilities, topics
from puna.stages.contract import execute
from puna.stages.conversations import dump
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

Tiny = Callable[..., Artifact]
REQUESTS = {"maths/sums": "1 + 2 + 3 + ", "maths/differences": "3 - 2 - 1 - ", "talk": "question assistant user say "}


def asked(store: Store, count: int, salt: str = "", only: tuple[str, ...] = tuple(REQUESTS)) -> Artifact:
    rows = [
        {"id": f"{salt}{topic[:8]}{i:03d}", "prompt_id": f"{salt}{topic}{i}", "task": topic, "split": "train", "tools": None, "source": "s", "score": None,
         "messages": dump([{"role": "user", "content": REQUESTS[topic] * (1 + i % 5) + str(i % 3)}, {"role": "assistant", "content": "1"}])}
        for topic in only for i in range(count)
    ]  # fmt: skip
    return store.import_table("instructions", pa.Table.from_pylist(rows, schema=table_schema("instructions").schema))


def told(made: Artifact) -> dict[str, dict[str, tuple[str, float]]]:
    found: dict[str, dict[str, tuple[str, float]]] = {}
    for row in made.read("scores").to_pylist():
        level, _, topic = row["name"].partition(":")
        found.setdefault(row["id"], {})[level] = (topic, row["value"])
    return found


def test_topics_are_told_and_measured_beside_their_controls(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = asked(store, 7, "new ")
    made = execute(topics, TopicsConfig(), {"instructions": given, "labelled": asked(store, 20), "model": tiny_model(store)}, store)
    assert made.read().equals(given.read())
    truth = {row["id"]: row["task"] for row in given.read().to_pylist()}
    for name, one in told(made).items():
        assert one["fine"][0] == truth[name] and one["coarse"][0] == coarse(truth[name])
        # Both kinds of maths together are at least as probable as the likelier of the two.
        assert 1 + 1e-9 >= one["coarse"][1] >= one["fine"][1] - 1e-9 > 0.5
    metrics = made.manifest.metrics
    assert metrics["labelled"] == 60 and metrics["fine_accuracy"] == metrics["coarse_accuracy"] == 1.0
    # Two of three labelled requests are maths; of the three equally frequent fine topics, none makes up half.
    assert metrics["coarse_majority"] == pytest.approx(2 / 3) and metrics["fine_majority"] < 0.5
    assert metrics["coarse_words"] == 1.0 and metrics["fine_words"] < 0.8, "digits alone do not tell sums from differences"
    assert (metrics["coarse_topics"], metrics["fine_topics"]) == (2, 3)


@pytest.mark.parametrize(("balance", "kept"), [("coarse", {"maths": 4, "talk": 3}), ("fine", {"maths": 7, "talk": 3})])
def test_topics_are_evened_out(tmp_path: Path, tiny_model: Tiny, balance: str, kept: dict[str, int]) -> None:
    store = Store.open(tmp_path)
    given = store.import_table(
        "instructions", pa.concat_tables([asked(store, 3, "a ").read(), asked(store, 4, "b ", ("maths/sums",)).read()]).sort_by("id")
    )
    config = TopicsConfig(max_per_topic=4, balance=balance)
    made = execute(topics, config, {"instructions": given, "labelled": asked(store, 20), "model": tiny_model(store)}, store)
    assert Counter(coarse(row["task"]) for row in made.read().to_pylist()) == kept
    dropped = made.read("dropped").to_pylist()
    assert made.rows() + len(dropped) == given.rows() == 13
    topic, count = ("maths", 10.0) if balance == "coarse" else ("maths/sums", 7.0)
    assert {(row["rule"], row["detail"], row["value"], row["threshold"]) for row in dropped} == {("topic", topic, count, 4.0)}
    other = execute(topics, config.model_copy(update={"seed": 5}), {"instructions": given, "labelled": asked(store, 20), "model": tiny_model(store)}, store)
    assert other.read()["id"].to_pylist() != made.read()["id"].to_pylist()


def test_the_fit_is_at_its_minimum() -> None:
    rng = np.random.default_rng(0)
    examples = [Labelled("abc"[i % 3], "", rng.normal(size=4).astype(np.float32) + i % 3) for i in range(30)]
    weights, x = fit(examples, list("abc"), 0.01), np.stack([one.vector for one in examples])
    share = probabilities(weights, x)
    assert share.sum(1) == pytest.approx(np.ones(30))
    wanted = np.array([[one.topic == name for name in "abc"] for one in examples])
    inner = 2.0 * x.astype(np.float64)  # divided by the root of the four dimensions
    gradient = inner.T @ (share - wanted) / 30 + 0.02 * weights[:-1]
    assert np.abs(gradient).max() < 1e-6 and np.abs((share - wanted).mean(0)).max() < 1e-6


def test_naive_bayes_by_hand() -> None:
    none = np.zeros(1, np.float32)
    examples = [Labelled("x", "a a b", none), Labelled("y", "b c", none), Labelled("y", "c", none)]
    # x: 1/3 * (2+1)/(3+3) = .167 for "a", y: 2/3 * 1/6 = .111; for "b" x: 1/3 * 2/6 = .111, y: 2/3 * 2/6 = .222.
    assert by_words(examples, ["a", "b", "A c c"]) == ["x", "y", "y"]


def test_one_topic_is_refused(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = {"instructions": asked(store, 2, "new "), "labelled": asked(store, 5, only=("talk",)), "model": tiny_model(store)}
    with pytest.raises(PunaError, match="all labelled examples have the topic talk in their column `task`; give at least two topics"):
        execute(topics, TopicsConfig(), given, store)


def examples_of(seed: int) -> list[Labelled]:
    random = np.random.default_rng(seed)
    return [Labelled(f"t{i % 3}", "", random.normal(size=8).astype(np.float32) + (i % 3 == np.arange(8)) * 0.1) for i in range(60)]


@pytest.mark.parametrize(("seed", "stop"), [(0, 1), (1, 15), (2, 20)])
def test_a_stopped_fit_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, stop: int) -> None:
    import torch

    examples, classes = examples_of(seed), ["t0", "t1", "t2"]
    whole, evaluations, at = fit(examples, classes, 1e-5), 0, -1
    plain = torch.nn.functional.cross_entropy

    def watched(*args: torch.Tensor) -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        if evaluations == at:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(*args)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", watched)
    fit(examples, classes, 1e-5)
    everything, evaluations, at = evaluations, 0, stop
    with pytest.raises(KeyboardInterrupt):
        fit(examples, classes, 1e-5, tmp_path)
    done, evaluations, at = evaluations, 0, -1
    assert load_record(tmp_path)["done"] >= 1 and done < everything
    assert np.array_equal(fit(examples, classes, 1e-5, tmp_path), whole)
    assert evaluations == everything - done, "what was done is not done again"


def test_labelled_examples_that_do_not_fit_are_named(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = {"instructions": asked(store, 2, "new "), "labelled": asked(store, 5), "model": tiny_model(store)}
    with pytest.raises(PunaError, match=r"topics: none of the 15 labelled examples can be used \(15 too_long\)"):
        execute(topics, TopicsConfig(micro_batch_tokens=16), given, store)
