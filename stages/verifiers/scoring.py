"""Scores of answers by the prompts' verifiers. Verifiers that do not override `score_many` run in a process with a time limit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import pyarrow.compute as pc

from puna.models import progress
from puna.models.untrusted.bounded_process import CLOCK
from puna.stages.contract import External, StageRun
from puna.stages.conversations import as_text, messages_of
from puna.stages.executors.subprocess_worker import Apart
from puna.stages.verifiers.base import Item, Question, Score, ScoringConfig, Verifier, attempt, check_score, to_json
from puna.stages.verifiers.judges import Tools, chunks
from puna.stages.verifiers.registry import code_of, from_json, from_text
from puna.storage import Artifact, PunaError
from puna.storage.errors import DamagedArtifact

CHUNK = 64  # number of answers sent to a worker at a time


class Child(Apart):
    """A process that scores answers one at a time."""

    def score(self, item: Item, seconds: float) -> Score:
        """Return the score of one answer; its value is None if scoring fails, takes over `seconds` CPU seconds, or ends the process."""
        job = {"verifier": to_json(item.verifier), "question": item.question._asdict(), "answer": item.answer}
        progress.advance(CLOCK * seconds)
        reply = self.ask(job, seconds)
        return Score(None, f"{item.verifier.name}: {reply}") if isinstance(reply, str) else Score(**reply)


@lru_cache(maxsize=1)
def child() -> Child:
    return Child(score_job)


def score_job(job: dict[str, Any]) -> dict[str, Any]:
    return asdict(attempt(Item(from_text(json.dumps(job["verifier"])), Question(**job["question"]), job["answer"])))


def in_children(items: Sequence[Item], tools: Tools) -> list[Score]:
    """Return scores by `Verifier.score`, run in child processes; a score is None after `tools.config.seconds` CPU seconds."""
    jobs = [{"verifier": to_json(i.verifier), "question": tuple(i.question), "answer": i.answer} for i in items]
    scores = (score for chunk in tools.run.map(score_chunk, chunks(jobs, CHUNK), tools.config.seconds) for score in chunk)
    return [check_score(score, item.verifier.name) for score, item in zip(scores, items, strict=True)]


def score_chunk(chunk: list[dict[str, Any]], seconds: float) -> list[Score]:
    return [child().score(Item(from_json(job["verifier"]), Question(*job["question"]), job["answer"]), seconds) for job in chunk]


Row = dict[str, Any]


class Scorer:
    """A scorer of answers to a stage's prompts.

    The constructor raises PunaError if a prompt's verifier is invalid, or needs a model that is not in `judges` or a sandbox that this
    machine lacks. With `needed`, the beginning of the error, it also raises PunaError if a prompt has no verifier."""

    def __init__(
        self, prompts: Sequence[Row], config: ScoringConfig, run: StageRun, judges: Sequence[Artifact] = (), *, needed: str | None = None
    ) -> None:
        self._tools = Tools(config, run, judges)
        self._run = run
        self.failures: tuple[int, str] = 0, ""
        bare = [row["id"] for row in prompts if row["verifier"] is None]
        if needed and bare:
            problem = f"{len(bare)} of {len(prompts)} prompts have no verifier, for example {bare[0]}"
            raise PunaError(f"{needed}: {problem}; give each one, or import them with --verifier")
        verifiers = [_verifier(row) for row in prompts if row["verifier"] is not None]
        kinds: dict[type[Verifier], list[Verifier]] = {}
        for verifier in verifiers:
            for leaf in leaves(verifier):
                kinds.setdefault(type(leaf), []).append(leaf)
        for kind, several in kinds.items():
            kind.prepare(several, self._tools)

    def scores(self, answers: Sequence[tuple[Row, str]]) -> list[Score]:
        """Return a score for each (prompt, answer), in order; for a prompt without a verifier, a score of None."""
        results: list[Score] = [Score(None, "the prompt has no verifier")] * len(answers)
        at = [i for i, (row, _) in enumerate(answers) if row["verifier"] is not None]
        items = [Item(from_text(answers[i][0]["verifier"]), question_of(answers[i][0]), answers[i][1]) for i in at]
        for i, score in zip(at, score_items(items, self._tools), strict=True):
            results[i] = score
            if score.value is None:
                count, first = self.failures
                self.failures = count + 1, first or f"prompt {answers[i][0]['id']}: {score.detail}"
        return results

    def report(self, unscored: int | None = None) -> None:
        """Write the endpoint's exchanges, if any, and as metrics the number of unscored answers and the first reason, if any. `unscored`:
        that number, if a restarted run counts earlier attempts, too; None: the number in this process."""
        count, first = self.failures
        self._run.metric("unscored_answers", count if unscored is None else unscored)
        if self._tools.endpoint is not None:
            self._tools.endpoint.write()
        if first:
            self._run.metric("unscored_example", first[:500])


def verifiers_named(inputs: Mapping[str, Sequence[Artifact | External]]) -> list[tuple[str, str]]:
    """Return the (module, symbol) of verifiers in the input `prompts`; scoring stages declare this function as `named`.

    Raise DamagedArtifact for a damaged input. Invalid verifiers are skipped; a stage that scores with one reports it with its prompt."""
    pairs: set[tuple[str, str]] = set()
    for prompts in inputs["prompts"]:
        assert isinstance(prompts, Artifact)
        if damage := prompts.damage():
            raise DamagedArtifact.of(prompts.id, damage)
        for text in pc.unique(prompts.read(columns=["verifier"])["verifier"]).drop_null().to_pylist():
            with contextlib.suppress(PunaError, ValueError, RecursionError):
                pairs.update(code_of(text))
    return sorted(pairs)


def question_of(row: Row) -> Question:
    """Return the part of a prompt's row that a verifier sees."""
    messages = messages_of(row)
    return Question(row["id"], row["task"], as_text(messages), row["reference"], tuple(messages))


