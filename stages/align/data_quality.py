"""Filters on training data: phrases, duplicates, quality, and semantic near-duplicates."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from puna.stages.contract import Figure, Instructions, Model, SeededConfig, StageConfig, StageRun, stage
from puna.stages.conversations import Message, answer_texts, content_of, dump, messages_of, shown
from puna.stages.training.bad_rows import BadRows, BadRowsConfig, Limit
from puna.stages.training.train import Example, load_model, render_conversation
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.transformer import Transformer

EMOJI = re.compile("[\U0001f1e6-\U0001f1ff\U0001f300-\U0001faff\u2600-\u27bf\u2b50\u2b55\ufe0f]")
"""Pictographs, dingbats, regional indicators and the emoji variation selector."""

PHRASES = ("i'm sorry", "i apologize", "as an ai", "i cannot help", "certainly!")
"""Overused ways to begin; the first two are the paper's examples."""


class Rules(StageConfig):
    """Rules on the text of an answer."""

    phrases: tuple[str, ...] = Field(PHRASES, description="Overused phrases, in lower case")
    phrase_share: float = Field(
        0.01, ge=0, le=1, description="Share of all answers that may hold one and the same phrase; the best-scored ones stay"
    )
    max_emoji: int = Field(0, ge=0, description="Maximum number of emoji in an answer")
    max_exclamation_marks: int = Field(1, ge=0, description="Maximum number of exclamation marks in an answer")


class Semantic(StageConfig):
    """Removal of answers that say the same thing."""

    clusters: int = Field(8, ge=1, description="Clusters of dialogues; near-duplicates are looked for inside a cluster")
    max_similarity: float = Field(
        0.98, gt=0, le=1, description="Maximum cosine of a kept dialogue's embedding to better ones kept before it"
    )


class DataQualityConfig(BadRowsConfig, SeededConfig):
    """Which filters, and how strict."""

    rules: Rules = Field(default_factory=Rules, description="Rules on the text")
    reward_quantile: float = Field(
        0.75, ge=0, lt=1, description="An answer is good when its reward lies in the part above this quantile"
    )
    min_agreement: float = Field(
        0.5, ge=0, le=1, description="An answer is good, too, when this share of the prompt's samples say the same, fraction"
    )
    semantic: Semantic = Field(default_factory=Semantic, description="Semantic deduplication")
    micro_batch_tokens: int = Field(4096, ge=16, description="Tokens of one forward pass; a longer row is dropped")


@stage(kind="instructions", filters="instructions")
def data_quality(instructions: Instructions, model: Model, config: DataQualityConfig, run: StageRun) -> None:
    """Drop overused phrases, duplicates, low quality and near-duplicates (Llama 3, section 4.2.3).

    Quality is a reward in the top part, or the agreement of the prompt's samples in the place of a judge; rows
    without a score pass. Difficulty is one minus the agreement. Near-duplicates are found by the cosine of
    `model`'s mean hidden states, the mean over all dialogues taken off; in each cluster the dialogues are kept
    greedily by quality times difficulty. Rows that the chat template of `model` refuses, and those longer than `micro_batch_tokens`,
    are dropped first; see `bad_rows`.
    """
    if not instructions.rows():
        raise PunaError(f"data_quality: {instructions.id} has no instructions; `dropped` of the stage before says why")
    rows = sorted(instructions.read().to_pylist(), key=lambda row: str(row["id"]))
    agreement = _agreement(instructions)
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
    rows = _apply(_quality_rule(rows, agreement, config), rows, dropped)
    if rows:
        vectors = embed([examples[row["id"]] for row in rows], network, config.micro_batch_tokens)
        rows = _apply(_semantic_rule(rows, agreement, vectors, config, run), rows, dropped)
    run.write_rows(rows)
    run.write_rows(dropped, "dropped")
    counts = Counter(row["rule"] for row in dropped)
    run.metric("kept", len(rows))
    for rule, count in sorted(counts.items()):
        run.metric(f"dropped_{rule}", count)
    bars: list[tuple[Any, float]] = [("kept", float(len(rows))), *((r, float(n)) for r, n in sorted(counts.items()))]
    run.figure("rules", Figure(title="Data quality", x="rule", y="instructions", kind="bar", series={"instructions": bars}))


Vectors = np.ndarray[Any, np.dtype[np.float32]]
Verdict = tuple[str, float | None, float | None, str | None]
"""Rule, value, threshold, detail."""


