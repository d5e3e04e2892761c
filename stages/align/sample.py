"""Sampling of answers from one or more models, and scoring of the answers by the prompts' verifiers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, Self

import pyarrow.compute as pc
from pydantic import Field, model_validator

from puna.models.memory import Work
from puna.models.serving import ServingSettings, Weights, engine_of, guesses, vllm_engine
from puna.stages.contract import Facts, Model, Prompts, SeededConfig, StageRun, stage
from puna.stages.conversations import answer_text, messages_of, prompt_ids, tools_of
from puna.stages.draws import identifier
from puna.stages.endpoint import Endpoint, EndpointConfig, Reply
from puna.stages.executors import ranks
from puna.stages.training.bad_rows import BadRows, BadRowsConfig
from puna.stages.training.needs import chat_template, serving_fits
from puna.stages.training.serving import DealtEngine, load_served
from puna.stages.training.train import context_limit, load_model
from puna.stages.training.vocabulary import tokenizer_of
from puna.stages.verifiers.base import Score, ScoringConfig, is_correct, score_ending
from puna.stages.verifiers.scoring import Scorer, verifiers_named
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.generation import AnswerEngine, Completion, SamplingParams
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

STRETCH = 2048  # number of prompts that are answered together; their answers are saved before the next prompts start
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # sampling settings for which null means the model's own value
Progress = Callable[[int, int], None]
_slug = partial(re.compile(r"\W+").sub, "_")


class SampleConfig(BadRowsConfig, SeededConfig):
    answers: int = Field(8, ge=1, le=1024, description="Number of answers from each model to each prompt")
    temperature: float | None = Field(None, ge=0, le=10, description="Sampling temperature; 0: greedy decoding; null: the model's, or 1")
    top_p: float | None = Field(None, gt=0, le=1, description="Top-p: total probability of the sampled tokens; null: the model's, or 1")
    top_k: int | None = Field(None, ge=0, description="Top-k: number of likeliest tokens to sample from, 0: all; null: the model's, or all")
    min_p: float | None = Field(None, ge=0, le=1, description="Min-p: minimum probability relative to the likeliest; null: model's, or 0")
    repetition_penalty: float | None = Field(None, gt=0, le=10, description="Penalty for repeated tokens; null: the model's, or 1")
    max_tokens: int = Field(64, ge=1, description="Maximum tokens of an answer, including its end token")
    split: Literal["train", "heldout"] = Field("train", description="Split of the prompts to answer")
    serving: ServingSettings = Field(ServingSettings(), description="Settings of the inference engine")
    endpoints: tuple[EndpointConfig, ...] = Field((), description="Remote models that also answer, without token ids and log-probabilities")
    draft_weights: Weights = Field("same", description="Weights of the draft model: as stored, or in 8 bits (a model may be its own draft)")
    scoring: ScoringConfig = Field(ScoringConfig(), description="Limits on the verifiers that score the answers")

    @model_validator(mode="after")
    def _draws_with_these(self) -> Self:
        return self if self.temperature != 0 else self.refuse_unused("temperature is 0", "top_p", "top_k", "min_p")


def needs(config: SampleConfig, facts: Facts) -> list[str]:
    """Return a message for each missing model, chat template, API key or package, and for each setting that conflicts with the draft."""
    drafted = config.serving.engine == "vllm" and "draft" in facts.inputs
    refused = ["draft: engine=vllm takes no draft model; leave the draft out"] if drafted else []
    if config.serving.window is not None and "draft" in facts.inputs:
        refused.append("serving.window: a draft needs the whole context; leave out the draft or the window")
    if config.draft_weights != "same" and "draft" not in facts.inputs:
        refused.append("draft_weights is set, but there is no draft; give one with --input draft=…, or leave draft_weights out")
    if not config.endpoints and "models" not in facts.inputs:
        refused.append("models: no model was given; give one with --input models=…, or set endpoints")
    refused += [line for endpoint in config.endpoints for line in endpoint.unmet("endpoints")]
    refused += serving_fits(facts, config.serving.layout, "models")
    return [*chat_template(facts, "models"), *config.serving.unmet("serving"), *config.scoring.unmet("scoring"), *refused]


@stage(kind="answers", device=True, ranks=True, needs=needs, named=verifiers_named)
def sample(
    models: list[Model] | None, prompts: Prompts, judges: list[Model] | None, draft: Model | None, config: SampleConfig, run: StageRun
) -> None:
    """Draw K answers per prompt from each model, with log-probabilities and gold scores (Llama 3, section 4.2.2).

    An answer has no gold score if its prompt has no verifier, or if the verifier failed; the metric `unscored_answers` counts failures.
    Truncated answers are scored like others, but count as wrong in the metrics. `judges` are models that verifiers refer to. `draft` is a
    smaller model with the same tokenizer, for speculative decoding; it does not change the distribution of answers.

    A model's own sampling parameters come from its imported generation_config.json. Metrics record the parameters used, by name and model
    (`temperature_DIGEST`). Prompts that a model's chat template rejects, or that exceed its context with an answer of `max_tokens` (unless
    `serving.window` is set), are in `dropped`; see `bad_rows`.

    Rows name a model by its data digest, which also seeds its sampling, so answers depend on a model's content but not on how it was made
    or on its position in `models`. `endpoints` are named by model and host; the side table `exchanges` has requests and replies. Prompts
    that an endpoint refuses are in `dropped` (`refused`). Raise PunaError if no model is given, no prompt is usable, or a model repeats."""
    from puna.models.formats.checkpoint import read_config

    models = models or []
    if not models and not config.endpoints:
        raise PunaError("sample: there is nothing to sample from; give models or endpoints")
    if len({_slug(endpoint.name) for endpoint in config.endpoints}) < len(config.endpoints):
        raise PunaError("sample: two endpoints have names with the same letters and digits; rename one")
    rows = [row for row in prompts.read().to_pylist() if row["split"] == config.split]
    if not rows:
        raise PunaError(f"{prompts.id} has no prompts of the split {config.split!r}; choose another split or other prompts")
    if len({model.data_digest for model in models}) < len(models):
        raise PunaError("sample: the same model is given twice; give each model once")
    scorer = Scorer(rows, config.scoring, run, judges or ())
    bad, spent, windowed = BadRows(config, "sample"), Counter[str](), config.serving.window is not None
    for number, model in enumerate(models):
        within = context_limit(read_config(model.path()), config.max_tokens)
        ids_of = partial(prompt_ids, tokenizer_of(model))
        questions = bad.examples(rows, ids_of, lambda ids: 0 if windowed else len(ids) + config.max_tokens, within)
        bad.check_left(len(questions), f"{len(rows)} prompts")
        spent.update(_answer(model, questions, scorer, config, run, number, len(models), draft))
    for endpoint in config.endpoints:
        spent.update(_ask(Endpoint(endpoint, run), rows, scorer, bad, config, run))
    bad.write(run)
    scorer.report(spent["unscored"])
    if config.endpoints and config.scoring.endpoint is None:  # requests of all endpoints; a scorer with one has already written it
        Endpoint(config.endpoints[0], run).write()
    run.metric("checker_calls", spent["checker_calls"])
    if not config.endpoints:  # endpoints return no token ids
        run.metric("sampled_tokens", spent["sampled_tokens"])
    run.metric("prompts", len(rows))


Asked = tuple[dict[str, Any], list[int]]  # a row of the prompts table, and the token ids of its prompt


def _answer(
    artifact: Artifact, asked: Sequence[Asked], scorer: Scorer, config: SampleConfig, run: StageRun, number: int, models: int,
    draft: Artifact | None,
) -> Counter[str]:  # fmt: skip
    """Write a model's answers, `STRETCH` prompts at a time. Return counts of checked and unscored answers, and of sampled tokens."""
    spent: Counter[str] = Counter()
    total = len(asked) * config.answers
    params = _params(tokenizer_of(artifact), config, artifact.data_digest, run, guesses(config.serving.speculate, draft))
    right = scored = finished = 0
    smaller = cache(lambda: None if draft is None else load_model(draft, "lm", frozen=True))

    @cache
    def load() -> tuple[Transformer, Tokenizer, dict[str, Any]]:
        work = Work(max(len(ids) for _, ids in asked), config.max_tokens, min(STRETCH, len(asked)) * config.answers)
        before = smaller()
        return load_served(artifact, config.serving, work, run, draft=None if before is None else before[0])

    @cache
    def by_vllm() -> AnswerEngine:
        return vllm_engine(artifact.path(), tokenizer_of(artifact), config.serving)

    def engine() -> AnswerEngine:
        try:
            if config.serving.engine == "vllm":
                return by_vllm()
            model, tokenizer, limits = load()
            return engine_of(model, tokenizer, config.serving.weights, smaller(), draft_weights=config.draft_weights, **limits)
        except ValueError as error:
            raise PunaError(f"sample: {artifact.id}: {error}") from error

    for start in range(0, len(asked), STRETCH):
        before = number * total + start * config.answers

        def progress(done: int, _: int, before: int = before) -> None:
            run.progress(before + done, models * total, f"model {number + 1} of {models}")

        def make(stretch: Sequence[Asked] = asked[start : start + STRETCH], progress: Progress = progress) -> list[dict[str, Any]]:
            return _generate(artifact.data_digest, DealtEngine(engine(), config.serving.layout), stretch, scorer, params, run, progress)

        answers = run.once(f"{artifact.data_digest}-{start:09d}", make, ["gold", "finished", "tokens"])
        spent["sampled_tokens"] += pc.sum(pc.list_value_length(answers["tokens"])).as_py() or 0
        gold, whole = answers["gold"].to_pylist(), answers["finished"].to_pylist()
        right += sum(map(is_correct, map(score_ending, gold, whole)))
        scored += len(answers) - answers["gold"].null_count
        finished += sum(whole)
    spent["checker_calls"] = checked = sum(row["verifier"] is not None for row, _ in asked) * config.answers
    spent["unscored"] = checked - scored
    if scored:
        run.metric(f"accuracy_{artifact.data_digest[:12]}", right / scored)
    run.metric(f"finished_{artifact.data_digest[:12]}", finished / total)
    return spent