def leaves(verifier: Verifier) -> list[Verifier]:
    """Return the verifiers in a combination that score answers themselves; a verifier without parts is its own leaf."""
    parts = verifier.parts()
    return [leaf for part in parts for leaf in leaves(part)] if parts else [verifier]


def score_items(items: Sequence[Item], tools: Tools) -> list[Score]:
    """Return a score for each item, in order; items of one verifier class are scored together."""
    jobs = [Item(leaf, item.question, item.answer) for item in items for leaf in leaves(item.verifier)]
    kinds: dict[type[Verifier], list[int]] = {}
    for number, job in enumerate(jobs):
        kinds.setdefault(type(job.verifier), []).append(number)
    scores: dict[int, Score] = {}
    for kind, numbers in kinds.items():
        group = [jobs[number] for number in numbers]
        group_scores = kind.score_many(group, tools)
        scores |= zip(numbers, in_children(group, tools) if group_scores is None else group_scores, strict=True)
    queue = iter([scores[number] for number in range(len(jobs))])
    return [combine(item.verifier, lambda: next(queue)) for item in items]


def combine(verifier: Verifier, following: Callable[[], Score]) -> Score:
    """Return a verifier's score from its leaves' scores, which `following` returns one by one; a Score of None if any of them is None."""
    parts = verifier.parts()
    if not parts:
        return following()
    scores = [combine(part, following) for part in parts]
    if missing := [score.detail for score in scores if score.value is None]:
        return Score(None, missing[0])
    score = check_score(verifier.combine(scores), verifier.name)
    return replace(score, steps=next((one.steps for one in (score, *scores) if one.steps), ()))


def _verifier(row: Row) -> Verifier:
    try:
        verifier = from_text(row["verifier"])
        verifier.check(question_of(row))
    except PunaError as error:
        message = str(error)
        raise PunaError(message if message.startswith("prompt ") else f"prompt {row['id']} (task {row['task']}): {message}") from error
    return verifier
