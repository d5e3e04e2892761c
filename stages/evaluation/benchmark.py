"""Benchmarks from task files of lm-evaluation-harness, following its conventions, on Puna's engine."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import stdev
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from puna.models.memory import Work
from puna.models.serving import ServingSettings, engine_of, quantize_for
from puna.stages.contract import Evaluation, External, Model, Prompts, SeededConfig, StageRun, stage
from puna.stages.conversations import as_text, messages_of
from puna.stages.draws import identifier
from puna.stages.endpoint import Endpoint
from puna.stages.evaluation import question_scores
from puna.stages.evaluation.calibration import calibration_error
from puna.stages.evaluation.likelihood import Encoder, Likelihood, Request, likelihoods
from puna.stages.evaluation.question_scores import OVERLAP, Asker, Column, Options, PromptFormat, cut, has_letters
from puna.stages.evaluation.task_file import LOWER, Document, Generation, Task, TaskFile, load_task, task_files
from puna.stages.evaluation.task_programs import texts_of
from puna.stages.executors import ranks
from puna.stages.training import intervals
from puna.stages.training.needs import serving_fits
from puna.stages.training.serving import DealtEngine, load_served
from puna.stages.training.train import heldout_prompts
from puna.stages.verifiers.base import ScoringConfig, score_ending
from puna.stages.verifiers.registry import kind_of
from puna.stages.verifiers.scoring import Scorer, verifiers_named
from puna.storage import Artifact, PunaError, errors_at

if TYPE_CHECKING:
    from puna.models.generation import AnswerEngine, Completion
    from puna.models.transformer import Transformer

RESULTS = "results.json"  # file of an evaluation with its results in lm-evaluation-harness's format


class BenchmarkConfig(SeededConfig):
    limit: int | None = Field(None, ge=1, description="Maximum number of questions per task, taken from the beginning; null: all")
    shots: int | None = Field(None, ge=0, le=1000, description="Number of few-shot examples per question; null: the task file's")
    prompts: PromptFormat = Field("plain", description="plain: unchanged text, for base models; chat: one message of the chat template")
    options: Literal["task", "letters", "best"] = Field("task", description="Multiple choice as cloze (task), letters, or the better")
    answers: int | None = Field(None, ge=1, le=1000, description="Number of answers to each question; null: the task file's repeats")
    temperature: float | None = Field(None, ge=0, le=10, description="Sampling temperature of answers; null: the task file's")
    max_tokens: int = Field(256, ge=1, description="Maximum tokens of an answer to the input `prompts`; task files have their own")
    examples: int = Field(100, ge=0, description="Maximum number of questions per task to show in `examples`, with their answers")
    micro_batch_tokens: int = Field(8192, ge=16, description="Maximum tokens per forward pass")
    scoring: ScoringConfig = Field(ScoringConfig(), description="Limits on the verifiers that score answers")
    serving: ServingSettings = Field(ServingSettings(), description="Settings of the inference engine, which must be Puna's")

    @field_validator("serving")
    @classmethod
    def _own_engine(cls, serving: ServingSettings) -> ServingSettings:
        if serving.engine != "puna":
            raise ValueError(f"engine {serving.engine}: only Puna's engine computes likelihoods; set it to puna")
        if serving.layout.pipeline > 1:
            raise ValueError(f"layout {serving.layout}: pipeline stages can generate but not compute likelihoods; set it to data or tensor")
        return serving


@dataclass
class Result:
    """Measurements on a task's questions `ids`. `about`: version, content, shots, format. `settings`: task file. `seconds`: CPU time."""

    name: str
    about: dict[str, Any]
    ids: Sequence[str]
    columns: list[Column]
    examples: list[dict[str, Any]]
    seconds: float
    tokens: int
    settings: dict[str, Any]

    @staticmethod
    def of(task: Task, name: str, format: str, columns: list[Column], examples: list[Any], started: float, tokens: int) -> Result:
        """Return the result of a task. `started`: the process's CPU seconds when the task began."""
        spec = task.file
        about = {"version": str(spec.metadata.get("version", "")), "content": task.digest, "shots": spec.num_fewshot, "format": format}
        settings = spec.model_dump(mode="json", exclude_defaults=True)
        ids = [document.id for document in task.documents]
        return Result(name, about, ids, columns, examples, time.process_time() - started, tokens, settings)