def _ask(
    endpoint: Endpoint, rows: Sequence[dict[str, Any]], scorer: Scorer, bad: BadRows, config: SampleConfig, run: StageRun
) -> Counter[str]:
    """Write an endpoint's answers. Return counts of checked and unscored ones. Raise PunaError if it fails or refuses every prompt."""
    from puna.models.generation import Completion

    name, slug = endpoint.config.name, _slug(endpoint.config.name)
    options = {key: getattr(config, key) for key in SAMPLING}
    answered = replies_of(endpoint, rows, bad, config.answers, {**options, "max_tokens": config.max_tokens}, run.seed("sample", name))
    bad.check_left(len(answered), f"{len(rows)} prompts")
    gold: list[float | None] = []
    for start in range(0, len(answered), STRETCH):
        drawn = [(row, i, reply) for row, some in answered[start : start + STRETCH] for i, reply in enumerate(some)]

        def make(drawn: list[tuple[dict[str, Any], int, Reply]] = drawn) -> list[dict[str, Any]]:
            scores = scorer.scores([(row, reply.final) for row, _, reply in drawn])
            return [
                _answer_row(row, name, index, Completion([], [], reply.finished), reply.final, score)
                for (row, index, reply), score in zip(drawn, scores, strict=True)
            ]

        answers = run.once(f"{slug}-{start:09d}", make, ["gold", "finished"])
        gold += map(score_ending, answers["gold"].to_pylist(), answers["finished"].to_pylist())
    if scored := [value for value in gold if value is not None]:
        run.metric(f"accuracy_{slug}", sum(map(is_correct, scored)) / len(scored))
    run.metric(f"finished_{slug}", sum(reply.finished for _, some in answered for reply in some) / (len(answered) * config.answers))
    checked = sum(row["verifier"] is not None for row, _ in answered) * config.answers
    return Counter(checker_calls=checked, unscored=checked - len(scored))


