"""The needle-in-a-haystack evaluation: how often a model finds a passage in a long text, by the passage's depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from puna.models.training.packing import batch_by_size
from puna.stages.contract import Documents, Figure, Mixture, Model, SeededConfig, StageConfig, StageRun, stage
from puna.stages.evaluation.multiple_choice import heldout_pages
from puna.stages.training import intervals
from puna.stages.training.train import load_model
from puna.storage import PunaError

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # depths of the passage: the share of the text before it
THINGS = ("harbour", "library", "garden", "kitchen", "station", "bridge", "market", "museum", "factory", "hospital", "castle", "school")
Ids = npt.NDArray[np.int64]


class NeedleSettings(StageConfig):
    """Settings of the passages hidden in long texts."""

    passage: str = Field("\nThe number of the {key} is {value}.\n", description="Passage; the question is its text before {value}")
    key_words: tuple[str, ...] = Field(THINGS, min_length=1, description="Keys; one of them is asked for")
    value_words: tuple[str, ...] = Field(tuple(map(str, range(100, 1000))), min_length=2, description="Values; one is drawn for each key")
    pairs: int = Field(1, ge=1, description="Passages per text, with different keys; only the passage asked for is at a fixed depth")
    trials: int = Field(24, ge=1, le=10_000, description="Number of texts at each depth")

    @model_validator(mode="after")
    def _passage_asks(self) -> NeedleSettings:
        before, _, after = self.passage.partition("{value}")
        if before.count("{key}") != 1 or "{key}" in after or self.passage.count("{value}") != 1:
            raise ValueError(f"passage must contain {{key}} and then {{value}}, once each, not {self.passage!r}")
        keys, values = len(set(self.key_words)), len(set(self.value_words))
        if self.pairs > min(keys, values) or (keys, values) != (len(self.key_words), len(self.value_words)):
            raise ValueError(f"{self.pairs} pairs need at least {self.pairs} different keys and values, not {keys} and {values}")
        return self


class NeedleConfig(NeedleSettings, SeededConfig):
    lengths: tuple[int, ...] = Field((), description="Lengths of the texts, in tokens; empty: the model's longest context")
    max_bytes: int = Field(4_000_000, ge=1000, description="Maximum held-out text to hide passages in, in bytes; short text is repeated")
    micro_batch_tokens: int = Field(8192, ge=16, description="Maximum tokens per forward pass; a longer text gets its own pass")


def noise_of(texts: Sequence[str], tokenizer: Tokenizer, settings: NeedleSettings) -> Ids:
    """Return the concatenated token ids of all texts that do not contain a passage's question. Raise PunaError if none are left."""
    questions = [settings.passage.partition("{value}")[0].rstrip(" ").replace("{key}", key) for key in settings.key_words]
    left = [text for text in texts if not any(question in text for question in questions)]
    noise = np.asarray([id_ for ids in tokenizer.encode_batch(left) for id_ in ids], dtype=np.int64)
    if not len(noise):
        raise PunaError(f"needle: each of {len(texts)} texts is empty or contains a passage's question, such as {questions[0]!r}: change "
            "the setting passage, or hold out other documents")  # fmt: skip
    return noise


