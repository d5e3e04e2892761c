"""Filters for instructions: overused phrases, faulty text, duplicates, low quality, near-duplicates in meaning, and a random sample."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from puna.models.training.resumable_loop import rows_of
from puna.stages.contract import Facts, Figure, Instructions, Model, SeededConfig, StageConfig, StageRun, stage
from puna.stages.conversations import answer_texts, as_text, content_of, dump, messages_of
from puna.stages.draws import uniform
from puna.stages.training.bad_rows import BadRows, BadRowsConfig, Limit
from puna.stages.training.needs import chat_template
from puna.stages.training.train import Example, load_model, render_conversation
from puna.stages.verifiers.judge import Graded, JudgeSettings, grade
from puna.stages.verifiers.judges import Loaded
from puna.storage import PunaError

if TYPE_CHECKING:
    from puna.models.transformer import Transformer

EMOJI = re.compile("[\U0001f1e6-\U0001f1ff\U0001f300-\U0001faff\u2600-\u27bf\u2b50\u2b55\ufe0f]")
"""A pattern that matches an emoji character: pictographs, dingbats, regional indicators or the emoji variation selector."""

BLOCK, HELD = 256, 8192  # maximum number of new and of kept vectors per matrix product

Row = dict[str, Any]
Vectors = np.ndarray[Any, np.dtype[np.float32]]
LEVELS = ("easy", "medium", "hard")

PHRASES = ("i'm sorry", "i apologize", "as an ai", "i cannot help", "certainly!")
"""Overused phrases; the first two are examples in the Llama 3 paper."""


class Rules(StageConfig):
    """Rules for the text of an answer."""

    phrases: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        PHRASES, description="Overused phrases; case and the form of an apostrophe do not matter"
    )
    phrase_share: float = Field(0.01, ge=0, le=1, description="Maximum share of answers with the same phrase; the highest-scored are kept")
    max_emoji: int = Field(0, ge=0, description="Maximum number of emoji in an answer")
    max_exclamation_marks: int = Field(1, ge=0, description="Maximum number of exclamation marks in an answer")


class Semantic(StageConfig):
    """Settings for removing near-duplicates in meaning."""

    clusters: int = Field(1, ge=1, description="Number of clusters; only rows in one cluster are compared. 1: all pairs, quadratic time")
    max_similarity: float = Field(0.98, gt=0, le=1, description="Minimum cosine similarity of a near-duplicate to a kept dialogue")


class DataQualityConfig(BadRowsConfig, SeededConfig):
    rules: Rules = Field(default_factory=Rules, description="Rules on the text")
    reward_quantile: float = Field(0.75, ge=0, lt=1, description="Quantile of the rewards at or above which an answer is good")
    min_agreement: float = Field(0.5, ge=0, le=1, description="Without a judge: agreement of samples at or above which an answer is good")
    judge: JudgeSettings | None = Field(None, description="Judge that grades answers (replaces agreement) and difficulty; null: no judge")
    semantic: Semantic = Field(default_factory=Semantic, description="Semantic deduplication")
    keep: int | None = Field(None, ge=1, description="Maximum rows to keep, drawn in proportion to quality x (1 + difficulty); null: all")
    micro_batch_tokens: int = Field(4096, ge=16, description="Maximum tokens per forward pass; longer rows are dropped")

    @model_validator(mode="after")
    def _judge_replaces_agreement(self) -> Self:
        return self if self.judge is None else self.refuse_unused("a judge replaces agreement", "min_agreement")


UNUSED_JUDGE = "a judge was given, but data_quality.judge is null; set data_quality.judge={} or leave the judge out"


def needs(config: DataQualityConfig, facts: Facts) -> list[str]:
    """Return messages if the judging model has no chat template, or if the settings do not use the input `judge`."""
    if config.judge is None:
        return [UNUSED_JUDGE] if facts.inputs.get("judge") else []
    return chat_template(facts, "judge" if facts.inputs.get("judge") else "model")


@stage(kind="instructions", filters="instructions", needs=needs)
def data_quality(instructions: Instructions, model: Model, judge: Model | None, config: DataQualityConfig, run: StageRun) -> None:
    """Drop rows with overused phrases, duplicates, low quality and near-duplicates (Llama 3, section 4.2.3).

    An answer is good if its reward is high. With the setting `judge`, the top grade from the language model `judge` (default: `model`) also
    suffices; without it, enough agreement among the prompt's samples. Rows without a reward pass, unless the judge's grade is below the
    top. Difficulty is the judge's grade, or else one minus the agreement. Near-duplicates are found by the cosine similarity of `model`'s
    centered mean hidden states; each cluster keeps dialogues greedily, ordered by quality x (1 + difficulty). `keep` samples by this
    product. Rows that the chat template of `model` rejects, or longer than `micro_batch_tokens`, are dropped first; see `bad_rows`.

    `given_easy`, `given_medium` and `given_hard` count the rows that reach the quality rule, by difficulty (below 1/3, below 2/3, above);
    `kept_easy` and so on count the kept rows. `reward_and_judge`, `reward_only`, `judge_only` and `neither` count the rows with both a
    reward and a grade by which of the two is good. `scores` has the judge's mean grades: `points`, `difficulty` (0 to 2), `intentions`."""
    if not instructions.rows():
        raise PunaError(f"data_quality: {instructions.id} has no instructions; the previous stage's `dropped` table says why")
    if judge is not None and config.judge is None:
        raise PunaError(f"data_quality: {UNUSED_JUDGE}")
    rows = sorted(instructions.read().to_pylist(), key=lambda row: str(row["id"]))
    scores = instructions.read("scores").to_pylist() if "scores" in instructions.tables else []
    agreement = {row["id"]: row["value"] for row in scores if row["name"] == "agreement"}
    network, tokenizer = load_model(model, "lm", frozen=True)
    bad = BadRows(config, "data_quality")
    limit = Limit(config.micro_batch_tokens, "micro_batch_tokens")
    rendered = bad.examples(rows, lambda row: render_conversation(tokenizer, row)[-1], len, limit)
    bad.check_left(len(rendered), f"{len(rows)} instructions")
    rows = [row for row, _ in rendered]
    examples = {row["id"]: example for row, example in rendered}
    dropped = bad.dropped
    for rule in (_phrase_rule(rows, config.rules), _text_rule(config.rules), _duplicate_rule(rows)):
        rows = _apply(rule, rows, dropped)
    grader = Loaded(network, tokenizer) if judge is None else Loaded(*load_model(judge, "lm", frozen=True))
    grades = grade(rows, grader, config.judge, run) if config.judge else None
    difficulty = grades.difficulty if grades and grades.difficulty else {name: 1.0 - share for name, share in agreement.items()}
    before = rows
    rows = _apply(_quality_rule(rows, agreement, grades, config, run), rows, dropped)
    if rows:
        vectors = embed([examples[row["id"]] for row in rows], network, config.micro_batch_tokens, run.scratch / "states")
        worth = _worth(rows, difficulty, grades)
        rows = _apply(_semantic_rule(rows, worth, vectors, config, run), rows, dropped)
        rows = _apply(_draw_rule(rows, worth, config), rows, dropped)
    run.write_rows(rows)
    run.write_rows(dropped, "dropped")
    if grades:
        run.write_rows(grades.scores, "scores")
    _report_difficulty(before, rows, difficulty, run)
    counts = Counter(row["rule"] for row in dropped)
    run.metric("kept", len(rows))
    for rule, count in sorted(counts.items()):
        run.metric(f"dropped_{rule}", count)
    bars: list[tuple[Any, float]] = [("kept", float(len(rows))), *((r, float(n)) for r, n in sorted(counts.items()))]
    run.figure("rules", Figure(title="Data quality", x="rule", y="instructions", kind="bar", series={"instructions": bars}))