def replies_of(
    endpoint: Endpoint, rows: Sequence[dict[str, Any]], bad: BadRows, count: int, fields: dict[str, Any], seed: int
) -> list[tuple[dict[str, Any], list[Reply]]]:
    """Return (row, `count` replies) for each prompt. Refused prompts go to `bad`. `fields`: extra fields of every request."""
    requests = list(bad.render(rows, lambda row: {"messages": messages_of(row), "tools": tools_of(row)}))
    each = iter(endpoint.ask([{**body, **fields, "seed": seed % 2**31 + i} for _, body in requests for i in range(count)]))
    answered = []
    for row, _ in requests:
        replies = [next(each) for _ in range(count)]
        if refused := next((reply.refused for reply in replies if reply.refused), ""):
            bad.drop(row, "refused", f"row {row['id']}: {endpoint.config.name} refused it: {refused}")
        else:
            answered.append((row, replies))
    return answered


def _params(tokenizer: Tokenizer, config: SampleConfig, name: str, run: StageRun, speculate: int) -> SamplingParams:
    """Return a model's sampling parameters: the configured values, or else the model's own. They are recorded as metrics."""
    from puna.models.generation import SamplingParams

    options = {key: value for key in SAMPLING if (value := getattr(config, key)) is not None}
    setup = {"temperature": 1.0, **tokenizer.sampling, **options}
    for key, value in setup.items():
        run.metric(f"{key}_{name[:12]}", value)
    return SamplingParams(
        n=config.answers, max_tokens=config.max_tokens, stop=tokenizer.stop_ids, seed=run.seed("sample", name), speculate=speculate, **setup
    )


