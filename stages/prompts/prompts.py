"""Verifiable prompts from procedural generators, Puna's own and reasoning-gym's, split by structure or by question."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from fractions import Fraction
from random import Random
from typing import Any

from pydantic import Field, JsonValue, model_validator

from puna.stages.contract import SeededConfig, StageConfig, StageRun, stage
from puna.stages.conversations import asking
from puna.stages.draws import hash_of, identifier
from puna.stages.prompts import tasks
from puna.stages.prompts.tasks import Drawn
from puna.stages.verifiers.reasoning_gym import generator
from puna.stages.verifiers.registry import to_text
from puna.storage import PunaError

ALONE = "question: "  # prefix of a structure that only one question has


class Task(StageConfig):
    """A generator of questions, with its parameters."""

    task: str = Field(min_length=1, description="Generator: digits, sentence, scene, record, or one of reasoning-gym's")
    name: str = Field("", description="Name of the task in tables and reports; empty: the generator's name")
    parameters: dict[str, JsonValue] = Field(default_factory=dict, description="Parameters of the generator; others keep their defaults")
    gold: bool = Field(True, description="Write the task's gold answers; false: its questions only have verifiers")


class PromptsConfig(SeededConfig):
    tasks: tuple[Task, ...] = Field(description="Generators; each gives the same number of questions", min_length=1)
    train: int = Field(400, ge=0, description="Number of training questions per task")
    heldout: int = Field(100, ge=0, description="Number of held-out questions per task; they do not depend on `train` and `skip`")
    skip: int = Field(0, ge=0, description="Number of training questions per task to skip, so that rounds get disjoint questions")
    draws: int = Field(10_000, ge=1, description="Number of draws per generator; prompts are chosen among the distinct questions drawn")
    heldout_fraction: float = Field(0.2, gt=0, lt=1, description="Fraction of structures (reasoning-gym: of questions) that are held out")
    references: bool = Field(True, description="Write the gold answers; false: prompts only have verifiers")

    @model_validator(mode="after")
    def _asks_for_something(self) -> PromptsConfig:
        if self.train + self.heldout == 0:
            raise ValueError("train and heldout are both 0; set one of them above 0")
        return self


@stage(kind="prompts")
def prompts(config: PromptsConfig, run: StageRun) -> None:
    """Generate questions with gold answers by procedural generators; each question has its generator's verifier.

    No question occurs twice, over all tasks. Questions are ordered by a hash of their text, so rounds with equal settings that `skip` the
    training questions of earlier rounds get disjoint random samples. Questions of Puna's generators have a structure: no training question
    has a held-out structure. Questions of reasoning-gym have none; a hash of the question decides if it is held out. Raise PunaError if a
    task has too few distinct questions."""
    texts: set[str] = set()
    for number, task in enumerate(config.tasks):
        run.write_rows(questions(task, config, run.seed("generator", number), texts))
        run.progress(number + 1, len(config.tasks), task.task)
    for split, count in (("train", config.train), ("heldout", config.heldout)):
        run.metric(f"{split}_prompts", count * len(config.tasks))


def questions(task: Task, config: PromptsConfig, seed: int, taken: set[str]) -> list[dict[str, Any]]:
    """Return one task's rows of the prompts table, without questions in `taken`; add all draws to `taken`. Raise PunaError if too few."""
    pool: dict[str, Drawn] = {}
    for draw in draw_questions(task, config.draws, seed):
        pool.setdefault(draw.question, draw)
    fresh = sorted(set(pool) - taken, key=lambda question: hash_of(config.seed, question))
    taken.update(fresh)
    heldout_structures = _held_out({pool[question].structure for question in fresh}, config)
    sides: dict[str, list[str]] = {"heldout": [], "train": []}
    for question in fresh:
        sides["heldout" if pool[question].structure in heldout_structures else "train"].append(question)
    ranges = {"heldout": (0, config.heldout), "train": (config.skip, config.skip + config.train)}
    for split, (_, stop) in ranges.items():
        if stop > len(sides[split]):
            raise PunaError(
                f"task {task.task}: {config.draws} draws with the parameters {json.dumps(task.parameters, sort_keys=True)} give "
                f"{len(fresh)} different questions, {len(sides['train'])} to train on and {len(sides['heldout'])} held out; "
                f"{stop} {split} questions are needed: draw more, widen the parameters or ask for fewer"
            )
    return [
        {
            "id": identifier(question), "task": task.name or task.task, "split": split, "messages": asking(question), "tools": None,
            "reference": pool[question].answer if config.references and task.gold else None, "verifier": verifier_text(pool[question]),
        }
        for split, (start, stop) in ranges.items()
        for question in sides[split][start:stop]
    ]


def _held_out(structures: set[str], config: PromptsConfig) -> set[str]:
    """Return the held-out structures: the share `heldout_fraction` of all, at least one, with the smallest hashes.

    If each question has its own structure, each one's hash decides with this probability, regardless of the others."""
    if all(structure.startswith(ALONE) for structure in structures):
        return {one for one in structures if hash_of(config.seed, one.removeprefix(ALONE)) < config.heldout_fraction * 2**64}
    count = max(1, round(config.heldout_fraction * len(structures)))
    return set(sorted(structures, key=lambda one: hash_of(config.seed, one))[:count])


def draw_questions(task: Task, count: int, seed: int, apart: int = 1) -> Iterator[Drawn]:
    """Yield the questions of `count` draws, skipping draws that divide by 0. reasoning-gym seeds draw i with seed + i · `apart`.
    Raise PunaError for the task codeio, which would run programs outside the sandbox."""
    own = tasks.of(task.task, task.parameters)
    if own is not None:
        random = Random(seed)
        yield from (own.draw(random) for _ in range(count))
        return
    if task.task == "codeio":
        raise PunaError("task codeio runs the programs of its data set in this process, where they can write files; choose another task")
    parameters = json.dumps(task.parameters, sort_keys=True)
    # Python's generator takes any integer, but one task seeds numpy, which takes 32 bits.
    dataset = copy.copy(generator(task.task, parameters, seed=seed if apart == 1 else seed % 2**32, size=count))
    for draw in range(count):
        if apart != 1:
            dataset.seed = (seed + draw * apart) % 2**32 - draw  # the generator adds `draw` again
        entry = _draw_entry(dataset, draw, task, parameters)
        if entry is not None:
            question = str(entry["question"])
            verifier = {"name": "reasoning_gym", "generator": task.task, "parameters": task.parameters, "entry": entry}
            yield Drawn(question, str(entry["answer"]), verifier, ALONE + question)


def _draw_entry(dataset: Any, index: int, task: Task, parameters: str) -> dict[str, Any] | None:
    try:
        entry: dict[str, Any] = dataset[index]
    except ZeroDivisionError:
        return None
    except (AssertionError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        # Some generators check their parameters only when drawing.
        raise PunaError(f"task {task.task}: drawing with the parameters {parameters} failed: {error!r}") from error
    if entry["answer"] is None:
        raise PunaError(f"task {task.task} gives no reference answers; choose another task")
    try:
        # Tuples become lists, which the scorers accept; fractions become text, which no scorer reads.
        as_json: dict[str, Any] = json.loads(json.dumps(entry, default=_fraction))
        return as_json
    except TypeError as error:
        raise PunaError(f"task {task.task}: its entries hold values that JSON cannot hold ({error}); choose another task") from error


def _fraction(value: object) -> str:
    if isinstance(value, Fraction):
        return str(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def verifier_text(drawn: Drawn) -> str:
    return to_text(drawn.verifier["name"], **{key: value for key, value in drawn.verifier.items() if key != "name"})
