"""Benchmark tasks on which a model is evaluated during its training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from puna.models.training.settings import ComputeSettings
from puna.stages.contract import External, StageRun
from puna.stages.evaluation.benchmark import Bench, BenchmarkConfig, check_names, room_of, scorers_of, verifiers_of_tasks
from puna.stages.evaluation.comparison import main_metric
from puna.stages.evaluation.likelihood import Encoder, batches
from puna.stages.evaluation.question_scores import Asker
from puna.stages.evaluation.task_file import load_task, task_files
from puna.stages.executors import ranks
from puna.stages.training.train import training_precision
from puna.stages.verifiers.base import ScoringConfig
from puna.storage import Artifact, PunaError, errors_at
from puna.storage.work import write_text

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer


class TaskWatch:
    """Evaluation of a model's main task metrics, every `every` training steps and after the last. Saved scores survive a crash."""

    def __init__(self, tasks: Sequence[External], every: int, tokenizer: Tokenizer, compute: ComputeSettings, run: StageRun) -> None:
        self.tasks = [load_task(one, file, spec) for one in tasks for file, spec in task_files(one)]
        check_names(self.tasks)
        try:
            self.scorers = scorers_of(self.tasks, (), ScoringConfig(), run)
        except PunaError as error:
            remedy = "judges are not available during training; leave the task out, and run it afterwards (`puna evaluate --judge`)"
            raise PunaError(f"{error}; {remedy}" if "`judges`" in str(error) else str(error)) from error
        self.every, self.tokenizer, self.compute, self.run = every, tokenizer, compute, run
        self.file = run.scratch / "task-scores.json"
        self.scores: dict[str, dict[str, float]] = ranks.first(json.loads(self.file.read_text()) if self.file.exists() else {})

    def check(self, longest: int) -> None:
        """Raise PunaError if an option or an answer of the tasks does not fit a context of `longest` tokens."""
        asker = Asker(Encoder(self.tokenizer))
        for task in self.tasks:
            if task.file.output_type == "generate_until":
                room_of(task.file.generation_kwargs, longest, task.where)
            elif task.file.output_type == "multiple_choice":
                with errors_at(task.where, PunaError):
                    next(batches([one for document in task.documents for one in asker.requests(task, document)], longest, longest))

    def due(self, step: int, last: int) -> bool:
        return step % self.every == 0 or step == last

    def ask(self, step: int, model: Transformer) -> None:
        """Evaluate the model after this step and save its scores, unless they were saved before a crash."""
        from puna.models.generation import Engine
        from puna.models.training.parallel.base import whole
        from puna.models.training.trainer import computing_in

        if str(step) in self.scores:
            return
        training = model.training
        model.eval()
        config = BenchmarkConfig(examples=0, micro_batch_tokens=self.compute.micro_batch_tokens)
        with whole(model), computing_in(model, training_precision(self.compute, self.run)):
            bench = Bench(model, Engine(model, self.tokenizer), Encoder(self.tokenizer), self.scorers, config, self.run)
            results = [result for task in self.tasks for result in bench.measure(task)]
        model.train(training)
        columns = {(one.name, column.name): column for one in results for column in one.columns}
        main = [(one.name, main_metric(column.name for column in one.columns)) for one in results]
        self.scores[str(step)] = {f"{task}_{metric}": columns[task, metric].interval().value for task, metric in main}
        write_text(self.file, json.dumps(self.scores))

    def after(self, step: int) -> dict[str, float]:
        """Return a step's scores as columns of its log row, and record them as metrics; empty if the model was not evaluated then."""
        scores = self.scores.get(str(step), {})
        for name, value in scores.items():
            self.run.metric(name, value)
        return scores


def code(tasks: Sequence[Artifact | External]) -> list[tuple[str, str]]:
    return [(__name__, TaskWatch.__name__), *verifiers_of_tasks({"tasks": tasks})]
