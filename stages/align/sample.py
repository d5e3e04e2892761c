"""Sampling answers from one or more models, and scoring them with the verifiable scorer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from puna.stages.align.fitting import load_model
from puna.stages.align.prompts import identifier
from puna.stages.align.scoring import is_correct, score
from puna.stages.contract import Model, Prompts, SeededConfig, StageRun, stage
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


@stage(kind="answers")
def sample(models: list[Model], prompts: Prompts, config: SampleConfig, run: StageRun) -> None:
    """K answers per prompt from each model, with log-probabilities and gold scores (Llama 3, section 4.2.2).

    Rows name a model by its data digest, and its draws follow from that: like this artifact's own key, they depend
    on what the model is, not on how or in which order it was given.
    """
    rows = [row for row in prompts.read().to_pylist() if row["split"] == config.split]
    if not rows:
        raise PunaError(f"{prompts.id} has no prompts of the split {config.split!r}")
    if len({model.data_digest for model in models}) < len(models):
        raise PunaError("sample: the same model is given twice; preferences need answers of different models")
    for number, model in enumerate(models):
        _answer(model, rows, config, run, number, len(models))
    run.metric("prompts", len(rows))


def _answer(
    artifact: Artifact, rows: Sequence[dict[str, Any]], config: SampleConfig, run: StageRun, number: int, models: int
) -> None:
    """Write a model's answers, STRETCH prompts at a time."""
    total = len(rows) * config.answers
    right = finished = 0
    loaded = cache(lambda: load_model(artifact, "lm"))
    for start in range(0, len(rows), STRETCH):
        before = number * total + start * config.answers

        def progress(done: int, _: int, before: int = before) -> None:
            run.progress(before + done, models * total, f"model {number + 1} of {models}")

        def make(stretch: Sequence[dict[str, Any]] = rows[start : start + STRETCH], progress: Progress = progress) -> list[dict[str, Any]]:
            return _generate(artifact.data_digest, *loaded(), stretch, config, run, progress)

        made = run.once(f"{artifact.data_digest}-{start:09d}", make, ["gold", "finished"])
        right += sum(map(is_correct, made["gold"].to_pylist()))
        finished += sum(made["finished"].to_pylist())
    run.metric(f"accuracy_{artifact.data_digest[:12]}", right / total)
    run.metric(f"finished_{artifact.data_digest[:12]}", finished / total)


def _generate(
    name: str,
    model: Transformer,
    tokenizer: Tokenizer,
    rows: Sequence[dict[str, Any]],
    config: SampleConfig,
    run: StageRun,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Rows of the answers table for these prompts."""
    from puna.models.generation import Engine, Sampling

    asked = [tokenizer.chat([{"role": "user", "content": row["prompt"]}], add_generation_prompt=True) for row in rows]
    sampling = Sampling(
        n=config.answers,
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_tokens,
        stop=(tokenizer.eot, tokenizer.eos),
    )
    completions = Engine(model, tokenizer).generate(asked, sampling, run.seed("sample", name), progress)
    return [
        answer_row(row, name, index, completion, tokenizer)
        for row, found in zip(rows, completions, strict=True)
        for index, completion in enumerate(found)
    ]


def answer_row(
    prompt: dict[str, Any], model: str, index: int, completion: Completion, tokenizer: Tokenizer
) -> dict[str, Any]:
    """One row of the answers table, with its gold score; an answer that was cut off is scored as it stands."""
    text = answer_text(completion.tokens, tokenizer)
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
        "gold": score(prompt["task"], text, prompt["entry"]),
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


def answer_text(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """The answer without special tokens."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