def verifiers_of_tasks(inputs: Mapping[str, Sequence[Artifact | External]]) -> list[tuple[str, str]]:
    names: set[str] = set()
    for external in inputs["tasks"] or ():
        assert isinstance(external, External)
        for own in [spec.verifier for _, spec in task_files(external)]:
            names.update([own] if isinstance(own, str) else [name for path, name in texts_of(own) if path[-1] == "name"])
    symbols = verifiers_named(inputs) if inputs.get("prompts") else []
    return sorted({*symbols, *(symbol for name in names for symbol in kind_of(name).of_class())})


@stage(
    kind="evaluation", ranks=True, needs=lambda config, facts: serving_fits(facts, config.serving.layout, "model"), named=verifiers_of_tasks
)
def benchmark(
    model: Model, tasks: list[External] | None, prompts: list[Prompts] | None, judges: list[Model] | None, overlaps: Evaluation | None,
    config: BenchmarkConfig, run: StageRun,
) -> None:  # fmt: skip
    """Score a model on task files in lm-evaluation-harness's YAML format, over local data, with 95 % intervals.

    `tasks`: task files and their data. `prompts`: their held-out prompts are tasks, too; each prompt's verifier scores its answers.
    Multiple choice: context and option are encoded together. `acc_norm` divides likelihoods by characters, `acc_bytes` by bytes. Whole
    texts: `word_perplexity`, `byte_perplexity` and `bits_per_byte`; the BOS token is scored after a prefix, as in the harness. Answers:
    `exact_match` after each filter; `verified` if the task file has a `verifier`; with several answers, `pass@k` and `majority@n`.
    Verifiers count truncated answers as wrong. `judges`: models that a verifier may refer to.

    `task_scores` has each metric with version, shots, format, seed and cost, and for multiple choice the expected calibration error. With
    `overlaps`, from `contamination` of these tasks, it also has the share of contaminated questions, and the metric without them. `scores`
    has the scores of each question, for comparing models. results.json has the results in the harness's format."""
    loaded = [load_task(one, file, spec, config.limit, config.shots) for one in tasks or () for file, spec in task_files(one)]
    if prompts and config.shots:
        raise PunaError(f"benchmark: {prompts[0].id} has no few-shot examples; leave shots out, or give a task file")
    loaded += [task for one in prompts or () for task in prompt_tasks(one, config.max_tokens, config.limit)]
    if not loaded:
        raise PunaError("benchmark: there are no questions; give tasks or prompts")
    check_names(loaded)
    bench = Bench.of(model, scorers_of(loaded, judges or (), config.scoring, run), config, run)
    results: list[Result] = []
    for number, task in enumerate(loaded):
        run.progress(number, len(loaded), task.name)
        results += bench.measure(task)
    if config.scoring.endpoint is not None:
        Endpoint(config.scoring.endpoint, run).write()
    write(results, config, run, overlaps)


def format_of(task: Task, prompts: PromptFormat, options: Options = "cloze") -> str:
    return prompts if task.file.output_type != "multiple_choice" or has_letters(task) else f"{prompts}, {options}"


def room_of(how: Generation, longest: int, where: str) -> int:
    """Return the number of tokens left for a question in a context of `longest` tokens. Raise PunaError with `where` if there are none."""
    if (room := longest - how.max_gen_toks) < 1:
        raise PunaError(f"{where}: max_gen_toks {how.max_gen_toks} leaves no room for a question in a context of {longest} tokens")
    return room


def check_names(tasks: Sequence[Task]) -> None:
    places: dict[str, str] = {}
    for task in tasks:
        if task.name in places:
            raise PunaError(f"{task.where} and {places[task.name]} are both named {task.name!r}; rename one (`task:`)")
        places[task.name] = task.where


