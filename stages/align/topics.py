"""Coarse and fine topics of instructions, from a classifier trained on labelled examples."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from puna.models.training.resumable_loop import iterate
from puna.stages.align.data_quality import embed
from puna.stages.contract import Figure, Instructions, Model, SeededConfig, StageRun, stage
from puna.stages.conversations import as_text, messages_of
from puna.stages.draws import folds, uniform
from puna.stages.training.bad_rows import BadRows, BadRowsConfig, Limit
from puna.stages.training.needs import model_template
from puna.stages.training.train import Example, load_model, render_conversation
from puna.storage import PunaError

Vectors = NDArray[np.float32]
WORD = re.compile(r"\w+")
MOST, ITERATIONS = 500, 10  # maximum number of iterations of a whole fit, and of each L-BFGS call, after which the fit is saved
LISTS, TENSORS, NUMBERS = ("old_dirs", "old_stps", "ro"), ("d", "prev_flat_grad"), ("n_iter", "func_evals", "t", "H_diag", "prev_loss")
"""Keys of torch's L-BFGS state in a saved fit: lists of tensors, tensors, and numbers."""


class TopicsConfig(BadRowsConfig, SeededConfig):
    penalty: float = Field(3e-4, gt=0, description="L2 penalty on the classifier's coefficients")
    folds: int = Field(5, ge=2, le=20, description="Number of cross-validation folds of the labelled examples")
    max_per_topic: int | None = Field(None, ge=1, description="Maximum number of instructions per topic, drawn at random; null: all")
    balance: Literal["coarse", "fine"] = Field("coarse", description="Level of the topics that `max_per_topic` limits")
    micro_batch_tokens: int = Field(4096, ge=16, description="Maximum tokens per forward pass; longer rows are dropped")


@stage(kind="instructions", filters="instructions", needs=model_template)
def topics(instructions: Instructions, labelled: list[Instructions], model: Model, config: TopicsConfig, run: StageRun) -> None:
    """Classify the topic of each instruction, and balance the topics (Llama 3, section 4.2.3, uses a finetuned model for this).

    `labelled`: examples whose `task` is their topic, as `coarse/fine` (`mathematics/geometry`) or one name for both. A softmax regression
    learns from the mean hidden state of `model` over a request; a coarse topic's probability is the sum over its fine topics. Kept rows are
    unchanged. `dropped` has the rows beyond `max_per_topic`; `scores` has each row's likeliest `fine:NAME` and `coarse:NAME`, with their
    probabilities.

    The metrics `fine_accuracy` and `coarse_accuracy` are cross-validated on the labelled examples. Two baselines are measured in the same
    way: `*_majority`, always the most frequent topic, and `*_words`, a naive Bayes classifier of words."""
    rows = sorted(instructions.read().to_pylist(), key=lambda row: str(row["id"]))
    exemplars = sorted((row for one in labelled for row in one.read().to_pylist()), key=lambda row: (str(row["id"]), row["messages"]))
    names = sorted({row["task"] for row in exemplars})
    if len(names) < 2:
        there = ", ".join(names) or "none"
        raise PunaError(f"topics: all labelled examples have the topic {there} in their column `task`; give at least two topics")
    network, tokenizer = load_model(model, "lm", frozen=True)
    limit = Limit(config.micro_batch_tokens, "micro_batch_tokens")

    def render_prompt(row: dict[str, Any]) -> Example:
        return Example(render_conversation(tokenizer, row)[0].prompt, [[]], [[]], [])

    bad, unusable = BadRows(config, "topics"), BadRows(config, "topics")
    taught = unusable.examples(exemplars, render_prompt, len, limit)
    unusable.check_left(len(taught), f"{len(exemplars)} labelled examples")
    requests = bad.examples(rows, render_prompt, len, limit)
    vectors = embed([example for _, example in (*taught, *requests)], network, config.micro_batch_tokens, run.scratch / "states")
    examples = [
        Labelled(row["task"], as_text(messages_of(row)[:-1]), vector)
        for (row, _), vector in zip(taught, vectors[: len(taught)], strict=True)
    ]
    _measure(examples, folds([str(row["id"]) for row, _ in taught], config.seed, config.folds), config, run)
    classes = sorted({one.topic for one in examples})
    shares = probabilities(fit(examples, classes, config.penalty, run.scratch / "all"), vectors[len(taught) :])
    remaining, topics_by_id = [row for row, _ in requests], {}
    for row, share in zip(remaining, shares, strict=True):
        topics_by_id[row["id"]] = {"fine": _best(dict(zip(classes, share.tolist(), strict=True))), "coarse": _best(_coarse(classes, share))}
    left = _above_limit([row["id"] for row in remaining], {name: one[config.balance][0] for name, one in topics_by_id.items()}, config)
    for name, (topic, count) in left.items():
        bad.dropped.append({"id": name, "rule": "topic", "value": float(count), "threshold": config.max_per_topic, "detail": topic})
    run.write_rows([row for row in remaining if row["id"] not in left])
    run.write_rows(bad.dropped, "dropped")
    scores = [(name, f"{level}:{topic}", share) for name, one in topics_by_id.items() for level, (topic, share) in one.items()]
    run.write_rows([{"id": name, "name": topic, "value": share} for name, topic, share in scores], "scores")
    _report(topics_by_id, left, run)