def _generate(
    name: str, engine: AnswerEngine, asked: Sequence[Asked], scorer: Scorer, params: SamplingParams, run: StageRun, progress: Progress
) -> list[dict[str, Any]]:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    completions = engine.generate([ids for _, ids in asked], params, progress)
    if ranks.follows():
        return []
    answers = [
        (row, index, completion, answer_text(completion.tokens, tokenizer))
        for (row, _), answer in zip(asked, completions, strict=True) for index, completion in enumerate(answer)
    ]  # fmt: skip
    scores = scorer.scores([(row, text) for row, _, _, text in answers])
    return [_answer_row(row, name, index, answer, text, score) for (row, index, answer, text), score in zip(answers, scores, strict=True)]


def _answer_row(prompt: dict[str, Any], model: str, index: int, completion: Completion, text: str, score: Score) -> dict[str, Any]:
    return {
        "id": identifier(prompt["id"], model, index), "prompt_id": prompt["id"], "sample": index, "model": model, "text": text,
        "tokens": list(completion.tokens), "logprobs": list(completion.logprobs), "finished": bool(completion.finished), "score": None,
        "gold": score.value, "detail": score.detail or None,
    }  # fmt: skip


def read_answers(
    answers: Artifact, prompts: Artifact, learned: bool = True
) -> tuple[dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Return id → prompt, and prompt id → answers without their token ids. `learned`: the answers become training data.

    Raise PunaError if there are no answers, if an answer's prompt is missing from `prompts`, or if `learned` and a prompt is held out."""
    columns = ["id", "prompt_id", "model", "sample", "text", "finished", "gold"]
    if not answers.rows():
        raise PunaError(f"{answers.id} has no answers; sample some first")
    questions = {row["id"]: row for row in prompts.read().to_pylist()}
    answers_of: dict[str, list[dict[str, Any]]] = {}
    for answer in answers.read(columns=columns).to_pylist():
        if answer["prompt_id"] not in questions:
            raise PunaError(f"answer {answer['id']}: its prompt {answer['prompt_id']} is not in {prompts.id}")
        answers_of.setdefault(answer["prompt_id"], []).append(answer)
    if learned and (heldout := sorted(id_ for id_ in answers_of if questions[id_]["split"] == "heldout")):
        raise PunaError(f"{answers.id} answers {len(heldout)} held-out prompts, for example {heldout[0]}; they must not be trained on")
    return questions, answers_of