Verdict = tuple[str, float | None, float | None, str | None]
"""The outcome of a rule that drops a row: the rule, the measured value, the threshold, and a detail such as the phrase."""


def _apply(verdicts: Any, rows: list[Row], dropped: list[Row]) -> list[Row]:
    remaining = []
    for row in rows:
        verdict: Verdict | None = verdicts(row)
        if verdict is None:
            remaining.append(row)
        else:
            dropped.append({"id": row["id"], **dict(zip(("rule", "value", "threshold", "detail"), verdict, strict=True))})
    return remaining


def _answer(row: Row) -> str:
    return "\n".join(answer_texts(messages_of(row)))


def _plain(text: str) -> str:
    return text.casefold().replace("’", "'")


def _without_blanks(row: Row) -> tuple[str | None, ...]:
    """Return a conversation's tools, and each of its messages as JSON, with whitespace around its content stripped."""
    return (row["tools"], *(dump({**message, "content": content_of(message).strip()}) for message in messages_of(row)))


def _best_first(row: Row) -> tuple[float, str]:
    return (-(row["score"] if row["score"] is not None else float("inf")), row["id"])


def _phrase_rule(rows: Sequence[Row], rules: Rules) -> Any:
    """Return a rule that limits each phrase to `phrase_share` x the number of `rows`; the lowest-scored answers with it are dropped."""
    verdicts: dict[str, Verdict] = {}
    most = rules.phrase_share * len(rows)
    texts = {row["id"]: _plain(_answer(row)) for row in rows}
    for phrase in rules.phrases:
        holders = sorted((row for row in rows if _plain(phrase) in texts[row["id"]]), key=_best_first)
        for row in holders[int(most) :]:
            verdicts.setdefault(row["id"], ("phrase", float(len(holders)), most, phrase))
    return lambda row: verdicts.get(row["id"])