class Labelled(NamedTuple):
    """A labelled request: its topic, text and vector [D]."""

    topic: str
    text: str
    vector: Vectors


def coarse(topic: str) -> str:
    """Return the coarse topic of a fine topic: the part before the first slash."""
    return topic.partition("/")[0]


def fit(examples: Sequence[Labelled], classes: Sequence[str], penalty: float, state: Path | None = None) -> NDArray[np.float64]:
    """Fit a softmax regression; return its coefficients and biases, float64 [D + 1, C].

    It minimizes the mean cross-entropy plus `penalty` x the sum of squared coefficients; the minimum is unique up to a constant added to
    all biases. `state`: folder in which an unfinished fit is saved."""
    import torch

    x = torch.from_numpy(np.stack([one.vector for one in examples]).astype(np.float64)) * math.sqrt(examples[0].vector.size)
    y = torch.tensor([classes.index(one.topic) for one in examples])
    weights = torch.zeros(x.shape[1] + 1, len(classes), dtype=torch.float64, requires_grad=True)
    tolerances: dict[str, Any] = {"tolerance_grad": 1e-9, "tolerance_change": 1e-12}
    optimizer = torch.optim.LBFGS([weights], max_iter=ITERATIONS, max_eval=MOST, line_search_fn="strong_wolfe", **tolerances)

    def loss() -> float:
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(x @ weights[:-1] + weights[-1], y) + penalty * weights[:-1].square().sum()
        value.backward()
        return value.item()

    values: NDArray[np.float64] = weights.detach().numpy()
    memory: dict[str, Any] = optimizer.state[weights]

    def descend() -> bool:
        before = memory.get("n_iter", 0)
        optimizer.step(loss)
        return bool(memory["n_iter"] - before < ITERATIONS)

    def arrays() -> dict[str, NDArray[Any]]:
        lists = {name: torch.stack(memory[name]).numpy() for name in LISTS if memory.get(name)}
        tensors = {name: memory[name].numpy() for name in TENSORS if name in memory}
        return {"weights": values, **lists, **tensors, **{name: np.array(float(memory[name])) for name in NUMBERS if name in memory}}

    def take(saved: Mapping[str, NDArray[Any]]) -> None:
        values[:] = saved["weights"]
        memory.update({name: list(torch.tensor(saved[name])) if name in saved else [] for name in LISTS})
        memory.update({name: torch.tensor(saved[name]) for name in TENSORS if name in saved})
        memory.update({name: float(saved[name]) for name in NUMBERS if name in saved})

    iterate(descend, MOST // ITERATIONS, arrays, take, state, {"examples": len(examples), "classes": list(classes), "penalty": penalty})
    return values


def probabilities(weights: NDArray[np.float64], vectors: Vectors) -> NDArray[np.float64]:
    logits = (vectors.astype(np.float64) * math.sqrt(vectors.shape[1])) @ weights[:-1] + weights[-1]
    grown = np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf))
    shares: NDArray[np.float64] = grown / grown.sum(1, keepdims=True)
    return shares


