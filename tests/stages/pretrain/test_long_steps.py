"""Retrieval of a passage by depth; a step to a longer context is accepted only if the passage is found and the loss on short text has
recovered."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from puna.models.tokens.tokenizer import Tokenizer
from puna.stages.contract import execute
from puna.stages.evaluation.needle import DEPTHS, NeedleConfig, NeedleSettings, by_depth, needle, noise_of, texts
from puna.stages.pretrain import pretrain as module
from puna.stages.pretrain.pretrain import pretrain
from puna.stages.training.intervals import wilson
from puna.storage import PunaError

from .conftest import WORDS
from .test_phases import FLAT, config, docs, given, phase, rows  # noqa: F401

VOCABULARY = Tokenizer.train([f" {word} " * 3 for word in WORDS], 300)
NOISE = np.array(VOCABULARY.encode(" ".join(WORDS)), dtype=np.int64)
PASSAGE = NeedleSettings(passage=" the {key} is {value}.", key_words=("cat", "dog", "owl"), value_words=("one", "two", "six"), pairs=2, trials=8)


class Copies(torch.nn.Module):
    """A model that predicts the token that followed the longest match, within the last `window` tokens, of the latest tokens."""

    held = None

    def __init__(self, window: int = 10**9) -> None:
        super().__init__()
        self.window, self.weight = window, torch.nn.Parameter(torch.zeros(1))

    def hidden(self, forest):
        ids, starts = forest.tokens.tolist(), forest.positions.tolist()
        said = [self.following(ids, at, at - starts[at]) for at in range(len(ids))]
        return torch.nn.functional.one_hot(torch.tensor(said), VOCABULARY.vocab_size).float()

    def following(self, ids: list[int], at: int, first: int) -> int:
        best, answer = 0, 0
        for other in range(max(first, at - self.window), at):
            size = 0
            while size <= other - first and ids[other - size] == ids[at - size]:
                size += 1
            if size > best:
                best, answer = size, ids[other + 1]
        return answer

    def logits(self, hidden):
        return hidden


def test_texts_hold_the_passage_at_its_depth_and_have_the_length() -> None:
    for depth in DEPTHS:
        for prompt, answer in texts(NOISE, VOCABULARY, 90, depth, PASSAGE, 1):
            assert len(prompt) + len(answer) == 90 and prompt[: len(VOCABULARY.lead)].tolist() == VOCABULARY.lead
            text, value = VOCABULARY.decode(prompt.tolist(), skip_special_tokens=True), VOCABULARY.decode(answer.tolist())
            question = text[text.rindex(" the ") :]
            assert text.count(f"{question}{value}.") == 1 and text.count(" the ") == PASSAGE.pairs + 1
            if depth in (0, 1) and PASSAGE.pairs == 1:
                assert text.startswith(question) if depth == 0 else text.endswith(f"{question}{value}.{question}")
    with pytest.raises(PunaError, match="needle: 20 tokens have no room for 2 passages"):
        next(texts(NOISE, VOCABULARY, 20, 0.5, PASSAGE, 1))


def test_a_model_that_copies_finds_every_passage_and_one_with_a_window_the_last(store, documents) -> None:
    one = PASSAGE.replace(pairs=1)
    everywhere = by_depth(Copies(), VOCABULARY, NOISE, 90, one, 0, 200)
    assert everywhere == dict.fromkeys(DEPTHS, wilson(8, 8))
    near = by_depth(Copies(30), VOCABULARY, NOISE, 90, one, 0, 200)
    assert [near[depth].value for depth in (0.0, 0.25, 1.0)] == [0.0, 0.0, 1.0]


def test_the_stage_reports_each_depth_and_length(store, docs, given) -> None:  # noqa: F811
    model = execute(pretrain, config(phase("a", 2)), given, store)
    made = execute(needle, NeedleConfig(lengths=(96, 128), trials=2), {"model": model, "documents": docs}, store)
    found = {(row["task"], row["metric"]): row for row in made.read().to_pylist()}
    assert found.keys() == {(f"needle/{n}", f"accuracy_at_{d:g}") for n in (96, 128) for d in DEPTHS}
    assert {row["n"] for row in found.values()} == {2}
    least = min(found["needle/96", f"accuracy_at_{d:g}"]["value"] for d in DEPTHS)
    assert made.manifest.metrics["needle_min_96"] == least
    assert made.manifest.figures["needle"]["series"].keys() == {"96 tokens", "128 tokens"}


def test_text_that_asks_the_question_hides_no_passage() -> None:
    one = PASSAGE.replace(key_words=("cat", "dog"), pairs=1)
    assert VOCABULARY.decode(noise_of(["a lake", "see: the cat is six", "salt"], VOCABULARY, one).tolist()) == "a lakesalt"
    with pytest.raises(PunaError, match="each of 1 texts is empty or contains a passage's question, such as ' the cat is'"):
        noise_of(["x the dog is"], VOCABULARY, one)


@pytest.mark.parametrize("passage", ["{value} of {key}", "{key} and {key} is {value}", "a {key}"])
def test_passages_that_ask_nothing_are_refused(passage: str) -> None:
    with pytest.raises(ValueError, match="passage must contain"):
        NeedleSettings(passage=passage)


def long(**accept) -> object:
    bounds = {"short_loss": 10.0, "needle": 0.9, "attempts": 3} | accept
    return phase("longer", 2, join_rows=4, rope_theta=80_000.0, schedule=FLAT | {"learning_rate": 1e-4}, accept=bounds)


def planned(monkeypatch: pytest.MonkeyPatch, *shares: float) -> list[int]:
    """Set the shares of passages found at depth .5, attempt by attempt; return the requested lengths."""
    asked: list[int] = []

    def found(model, vocabulary, noise, length, *_):
        assert not set(noise.tolist()) & {*vocabulary.lead, *vocabulary.end}
        asked.append(length)
        return {d: SimpleNamespace(value=shares[len(asked) - 1] if d == 0.5 else 1.0) for d in DEPTHS}

    monkeypatch.setattr(module, "by_depth", found)
    return asked


def test_a_long_step_is_repeated_until_it_holds(store, given, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    asked = planned(monkeypatch, 0.5, 0.95)
    made = execute(pretrain, config(phase("a", 4), long(), phase("end", 1)), given, store)
    assert asked == [128, 128]
    assert [row["phase"] for row in made.read("training_log").to_pylist()] == [0.0] * 4 + [1.0] * 4 + [2.0]
    metrics = made.manifest.metrics
    assert metrics["attempts_longer"] == 2 and metrics["needle_min_longer"] == 0.95 and abs(metrics["short_loss_change_longer"]) < 1
    series = made.manifest.figures["needle"]["series"]
    assert [points[2] for points in series.values()] == [["0.5", 0.5], ["0.5", 0.95]]
    rows_of = made.read("training_log").to_pylist()
    assert [row["loss"] for row in rows_of[4:6]] != [row["loss"] for row in rows_of[6:8]]


def test_a_step_that_never_holds_stops_the_run_with_its_figures(store, given, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    asked = planned(monkeypatch, 0.5, 0.75, 0.875)
    with pytest.raises(PunaError, match=r"phase longer is not accepted after 3 runs: at depth 0.5 of 96 tokens it finds 0.875 of the"):
        execute(pretrain, config(phase("a", 4), long(length=96)), given, store)
    assert asked == [96] * 3


def test_a_short_loss_that_stays_up_stops_the_run(store, given) -> None:  # noqa: F811
    spoiled = long(short_loss=0.0, needle=0.0, attempts=1).replace(schedule=FLAT | {"learning_rate": 0.5})
    with pytest.raises(PunaError, match=r"phase longer is not accepted after 1 runs: the loss on the held-out documents rose by \d"):
        execute(pretrain, config(phase("a", 20), spoiled), given, store)


def test_rises_of_several_steps_do_not_add_up(store, given, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Each step is compared with the lowest loss before any of them, not with the loss that the step before it left."""
    compared, planned_ = list[tuple[float, float]](), module.Watch.accepts

    def accepts(self, model, phase, bounds, attempt, row, short):
        compared.append((short, self.after))
        return planned_(self, model, phase, bounds, attempt, row, short)

    monkeypatch.setattr(module.Watch, "accepts", accepts)
    planned(monkeypatch, 1.0, 1.0, 1.0)
    worse = long().replace(schedule=FLAT | {"learning_rate": 0.5})
    execute(pretrain, config(phase("a", 20), *(worse.replace(name=name, join_rows=join) for name, join in (("b", 2), ("c", 3), ("d", 4)))), given, store)
    (first, after), *rest = compared
    assert after > first and [short for short, _ in rest] == [first] * 2