def _text_rule(rules: Rules) -> Any:
    def judge(row: Row) -> Verdict | None:
        turns = [message for message in messages_of(row) if message.get("role") == "assistant"]
        if any(not content_of(message).strip() and not message.get("tool_calls") for message in turns):
            return "empty", 0.0, None, None
        text = _answer(row)
        for rule, count, most in (
            ("emoji", len(EMOJI.findall(text)), rules.max_emoji),
            ("exclamation_marks", text.count("!"), rules.max_exclamation_marks),
        ):
            if count > most:
                return rule, float(count), float(most), text[:200]
        return None

    return judge


def _duplicate_rule(rows: Sequence[Row]) -> Any:
    """Return a rule that drops repeated conversations except the copy with the highest score."""
    first_ids: dict[tuple[str | None, ...], str] = {}
    for row in sorted(rows, key=_best_first):
        first_ids.setdefault(_without_blanks(row), row["id"])

    def judge(row: Row) -> Verdict | None:
        first = first_ids[_without_blanks(row)]
        return None if first == row["id"] else ("duplicate", None, None, first)

    return judge


def _quality_rule(rows: Sequence[Row], agreement: dict[str, float], grades: Graded | None, config: DataQualityConfig, run: StageRun) -> Any:
    """Return a rule that keeps rows with a high reward, a top grade or (no judge) enough agreement, or with neither reward nor grade."""
    scores = [row["score"] for row in rows if row["score"] is not None]
    threshold = float(np.quantile(scores, config.reward_quantile)) if scores else 0.0
    both = [row for row in rows if grades and row["score"] is not None and row["id"] in grades.quality]
    if grades and both:
        verdicts = Counter((row["score"] >= threshold, row["id"] in grades.full) for row in both)
        names = {(True, True): "reward_and_judge", (True, False): "reward_only", (False, True): "judge_only", (False, False): "neither"}
        for verdict, name in names.items():
            run.metric(name, verdicts[verdict])

    def judge(row: Row) -> Verdict | None:
        name, agreed = row["id"], agreement.get(row["id"], 0.0)
        if row["score"] is None and (grades is None or name not in grades.quality):
            return None
        if row["score"] is not None and row["score"] >= threshold:
            return None
        if name in grades.full if grades else agreed >= config.min_agreement:
            return None
        other = f"judge {grades.quality[name]:.2f}" if grades and name in grades.quality else f"agreement {agreed:.2f}"
        return "quality", row["score"], threshold, f"{other}: {_answer(row)[:200]}"

    return judge


def _semantic_rule(rows: Sequence[Row], worth: dict[str, float], vectors: Vectors, config: DataQualityConfig, run: StageRun) -> Any:
    cluster = k_means(vectors, min(config.semantic.clusters, len(rows)), run.generator("clusters"))
    verdicts: dict[str, Verdict] = {}
    for name in range(int(cluster.max()) + 1):
        members: list[int] = np.flatnonzero(cluster == name).tolist()
        order = sorted(members, key=lambda i: (-worth[rows[i]["id"]], rows[i]["id"]))
        for i, match, cosine in greedy(vectors[order], config.semantic.max_similarity):
            row, better = rows[order[i]], rows[order[match]]
            detail = f"{better['id']} {as_text(messages_of(better)[:-1])[:100]}"
            verdicts[row["id"]] = ("semantic_duplicate", cosine, config.semantic.max_similarity, detail)
    return lambda row: verdicts.get(row["id"])


def _worth(rows: Sequence[Row], difficulty: dict[str, float], grades: Graded | None) -> dict[str, float]:
    """Return id → quality x (1 + difficulty). Quality, 0 to 1, is the larger of reward rank and judge's points. An unknown quality or
    difficulty counts as 1."""
    scored = sorted(row["score"] for row in rows if row["score"] is not None)
    worths = {}
    for row in rows:
        qualities: list[float] = [np.searchsorted(scored, row["score"], side="right") / len(scored)] if row["score"] is not None else []
        qualities += [grades.quality[row["id"]]] if grades and row["id"] in grades.quality else []
        worths[row["id"]] = float(max(qualities, default=1.0)) * (1.0 + difficulty.get(row["id"], 1.0))
    return worths