def by_words(examples: Sequence[Labelled], texts: Sequence[str]) -> list[str]:
    """Return the topic of each text, from multinomial naive Bayes over lower-case words with add-one smoothing."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    of_topic = Counter(one.topic for one in examples)
    for one in examples:
        counts[one.topic].update(WORD.findall(one.text.lower()))
    vocabulary = len({word for words in counts.values() for word in words})
    totals = {topic: words.total() + vocabulary for topic, words in counts.items()}

    def score(topic: str, words: Sequence[str]) -> float:
        return math.log(of_topic[topic]) + sum(math.log((counts[topic][word] + 1) / totals[topic]) for word in words)

    return [max(sorted(counts), key=lambda topic: score(topic, WORD.findall(text.lower()))) for text in texts]


def _measure(examples: Sequence[Labelled], fold: NDArray[Any], config: TopicsConfig, run: StageRun) -> None:
    """Report the cross-validated accuracies of the classifier and of both baselines on the labelled examples."""
    right: Counter[str] = Counter()
    for number in np.unique(fold).tolist():
        out = [one for one, at in zip(examples, fold, strict=True) if at == number]
        rest = [one for one, at in zip(examples, fold, strict=True) if at != number]
        classes = sorted({one.topic for one in rest})
        if len(classes) < 2:
            raise PunaError(f"topics: without one fold, all labelled examples have the topic {classes}; give more, or fewer folds")
        weights = fit(rest, classes, config.penalty, run.scratch / f"fold-{number}")
        shares = probabilities(weights, np.stack([one.vector for one in out]))
        often = Counter(one.topic for one in rest)
        roughly = Counter(coarse(one.topic) for one in rest)
        words = by_words(rest, [one.text for one in out])
        for one, share, word in zip(out, shares, words, strict=True):
            guesses = {"accuracy": (classes[int(share.argmax())], _best(_coarse(classes, share))[0]), "words": (word, coarse(word))}
            guesses["majority"] = (_best(often)[0], _best(roughly)[0])
            for name, (fine, rough) in guesses.items():
                right[f"fine_{name}"] += fine == one.topic
                right[f"coarse_{name}"] += rough == coarse(one.topic)
    run.metric("labelled", len(examples))
    for name in ("fine_accuracy", "fine_majority", "fine_words", "coarse_accuracy", "coarse_majority", "coarse_words"):
        run.metric(name, right[name] / len(examples))


def _best(found: dict[str, float] | Counter[str]) -> tuple[str, float]:
    """Return the key with the highest number, and that number; the alphabetically first key among ties."""
    name = min(found, key=lambda one: (-found[one], one))
    return name, float(found[name])


def _coarse(classes: Sequence[str], share: NDArray[np.float64]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for topic, value in zip(classes, share.tolist(), strict=True):
        totals[coarse(topic)] += value
    return dict(totals)


def _above_limit(names: Sequence[str], topic: dict[str, str], config: TopicsConfig) -> dict[str, tuple[str, int]]:
    """Return id → (topic, number of instructions with this topic) for the instructions beyond `max_per_topic`."""
    if config.max_per_topic is None:
        return {}
    counts = Counter(topic[name] for name in names)
    left, tally = {}, Counter[str]()
    for _, name in sorted(zip(uniform(names, config.seed, "topic").tolist(), names, strict=True)):
        tally[topic[name]] += 1
        if tally[topic[name]] > config.max_per_topic:
            left[name] = (topic[name], counts[topic[name]])
    return left


def _report(found: dict[str, dict[str, tuple[str, float]]], left: dict[str, tuple[str, int]], run: StageRun) -> None:
    for level in ("coarse", "fine"):
        before = Counter(one[level][0] for one in found.values())
        after = Counter(one[level][0] for name, one in found.items() if name not in left)
        run.metric(f"{level}_topics", len(before))
        series: dict[str, list[tuple[Any, float]]] = {
            name: [(topic, float(counts[topic])) for topic in sorted(before)] for name, counts in (("given", before), ("kept", after))
        }
        run.figure(f"{level}_topics", Figure(title=f"Topics, {level}", x="topic", y="instructions", kind="bar", series=series))