def texts(noise: Ids, tokenizer: Tokenizer, length: int, depth: float, settings: NeedleSettings, seed: int) -> Iterator[tuple[Ids, Ids]]:
    """Yield each trial's prompt and answer ids, `length` tokens together, with the passage at `depth` (0 to 1) of the noise. Raise
    PunaError if `length` is too short."""
    head, tail = settings.passage.split("{value}")
    question = head.rstrip(" ")
    space = head[len(question) :]

    def ids(text: str) -> Ids:
        return np.asarray(tokenizer.encode(text), dtype=np.int64)

    for trial in range(settings.trials):
        draw = np.random.default_rng([seed, length, int(100 * depth), trial])
        keys = draw.choice(settings.key_words, settings.pairs, replace=False).tolist()
        values = draw.choice(settings.value_words, settings.pairs, replace=False).tolist()
        parts = [(question.replace("{key}", key), space + value, tail) for key, value in zip(keys, values, strict=True)]
        passages = [np.concatenate([ids(part) for part in some]) for some in parts]
        query, answer = (ids(part) for part in parts[0][:2])
        lead = np.asarray(tokenizer.lead, dtype=np.int64)
        room = length - len(lead) - sum(map(len, passages)) - len(query) - len(answer)
        if room < settings.pairs:
            raise PunaError(f"needle: {length} tokens have no room for {settings.pairs} passages; increase the length, or reduce pairs")
        text = noise[(draw.integers(len(noise)) + np.arange(room)) % len(noise)]
        places = np.concatenate([[round(depth * room)], draw.integers(0, room + 1, settings.pairs - 1)])
        pieces, at = [lead], 0
        for number in np.argsort(places, kind="stable").tolist():
            pieces += [text[at : places[number]], passages[number]]
            at = int(places[number])
        yield np.concatenate([*pieces, text[at:], query]), answer


def by_depth(
    model: Transformer, tokenizer: Tokenizer, noise: Ids, length: int, settings: NeedleSettings, seed: int, micro_batch_tokens: int
) -> dict[float, intervals.Interval]:
    """Return the share of texts of `length` tokens whose passage the model finds, by depth, with Wilson's interval.

    A passage counts as found if each token of its value is the model's likeliest. `noise`: token ids of the surrounding text."""
    shares: dict[float, intervals.Interval] = {}
    for depth in DEPTHS:
        trials = list(texts(noise, tokenizer, length, depth, settings, seed))
        right = sum(sum(_right(model, some)) for some in batch_by_size(trials, lambda one: len(one[0]) + len(one[1]), micro_batch_tokens))
        shares[depth] = intervals.wilson(right, len(trials))
    return shares


def _right(model: Transformer, trials: Sequence[tuple[Ids, Ids]]) -> list[bool]:
    import torch

    from puna.models.training.objectives import Targets
    from puna.models.training.parallel.parallel import alone

    def compute(model: Transformer, batch: Targets) -> torch.Tensor:
        return (model.logits(model.hidden(batch.forest)[batch.positions]).argmax(-1) == batch.tokens).float()

    batch, held = Targets.from_answers([p.tolist() for p, _ in trials], [[a.tolist()] for _, a in trials]), alone(model)
    with torch.no_grad():
        same = held.ask(compute, batch.to(held.device))
    return [bool(part.all()) for part in same.cpu().split(batch.lengths.tolist())]


@stage(kind="evaluation")
def needle(model: Model, documents: Documents, mixture: Mixture | None, config: NeedleConfig, run: StageRun) -> None:
    """Measure whether a model finds a passage anywhere in a long text (needle in a haystack; Llama 3 report, section 5.2.6).

    The surrounding text comes from held-out documents (the mixture's held-out split; without a mixture, all documents)."""
    network, tokenizer = load_model(model, "lm", frozen=True)
    pages = heldout_pages(documents, mixture, config.max_bytes, config.max_bytes, run)
    noise = noise_of([page.text for page in pages], tokenizer, config)
    series: dict[str, list[tuple[Any, float]]] = {}
    lengths = config.lengths or (network.config.max_position_embeddings,)
    for number, length in enumerate(lengths, 1):
        shares = by_depth(network, tokenizer, noise, length, config, run.seed("needle"), config.micro_batch_tokens)
        run.progress(number, len(lengths), f"{length} tokens")
        run.write_rows([intervals.evaluation_row(f"needle/{length}", f"accuracy_at_{d:g}", v, config.trials) for d, v in shares.items()])
        series[f"{length} tokens"] = [(f"{depth:g}", value.value) for depth, value in shares.items()]
        run.metric(f"needle_min_{length}", min(value.value for value in shares.values()))
    run.figure("needle", heat(series))


def heat(series: dict[str, list[tuple[Any, float]]]) -> Figure:
    return Figure(title="Passages found, by depth", x="depth", y="accuracy", kind="bar", series=series)