def _apply(verdicts: Any, rows: list[dict[str, Any]], dropped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows on which the rule is silent; the others go to `dropped`."""
    kept = []
    for row in rows:
        verdict: Verdict | None = verdicts(row)
        if verdict is None:
            kept.append(row)
        else:
            rule, value, threshold, detail = verdict
            dropped.append({"id": row["id"], "rule": rule, "value": value, "threshold": threshold, "detail": detail})
    return kept


def _agreement(instructions: Artifact) -> dict[str, float]:
    """Instruction id -> share of its prompt's samples with the same text, where it is known."""
    if "scores" not in instructions.tables:
        return {}
    return {row["id"]: row["value"] for row in instructions.read("scores").to_pylist() if row["name"] == "agreement"}


def _answer(row: dict[str, Any]) -> str:
    """What the assistant says in a conversation."""
    return "\n".join(answer_texts(messages_of(row)))


def _is_empty(message: Message) -> bool:
    """Whether it is a turn of the assistant that neither says nor calls anything."""
    return message.get("role") == "assistant" and not content_of(message).strip() and not message.get("tool_calls")


def _said(row: dict[str, Any]) -> tuple[str, ...]:
    """A conversation without the blanks around its contents."""
    return tuple(dump({**message, "content": content_of(message).strip()}) for message in messages_of(row))


def _best_first(row: dict[str, Any]) -> tuple[float, str]:
    return (-(row["score"] if row["score"] is not None else float("inf")), row["id"])


def _phrase_rule(rows: Sequence[dict[str, Any]], rules: Rules) -> Any:
    """At most `phrase_share` of the answers may hold one phrase."""
    found: dict[str, Verdict] = {}
    most = rules.phrase_share * len(rows)
    for phrase in rules.phrases:
        holders = sorted((row for row in rows if phrase in _answer(row).lower()), key=_best_first)
        for row in holders[int(most) :]:
            found.setdefault(row["id"], ("phrase", float(len(holders)), most, phrase))
    return lambda row: found.get(row["id"])


def _text_rule(rules: Rules) -> Any:
    """Empty answers, emoji, exclamation marks."""

    def judge(row: dict[str, Any]) -> Verdict | None:
        if any(_is_empty(message) for message in messages_of(row)):
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


def _duplicate_rule(rows: Sequence[dict[str, Any]]) -> Any:
    """One prompt with one and the same answer is kept once, the best-scored one."""
    kept: dict[tuple[str, ...], str] = {}
    for row in sorted(rows, key=_best_first):
        kept.setdefault(_said(row), row["id"])

    def judge(row: dict[str, Any]) -> Verdict | None:
        first = kept[_said(row)]
        return None if first == row["id"] else ("duplicate", None, None, first)

    return judge


def _quality_rule(rows: Sequence[dict[str, Any]], agreement: dict[str, float], config: DataQualityConfig) -> Any:
    """Reward in the top part OR enough agreement; a row without a score is somebody's demonstration and passes."""
    scores = [row["score"] for row in rows if row["score"] is not None]
    threshold = float(np.quantile(scores, config.reward_quantile)) if scores else 0.0

    def judge(row: dict[str, Any]) -> Verdict | None:
        agreed = agreement.get(row["id"], 0.0)
        if row["score"] is None or row["score"] >= threshold or agreed >= config.min_agreement:
            return None
        return "quality", row["score"], threshold, f"agreement {agreed:.2f}: {_answer(row)[:200]}"

    return judge


def _semantic_rule(
    rows: Sequence[dict[str, Any]], agreement: dict[str, float], vectors: Vectors, config: DataQualityConfig, run: StageRun
) -> Any:
    cluster = k_means(vectors, min(config.semantic.clusters, len(rows)), run.generator("clusters"))
    worth = _worth(rows, agreement)
    found: dict[str, Verdict] = {}
    for name in range(int(cluster.max()) + 1):
        members: list[int] = np.flatnonzero(cluster == name).tolist()
        order = sorted(members, key=lambda i: (-worth[i], rows[i]["id"]))
        for i, kept, cosine in greedy(vectors[order], config.semantic.max_similarity):
            row, better = rows[order[i]], rows[order[kept]]
            detail = f"{better['id']} {shown(messages_of(better)[:-1])[:100]}"
            found[row["id"]] = ("semantic_duplicate", cosine, config.semantic.max_similarity, detail)
    return lambda row: found.get(row["id"])


def _worth(rows: Sequence[dict[str, Any]], agreement: dict[str, float]) -> list[float]:
    """Quality (rank of the reward, 0 to 1) times difficulty (1 to 2: one more where no sample agrees)."""
    scored = sorted(row["score"] for row in rows if row["score"] is not None)
    ranks = np.searchsorted(scored, [row["score"] if row["score"] is not None else np.inf for row in rows], side="right")
    quality = ranks / max(1, len(scored))
    return [float(q) * (2.0 - agreement.get(row["id"], 0.0)) for q, row in zip(quality, rows, strict=True)]


def embed(examples: Sequence[Example], model: Transformer, micro_batch_tokens: int) -> Vectors:
    """[n, D] unit vectors: the mean hidden state over a dialogue's tokens, the mean of all dialogues taken off.

    Without that, hidden states of one model share a large common direction and every cosine is near 1.
    """
    import torch

    from puna.models.forest import Forest
    from puna.models.training.packing import pack

    place = next(model.parameters()).device
    vectors = np.zeros((len(examples), model.config.hidden_size), np.float32)
    with torch.no_grad():
        for packed in pack([len(e) for e in examples], micro_batch_tokens):
            documents = [examples[i].prompt + examples[i].answers[0] for i in packed]
            hidden = model.hidden(Forest.pack(documents).to(place)).float().cpu()
            for i, part in zip(packed, hidden.split([len(d) for d in documents]), strict=True):
                vectors[i] = part.mean(0).numpy()
    vectors -= vectors.mean(0)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: np.ndarray[Any, np.dtype[np.float32]] = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return unit


def k_means(
    vectors: np.ndarray[Any, np.dtype[np.float32]], clusters: int, generator: np.random.Generator, rounds: int = 20
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[n] int64: spherical k-means, started from `clusters` of the vectors; it stops when nothing moves."""
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


def greedy(
    vectors: np.ndarray[Any, np.dtype[np.float32]], max_similarity: float
) -> list[tuple[int, int, float]]:
    """What a greedy pass in order leaves out: (index, the kept index it resembles most, their cosine).

    A vector is kept while its largest cosine to the kept ones is below `max_similarity`.
    """
    kept: list[int] = []
    held = np.empty_like(vectors)
    left_out = []
    for i, vector in enumerate(vectors):
        if kept:
            cosines = held[: len(kept)] @ vector
            nearest = int(np.argmax(cosines))
            if cosines[nearest] >= max_similarity:
                left_out.append((i, kept[nearest], float(cosines[nearest])))
                continue
        held[len(kept)] = vector
        kept.append(i)
    return left_out
