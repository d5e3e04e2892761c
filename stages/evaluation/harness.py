"""Evaluation with lm-evaluation-harness itself, on Puna's engine. The harness is an extra: `pip install 'puna[harness]'`."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from puna.stages.contract import Evaluation, External, ExternalFile, Facts, Model, StageRun, parse, stage
from puna.stages.draws import identifier
from puna.stages.evaluation.benchmark import Bench, BenchmarkConfig, Result, check_names, format_of, write
from puna.stages.evaluation.calibration import confidence
from puna.stages.evaluation.likelihood import Request, likelihoods
from puna.stages.evaluation.question_scores import Column, cut
from puna.stages.evaluation.task_file import Generation, TaskFile, generation, load_task, task_files
from puna.stages.training.intervals import Z95, Interval
from puna.storage import PunaError

SECTIONS = ("results", "configs", "versions", "n-shot", "n-samples", "higher_is_better", "group_subtasks", "groups")
MISSING = "lm-evaluation-harness is not installed: pip install 'puna[harness]', or leave --harness out"


class HarnessConfig(BenchmarkConfig):
    names: tuple[str, ...] = Field((), description="Names of the harness's own tasks, whose data come from the Hugging Face hub")


def needs(config: HarnessConfig, facts: Facts) -> list[str]:
    problems = [] if find_spec("lm_eval") else [MISSING]
    if config.options != "task" or config.answers is not None or config.temperature is not None:
        problems.append("the harness takes options, answers and temperature from the task file; leave them out")
    return problems


@stage(kind="evaluation", needs=needs)
def harness(model: Model, tasks: list[External] | None, overlaps: Evaluation | None, config: HarnessConfig, run: StageRun) -> None:
    """Evaluate a model with lm-evaluation-harness, on task files over local data or on the harness's own tasks by name.

    The harness makes prompts, filters and metrics; Puna's engine computes likelihoods and answers, and computes common prefixes only once.
    The tables are those of `benchmark`, which gives equal numbers for task files that both can read. A task's `verifier` is not run."""
    if problems := needs(config, Facts({}, None)):
        raise PunaError(f"harness: {'; '.join(problems)}")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folder = run.scratch / "tasks"
    folder.mkdir(exist_ok=True)
    own = [load_task(one, file, spec, config.limit, config.shots) for one in tasks or () for file, spec in task_files(one)]
    check_names(own)
    for external in tasks or ():
        for file, spec in task_files(external):
            content = yaml.safe_dump(_content(external, file, spec), allow_unicode=True)
            (folder / f"{spec.task}.yaml").write_text(content, encoding="utf-8")
    bridge = _bridge(Bench.of(model, {}, config, run))
    manager = TaskManager(include_path=str(folder), include_defaults=bool(config.names))
    own_tasks = {task.name: task for task in own}
    results: list[Result] = []
    layout: dict[str, Any] = {section: {} for section in SECTIONS}
    for name in [*own_tasks, *config.names]:
        start_time = time.process_time()
        output = simple_evaluate(
            bridge, tasks=[name], num_fewshot=config.shots, limit=config.limit, bootstrap_iters=0, log_samples=True,
            task_manager=manager, apply_chat_template=config.prompts == "chat",
        )  # fmt: skip
        for section in SECTIONS:
            layout[section] |= output.get(section) or {}
        for task, samples in output["samples"].items():
            results.append(_result(task, samples, output, config, start_time))
            if task in own_tasks:  # equal ids and digest make it comparable with the result of `benchmark`
                results[-1].ids = [document.id for document in own_tasks[task].documents]
                results[-1].about |= {"content": own_tasks[task].digest, "format": format_of(own_tasks[task], config.prompts)}
    layout["config"] = {"model": "puna", "limit": config.limit, "random_seed": config.seed}
    write(results, config, run, overlaps, layout)


def _content(external: External, file: ExternalFile, spec: TaskFile) -> dict[str, Any]:
    """Return a task file's content for the harness: local data paths, no keys of Puna. Raise PunaError for `permuted` or remote data."""
    if spec.permuted:
        raise PunaError(f"{file.location}: the harness does not support `permuted`; remove it, or leave --harness out")
    content = spec.model_dump(mode="json", exclude_defaults=True, exclude_none=True, exclude={"verifier", "permuted"})
    names = {one.name: str(place) for one in external.files if (place := one.local()) is not None}
    base = Path(file.name).parent
    files = {split: [names.get(str(base / name), names.get(name)) for name in several] for split, several in spec.files.items()}
    if None in [place for several in files.values() for place in several]:
        raise PunaError(f"{file.location}: the harness reads only local files; copy the task's data to this machine")
    return {**content, "dataset_kwargs": {"data_files": files}}