def _draw_rule(rows: Sequence[Row], worth: dict[str, float], config: DataQualityConfig) -> Any:
    """Return a rule that samples `keep` rows without replacement, with probabilities proportional to their worth, and drops the rest. Each
    row gets an exponential random number with rate `worth`, seeded by its id; the smallest win (Efraimidis and Spirakis 2006)."""
    if config.keep is None or len(rows) <= config.keep:
        return lambda row: None
    names = [row["id"] for row in rows]
    weights = np.array([worth[name] for name in names])
    waiting = np.divide(-np.log1p(-uniform(names, config.seed, "keep")), weights, out=np.full(len(names), np.inf), where=weights > 0)
    sample = {names[i] for i in np.argsort(waiting, kind="stable")[: config.keep]}
    return lambda row: None if row["id"] in sample else ("not_drawn", worth[row["id"]], None, None)


def _report_difficulty(given: Sequence[Row], kept: Sequence[Row], difficulty: dict[str, float], run: StageRun) -> None:
    if not any(row["id"] in difficulty for row in given):
        return
    bars: dict[str, list[tuple[Any, float]]] = {}
    for name, rows in (("given", given), ("kept", kept)):
        counts = Counter(LEVELS[min(int(difficulty[row["id"]] * 3), 2)] for row in rows if row["id"] in difficulty)
        for level in LEVELS:
            run.metric(f"{name}_{level}", counts[level])
        bars[name] = [(level, float(counts[level])) for level in LEVELS]
    run.figure("difficulty", Figure(title="What is kept, by difficulty", x="difficulty", y="instructions", kind="bar", series=bars))


def embed(examples: Sequence[Example], model: Transformer, micro_batch_tokens: int, folder: Path | None = None) -> Vectors:
    """Return unit (or zero) vectors [n, D]: the mean hidden state over a prompt and its first answer, minus the mean of all examples.

    Uncentered hidden states share a large common direction, so all their cosines are near 1. `folder`: finished batches are saved here."""
    import torch

    from puna.models.forest import Forest
    from puna.models.training.packing import pack

    place = next(model.parameters()).device

    def means(packed: list[int]) -> Vectors:
        documents = [examples[i].prompt + examples[i].answers[0] for i in packed]
        with torch.no_grad():
            hidden = model.hidden(Forest.pack(documents).to(place)).float().cpu()
        return np.stack([part.mean(0).numpy() for part in hidden.split([len(d) for d in documents])])

    batches = pack([len(e) for e in examples], micro_batch_tokens)
    vectors = np.zeros((len(examples), model.config.hidden_size), np.float32)
    order = np.array([i for packed in batches for i in packed], np.int64)
    vectors[order] = rows_of(means, batches, folder, "batch of hidden states")
    vectors -= vectors.mean(0)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Vectors = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return unit


def k_means(vectors: Vectors, clusters: int, generator: np.random.Generator, rounds: int = 20) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the cluster of each vector, int64 [n], from spherical k-means: at most `rounds` iterations, started at random vectors."""
    centres = vectors[generator.choice(len(vectors), clusters, replace=False)]
    assigned = np.full(len(vectors), -1)
    for _ in range(rounds):
        nearest = np.argmax(vectors @ centres.T, axis=1)
        if np.array_equal(nearest, assigned):
            break
        assigned = nearest
        for name in range(clusters):
            members = vectors[assigned == name]
            if len(members):
                mean = members.mean(0)
                centres[name] = mean / max(float(np.linalg.norm(mean)), 1e-12)
    return assigned.astype(np.int64)


def greedy(vectors: Vectors, max_similarity: float) -> list[tuple[int, int, float]]:
    """Return the near-duplicates that a greedy pass drops, as (index, index of the most similar kept vector, their cosine). A vector is
    kept if its cosine to every vector kept so far is below `max_similarity`. Vectors are compared in blocks by matrix products."""
    indices = np.empty(len(vectors), np.int64)
    held = np.empty_like(vectors)
    count, left_out = 0, []
    for start in range(0, len(vectors), BLOCK):
        block = vectors[start : start + BLOCK]
        nearest, cosines = np.full(len(block), -1), np.full(len(block), -np.inf, np.float32)
        for first in range(0, count, HELD):
            products = block @ held[first : min(first + HELD, count)].T
            at = products.argmax(1)
            best = np.take_along_axis(products, at[:, None], 1)[:, 0]
            nearest, cosines = np.where(best > cosines, indices[first + at], nearest), np.maximum(cosines, best)
        own = block @ block.T
        for i in range(len(block)):
            if cosines[i] >= max_similarity:
                left_out.append((start + i, int(nearest[i]), float(cosines[i])))
                continue
            indices[count], held[count], count = start + i, block[i], count + 1
            nearest, cosines = np.where(own[i] > cosines, start + i, nearest), np.maximum(cosines, own[i])
    return left_out
