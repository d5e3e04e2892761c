"""Sampling answers from one or more models, and scoring them with the verifiers of their prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from puna.stages.contract import Model, Prompts, SeededConfig, StageRun, stage
from puna.stages.conversations import answer_text, prompt_ids
from puna.stages.draws import identifier
from puna.stages.training.train import load_model
from puna.stages.verifiers.base import Score, is_correct
from puna.stages.verifiers.scoring import Scorer, verifiers_named
from puna.stages.verifiers.settings import ScoringConfig
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.generation import Completion
    from puna.models.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

STRETCH = 2048
"""Prompts that are answered together; the next ones are begun when their answers are on disk."""
Progress = Callable[[int, int], None]


class SampleConfig(SeededConfig):
    """How answers are drawn."""

    answers: int = Field(8, ge=1, le=1024, description="Answers to each prompt from each model")
    temperature: float = Field(1.0, ge=0, le=10, description="Sampling temperature; 0 always takes the likeliest token")
    top_p: float = Field(1.0, gt=0, le=1, description="Smallest set of likeliest tokens with this probability is drawn from")
    max_tokens: int = Field(64, ge=1, description="Longest answer, its end token included, tokens")
    split: Literal["train", "heldout"] = Field("train", description="Which prompts are answered")
    scoring: ScoringConfig = Field(ScoringConfig(), description="Limits within which the prompts' verifiers score the answers")


@stage(kind="answers", device=True, named=verifiers_named)
def sample(models: list[Model], prompts: Prompts, judges: list[Model] | None, config: SampleConfig, run: StageRun) -> None:
    """K answers per prompt from each model, with log-probabilities and gold scores (Llama 3, section 4.2.2).

    Answers to prompts without a verifier have no gold score, and neither has an answer whose verifier failed: the metric
    `unscored_answers` counts the latter. `judges` are the models that verifiers name.

    Rows name a model by its data digest, and its draws follow from that: like this artifact's own key, they depend on what
    the model is, not on how or in which order it was given.
    """
    rows = [row for row in prompts.read().to_pylist() if row["split"] == config.split]
    if not rows:
        raise PunaError(f"{prompts.id} has no prompts of the split {config.split!r}")
    if len({model.data_digest for model in models}) < len(models):
        raise PunaError("sample: the same model is given twice; preferences need answers of different models")
    scorer = Scorer(rows, config.scoring, run, judges or ())
    for number, model in enumerate(models):
        _answer(model, rows, scorer, config, run, number, len(models))
    scorer.report()
    run.metric("prompts", len(rows))


def _answer(
    artifact: Artifact, rows: Sequence[dict[str, Any]], scorer: Scorer, config: SampleConfig, run: StageRun, number: int, models: int
) -> None:
    """Write a model's answers, STRETCH prompts at a time."""
    total = len(rows) * config.answers
    right = scored = finished = 0
    loaded = cache(lambda: load_model(artifact, "lm"))
    for start in range(0, len(rows), STRETCH):
        before = number * total + start * config.answers

        def progress(done: int, _: int, before: int = before) -> None:
            run.progress(before + done, models * total, f"model {number + 1} of {models}")

        def make(stretch: Sequence[dict[str, Any]] = rows[start : start + STRETCH], progress: Progress = progress) -> list[dict[str, Any]]:
            return _generate(artifact.data_digest, *loaded(), stretch, scorer, config, run, progress)

        made = run.once(f"{artifact.data_digest}-{start:09d}", make, ["gold", "finished"])
        right += sum(map(is_correct, made["gold"].to_pylist()))
        scored += len(made) - made["gold"].null_count
        finished += sum(made["finished"].to_pylist())
    if scored:
        run.metric(f"accuracy_{artifact.data_digest[:12]}", right / scored)
    run.metric(f"finished_{artifact.data_digest[:12]}", finished / total)


def _generate(
    name: str,
    model: Transformer,
    tokenizer: Tokenizer,
    rows: Sequence[dict[str, Any]],
    scorer: Scorer,
    config: SampleConfig,
    run: StageRun,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Rows of the answers table for these prompts."""
    from puna.models.generation import Engine, SamplingParams

    asked = [prompt_ids(tokenizer, row) for row in rows]
    params = SamplingParams(
        n=config.answers,
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_tokens,
        stop=tokenizer.stop_ids,
        seed=run.seed("sample", name),
    )
    completions = Engine(model, tokenizer).generate(asked, params, progress)
    # An answer that was cut off is scored as it stands.
    drawn = [
        (row, index, completion, answer_text(completion.tokens, tokenizer))
        for row, found in zip(rows, completions, strict=True)
        for index, completion in enumerate(found)
    ]
    scores = scorer.scores([(row, text) for row, _, _, text in drawn])
    return [_answer_row(row, name, index, found, text, score) for (row, index, found, text), score in zip(drawn, scores, strict=True)]


def _answer_row(prompt: dict[str, Any], model: str, index: int, completion: Completion, text: str, score: Score) -> dict[str, Any]:
    """One row of the answers table."""
    return {
        "id": identifier(prompt["id"], model, index),
        "prompt_id": prompt["id"],
        "sample": index,
        "model": model,
        "text": text,
        "tokens": list(completion.tokens),
        "logprobs": list(completion.logprobs),
        "finished": bool(completion.finished),
        "score": None,
        "gold": score.value,
        "detail": score.detail or None,
    }


def read_answers(answers: Artifact, prompts: Artifact) -> tuple[dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """The prompts by id, and the answers (without their tokens) by the id of their prompt, as data to learn from.

    PunaError where there are none, where a prompt is not among `prompts`, and where one is held out.
    """
    columns = ["id", "prompt_id", "model", "sample", "text", "finished", "gold"]
    if not answers.rows():
        raise PunaError(f"{answers.id} has no answers; sample some first")
    asked = {row["id"]: row for row in prompts.read().to_pylist()}
    found: dict[str, list[dict[str, Any]]] = {}
    for answer in answers.read(columns=columns).to_pylist():
        if answer["prompt_id"] not in asked:
            raise PunaError(f"answer {answer['id']}: its prompt {answer['prompt_id']} is not among {prompts.id}'s prompts")
        found.setdefault(answer["prompt_id"], []).append(answer)
    if held := sorted(id_ for id_ in found if asked[id_]["split"] == "heldout"):
        raise PunaError(f"{answers.id} answers {len(held)} held-out prompts, for example {held[0]}; nothing may be learned from them")
    return asked, found