def _result(task: str, samples: Sequence[Mapping[str, Any]], output: Any, config: HarnessConfig, started: float) -> Result:
    columns: dict[tuple[str, str], Column] = {}
    settings = output["configs"].get(task, {})
    ids: dict[int, str] = {}
    examples: list[dict[str, Any]] = []
    for sample in samples:
        ids.setdefault(sample["doc_id"], identifier("question", task, sample["doc_hash"], sample["doc_id"]))
        for metric in sample["metrics"]:
            column = columns.setdefault((metric, sample["filter"]), Column(metric, [], sample["filter"]))
            value = sample[metric]
            if isinstance(value, tuple) and len(value) == 2 and metric.endswith(("_perplexity", "bits_per_byte")):
                column.values.append(-value[0])
                column.weights.append(value[1])
            elif isinstance(value, int | float):
                column.values.append(float(value))
                if metric == "acc" and settings.get("output_type") == "multiple_choice":
                    column.confidences.append(confidence([likelihood for likelihood, _ in sample["filtered_resps"]]))
        if len(ids) > len(examples) < config.examples:
            scores = {metric: sample[metric] for metric in sample["metrics"]}
            detail = json.dumps({"task": task, "target": sample["target"], "answers": sample["filtered_resps"], **scores}, default=str)
            prompt, answer = str(sample["arguments"][0][0]), str(sample["resps"][0][0])
            examples.append({"id": f"{task}-{len(ids)}", "kind": "answer", "prompt": prompt, "text": answer, "detail": detail})
    numbers = output["results"][task]
    for (metric, name), column in columns.items():
        value, error = numbers.get(f"{metric},{name}"), numbers.get(f"{metric}_stderr,{name}")
        if len(column.values) != len(ids) and isinstance(value, int | float):
            half = Z95 * error if isinstance(error, int | float) else 0.0
            column.values, column.given = [], Interval(float(value), value - half, value + half)
    version, shots = str(output["versions"].get(task, "")), output["n-shot"].get(task) or 0
    about = {"version": version, "content": "", "shots": shots, "format": config.prompts}
    return Result(task, about, list(ids.values()), list(columns.values()), examples, time.process_time() - started, 0, settings)


def _bridge(bench: Bench) -> Any:
    """Return a model for the harness (a `TemplateLM`) that computes on Puna's engine."""
    from lm_eval.api.model import TemplateLM

    encoder, tokenizer = bench.encoder, bench.encoder.tokenizer

    class Bridge(TemplateLM):
        tokenizer_name = "puna"
        chat = False

        @property
        def eot_token_id(self) -> int:
            return tokenizer.end[0] if tokenizer.end else encoder.prefix

        @property
        def prefix_token_id(self) -> int:
            return encoder.prefix

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
            if add_special_tokens is False:
                return tokenizer.encode(string)
            return encoder.encode_chat(string, None) if self.chat else encoder.encode(string)

        def chat_template(self, chat_template: bool | str = False) -> str:
            self.chat = bool(chat_template)
            return str(tokenizer.template.source) if self.chat and tokenizer.template is not None else ""

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            if tokenizer.template is None:
                raise PunaError("the model has no chat template: leave --chat out")
            return tokenizer.template.render(chat_history, add_generation_prompt=add_generation_prompt)

        def _loglikelihood_tokens(self, requests: Any, **more: Any) -> list[tuple[float, bool]]:
            pairs = [Request(list(context), list(continuation)) for _, context, continuation in requests]
            return [(one.sum, one.greedy) for one in likelihoods(bench.model, pairs, bench.longest, bench.config.micro_batch_tokens)]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            windows = [encoder.document(request.args[0], bench.longest) for request in requests]
            scored = iter(self._loglikelihood_tokens([(None, *one) for several in windows for one in several]))
            return [sum(next(scored)[0] for _ in several) for several in windows]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            texts = [""] * len(requests)
            groups = defaultdict[str, list[int]](list)
            for number, request in enumerate(requests):
                groups[json.dumps(request.args[1], sort_keys=True)].append(number)
            for settings, numbers in groups.items():
                how = parse(Generation, generation(json.loads(settings)), "generation_kwargs")
                prompts = [self.tok_encode(requests[number].args[0]) or [encoder.prefix] for number in numbers]
                completions = bench.generate(prompts, how, how.until or (), 1, "generation_kwargs")
                for number, (answer,) in zip(numbers, completions, strict=True):
                    texts[number] = cut(answer, tokenizer, how.until or ())
            return texts

    return Bridge()