def prompt_tasks(prompts: Artifact, longest: int, limit: int | None = None) -> list[Task]:
    """Return an artifact's held-out prompts as tasks, each with its first `limit` prompts by id. `longest`: maximum tokens of an answer."""
    tasks = []
    for name, rows in sorted(heldout_prompts(prompts).items()):
        rows = sorted(rows, key=lambda row: str(row["id"]))[:limit]
        spec = TaskFile.model_construct(
            task=name, dataset_path="parquet", dataset_kwargs={"data_files": prompts.id}, test_split="heldout", doc_to_target="reference",
            generation_kwargs=Generation(until=(), max_gen_toks=longest), verifier="verifier",
        )  # fmt: skip
        documents = tuple(Document(row["id"], row, as_text(messages_of(row)), row["reference"], ()) for row in rows)
        digest = identifier("prompts", prompts.data_digest, name)
        tasks.append(Task(spec, f"{prompts.id}, task {name}", digest, documents, (), tuple(row["verifier"] for row in rows), True))
    return tasks


def scorers_of(tasks: Sequence[Task], judges: Sequence[Artifact], config: ScoringConfig, run: StageRun) -> dict[str, Scorer]:
    """Return the scorer of each task that has a verifier. Raise PunaError, with the task's file, if a scorer cannot be made."""
    scorers = {}
    for task in tasks:
        if task.file.verifier is not None:
            with errors_at(task.where, PunaError):
                scorers[task.name] = Scorer(task.prompt_rows(), config, run, judges, needed="verifier")
    return scorers


@dataclass
class Bench:
    """A loaded model with the settings for evaluating tasks."""

    model: Transformer
    engine: AnswerEngine
    encoder: Encoder
    scorers: Mapping[str, Scorer]
    config: BenchmarkConfig
    run: StageRun

    @staticmethod
    def of(model: Artifact, scorers: Mapping[str, Scorer], config: BenchmarkConfig, run: StageRun) -> Bench:
        network, tokenizer, limits = load_served(model, config.serving, Work(), run, config.micro_batch_tokens)
        with errors_at(f"{run.stage}: {model.id}", ValueError):
            quantize_for(network, config.serving.weights)
        engine = DealtEngine(engine_of(network, tokenizer, **limits), config.serving.layout)
        return Bench(network, engine, Encoder(tokenizer), scorers, config, run)

    @property
    def longest(self) -> int:
        return self.model.config.max_position_embeddings

    def measure(self, task: Task) -> Iterator[Result]:
        """Yield a task's result. With `options: best`, multiple choice yields the better format's result, then both formats' results."""
        kind, mode = task.file.output_type, self.config.options
        if kind != "multiple_choice":
            yield self._texts(task) if kind == "loglikelihood_rolling" else self._answers(task)
        elif has_letters(task) or mode == "task":
            yield self._choices(task, "cloze", task.name)
        elif mode == "letters":
            yield self._choices(task, "letters", task.name)
        else:
            formats: tuple[Options, ...] = ("cloze", "letters")
            both = [self._choices(task, options, f"{task.name}:{options}") for options in formats]
            best = max(both, key=lambda result: result.columns[0].interval().value)
            yield replace(best, name=task.name, examples=[], seconds=sum(one.seconds for one in both))
            yield from both

    def _choices(self, task: Task, options: Options, name: str) -> Result:
        start_time = time.process_time()
        asker = Asker(self.encoder, self.config.prompts, options)
        requests = [asker.requests(task, document) for document in task.documents]
        flat = [request for several in requests for request in several]
        scored = iter(self._likelihoods(flat, task))
        grouped = [[next(scored) for _ in several] for several in requests]
        columns = question_scores.choice_columns(task, asker, grouped)
        pairs = list(zip(task.documents, grouped, strict=True))[: self.config.examples]
        nats = [{choice: round(one.sum, 4) for choice, one in zip(asker.choices(document), own, strict=True)} for document, own in pairs]
        examples = self._examples(name, task, asker, columns, [max(own, key=lambda choice: own[choice]) for own in nats], nats=nats)
        tokens = sum(len(one.context) + len(one.continuation) for one in flat)
        return Result.of(task, name, format_of(task, self.config.prompts, options), columns, examples, start_time, tokens)

    def _likelihoods(self, requests: Sequence[Request], task: Task) -> list[Likelihood]:
        with errors_at(task.where, PunaError):
            tracker = functools.partial(self.run.progress, note=task.name)
            size = self.config.micro_batch_tokens
            score = functools.partial(likelihoods, self.model, longest=self.longest, micro_batch_tokens=size, progress=tracker)
            dealt = ranks.dealt(requests, score, self.config.serving.layout, lambda request: tuple(request.context))
            return [Likelihood(*one) for one in dealt]

    def _texts(self, task: Task) -> Result:
        start_time = time.process_time()
        texts = [str(document.target) for document in task.documents]
        windows = [self.encoder.document(text, self.longest) for text in texts]
        scored = iter(self._likelihoods([one for several in windows for one in several], task))
        nats = [-sum(next(scored).sum for _ in several) for several in windows]
        columns = question_scores.document_columns(task, texts, nats)
        tokens = sum(len(one.continuation) for several in windows for one in several)
        return Result.of(task, task.name, "plain", columns, [], start_time, tokens)

    def _answers(self, task: Task) -> Result:
        start_time = time.process_time()
        asker, own = Asker(self.encoder, self.config.prompts), task.file.generation_kwargs
        n = self.config.answers or task.file.repeats
        temperature = self.config.temperature
        if temperature is None:
            temperature = 0.0 if own.do_sample is False else own.temperature
        if n > 1 and not temperature:
            raise PunaError(f"{task.where}: {n} answers at temperature 0 are all equal; set temperature, here or in generation_kwargs")
        until = (task.file.fewshot_delimiter,) if own.until is None else own.until
        prompts = [asker.prompt(task, document) for document in task.documents]
        completions = self.generate(prompts, own.replace(temperature=temperature, do_sample=None), until, n, task.where)
        if ranks.follows() and self.run.kind == "evaluation":  # only rank 0 scores answers and writes
            return Result.of(task, task.name, self.config.prompts, [], [], start_time, 0)
        tokenizer = self.encoder.tokenizer
        texts = [[cut(one, tokenizer, until) for one in several] for several in completions]
        columns = [] if task.prompted else question_scores.answer_columns(task, texts)
        more: list[list[str]] = [[] for _ in texts]
        if task.file.verifier is not None:
            finished = [[one.finished for one in several] for several in completions]
            scores, more = self._verify(task, texts, finished)
            columns = [*question_scores.verified_columns(scores, texts), *columns]
        examples = self._examples(task.name, task, asker, columns, [several[0] for several in texts], said=more)
        tokens = sum(map(len, prompts)) + sum(len(one.tokens) for several in completions for one in several)
        return Result.of(task, task.name, self.config.prompts, columns, examples, start_time, tokens)

    def _examples(
        self, name: str, task: Task, asker: Asker, columns: Sequence[Column], texts: Sequence[str], **more: Sequence[Any]
    ) -> list[dict[str, Any]]:
        """Return the first questions with their answers as rows of `examples`. `more`: name → one additional value per question."""
        rows = []
        for number, (document, text) in enumerate(zip(task.documents[: self.config.examples], texts, strict=False)):
            facts = {key: values[number] for key, values in more.items()} | {column.name: column.values[number] for column in columns}
            about = json.dumps({"task": name, "target": document.target, **facts}, ensure_ascii=False, default=str)
            prompt = asker.question_text(task, document)
            rows.append({"id": f"{name}-{document.id}", "kind": "answer", "prompt": prompt, "text": text, "detail": about})
        return rows

    def generate(self, prompts: Sequence[list[int]], how: Generation, until: Sequence[str], n: int, where: str) -> list[list[Completion]]:
        """Return `n` answers per prompt. Too long a prompt loses its beginning. Raise PunaError if max_gen_toks fills the context."""
        from puna.models.generation import SamplingParams

        room = room_of(how, self.longest, where)
        sampling, serving = how.do_sample is not False and how.temperature > 0, self.config.serving
        params = SamplingParams(
            n=n, temperature=how.temperature if sampling else 0.0, top_p=how.top_p if sampling else 1.0, top_k=how.top_k if sampling else 0,
            max_tokens=how.max_gen_toks, stop=(*self.encoder.tokenizer.stop_ids, *(text for text in until if text)),
            seed=self.run.seed("answers"), speculate=serving.speculate,
        )  # fmt: skip
        tracker = functools.partial(self.run.progress, note=where)
        return self.engine.generate([ids[-room:] for ids in prompts], params, progress=tracker)

    def _verify(
        self, task: Task, texts: Sequence[Sequence[str]], finished: Sequence[Sequence[bool]]
    ) -> tuple[list[list[float]], list[list[str]]]:
        """Return the verifier's score and detail of each answer. Truncated answers score 0, and so do unscored ones, which are counted."""
        pairs = [(row, text) for row, several in zip(task.prompt_rows(), texts, strict=True) for text in several]
        flat = iter(self.scorers[task.name].scores(pairs))
        scores = [[next(flat) for _ in several] for several in texts]
        self.run.metric(f"unscored_answers_{task.name}", sum(one.value is None for several in scores for one in several))
        values = [
            [score_ending(one.value, whole) or 0.0 for one, whole in zip(several, wholes, strict=True)]
            for several, wholes in zip(scores, finished, strict=True)
        ]
        return values, [[one.detail for one in several] for several in scores]


def write(
    results: Sequence[Result], config: BenchmarkConfig, run: StageRun, overlaps: Artifact | None, layout: dict[str, Any] | None = None
) -> None:
    """Write an evaluation's tables and metrics, and its results in the harness's format (`layout`: the harness's own results)."""
    searched = set() if overlaps is None else {row["task"] for row in overlaps.read().to_pylist()}
    learned = set() if overlaps is None else {row["id"] for row in overlaps.read("scores").to_pylist() if row["name"] == OVERLAP}
    rows: list[dict[str, Any]] = []
    more: list[dict[str, Any]] = []
    single: list[dict[str, Any]] = []
    for one in results:
        is_searched = not searched.isdisjoint((one.name, one.name.rpartition(":")[0]))
        clean = [is_searched and key not in learned for key in one.ids]
        share = 1 - sum(clean) / len(clean) if is_searched else None
        for column in one.columns:
            value = column.interval()
            rest = column.of(clean)
            row = intervals.evaluation_row(one.name, column.name, value, len(one.ids))
            rows.append(row)
            more.append(
                {**row, **one.about, "seed": config.seed, "seconds": one.seconds, "tokens": one.tokens, "contaminated": share,
                 "clean": rest and rest.interval().value, "calibration_error": calibration_error(column.confidences, column.values)}
            )  # fmt: skip
            for kind, values in (("", column.values), (":weight", column.weights), (":confidence", column.confidences)):
                name = f"{one.name}/{column.name}{kind}"
                single += [{"id": key, "name": name, "value": each} for key, each in zip(one.ids, values, strict=False)]
            run.metric(f"{one.name}_{column.name}", value.value)
    run.write_rows(rows)
    run.write_rows(more, "task_scores")
    run.write_rows(single, "scores")
    run.write_rows([example for one in results for example in one.examples], "examples")
    text = json.dumps(layout or harness_layout(results, config), indent=1, ensure_ascii=False, default=str, sort_keys=True)
    (run.folder / RESULTS).write_text(text + "\n", encoding="utf-8")


def harness_layout(results: Sequence[Result], config: BenchmarkConfig) -> dict[str, Any]:
    """Return results in lm-evaluation-harness's format: results, configs, versions, n-shot, n-samples, higher_is_better."""
    scores: dict[str, dict[str, Any]] = {one.name: {"alias": one.name} for one in results}
    for one, column in ((each, column) for each in results for column in each.columns):
        error: float | str = "N/A" if column.weights or len(column.values) < 2 else stdev(column.values) / len(column.values) ** 0.5
        value = column.interval().value
        scores[one.name] |= {f"{column.metric},{column.filter}": value, f"{column.metric}_stderr,{column.filter}": error}
    return {
        "results": scores, "configs": {one.name: one.settings for one in results},
        "versions": {one.name: one.about["version"] for one in results}, "n-shot": {one.name: one.about["shots"] for one in results},
        "n-samples": {one.name: {"effective": len(one.ids)} for one in results},
        "higher_is_better": {one.name: {column.metric: column.metric not in LOWER for column in one.columns} for one in results},
        "config": {"model": "puna", "limit": config.limit, "random_seed": config.seed},
    }  # fmt: skip
