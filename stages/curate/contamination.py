"""Contamination of an evaluation set: which questions occur in a model's training data, and the model's scores without them."""

from __future__ import annotations

import json
from typing import Annotated, Any, NamedTuple

import pyarrow as pa

from puna.stages.contract import Documents, Evaluation, External, Figure, Instructions, Kind, Preferences, Prompts, StageRun, stage
from puna.stages.contract.declaration import Reads
from puna.stages.conversations import as_text, asking, content_of, messages_of, text_of
from puna.stages.curate.decontaminate import DecontaminateConfig, Search, prompts_of_splits, search_for
from puna.stages.evaluation.question_scores import OVERLAP, contents
from puna.stages.evaluation.task_file import load_task, task_files
from puna.stages.training.corpus import chosen_of
from puna.stages.training.intervals import evaluation_row, mean, wilson
from puna.storage import Artifact, Part, PunaError
from puna.storage.manifest import NAME

Trained = Annotated[Artifact, Kind("model"), Reads(("config.json",))]
"""An input model of which only the lineage is read."""
COLUMNS = {
    "documents": ["id", "text"],
    "instructions": ["id", "split", "messages"],
    "preferences": ["id", "split", "messages", "chosen", "rejected", "edited"],
    "prompts": ["id", "split", "messages", "reference"],
}
"""Columns of the tables that models are trained on."""
FOLLOWED = ("model", "tokens")
UNLEARNED = ("judges", "reward_model")  # inputs that only score answers; the model does not learn from their training data


class ContaminationConfig(DecontaminateConfig):
    """Settings of the search for prompts in training data, the same as those of `decontaminate`."""


class Source(NamedTuple):
    """A table that a model was trained on, and the mixture, if any, that selects the table's documents."""

    artifact: Artifact
    mixture: Artifact | None

    @property
    def name(self) -> str:
        """Return the table's kind and data digest, which do not depend on how the table was made."""
        return f"{self.artifact.kind} {self.artifact.data_digest[:12]}"


class Held(NamedTuple):
    """A text that contains a prompt. `share`: of the prompt's n-grams (0 to 1). `place`: the text's id, or `SOURCE, ID`. `text`: the
    passage found, or ""."""

    share: float
    place: str
    text: str


@stage(kind="evaluation")
def contamination(
    prompts: list[Prompts] | None, tasks: list[External] | None, model: Trained | None, documents: list[Documents] | None,
    instructions: list[Instructions] | None, preferences: list[Preferences] | None, evaluation: Evaluation | None,
    config: ContaminationConfig, run: StageRun,
) -> None:  # fmt: skip
    """Measure how many questions occur in training data: in the `model`'s lineage and in the given inputs.

    A question is contaminated if `decontaminate` with these settings would drop a training text because of it. Held-out texts do not count.
    Rows: per task, the share `contaminated` and, with an `evaluation` of the prompts, the mean scores `score` (of all questions),
    `score_clean` and `score_contaminated`. The side table `scores` has the largest `overlap` of each contaminated prompt, and `examples`
    the passage found. `tasks`: task files whose questions are also searched for. `benchmark` takes the result as `overlaps`. The metric
    `unknown_sources` counts sources in the lineage that are missing from the store, and imported models, whose data is unknown."""
    sources = [Source(one, None) for given in (documents, instructions, preferences) for one in given or ()]
    learned, unknown = trained_on(model) if model is not None else ([], 0)
    sources += [one for one in learned if one.artifact.key not in {other.artifact.key for other in sources}]
    sources.sort(key=lambda source: source.name)
    if not sources:
        missing = "no training text is given" if model is None else f"the lineage of {model.id} contains no text that is in this store"
        raise PunaError(f"contamination: {missing}; give its training data as documents, instructions or preferences")
    rows = [row for one in prompts or () for row in prompts_of_splits(one, config.splits)]
    for task in [load_task(one, file, spec) for one in tasks or () for file, spec in task_files(one)]:
        questions = contents(task)
        rows += [{"id": key, "task": task.name, "messages": asking(question), "reference": answer} for key, question, answer in questions]
    if not rows:
        raise PunaError("contamination: there are no questions to search for; give prompts or tasks")
    rows.sort(key=lambda row: (row["task"], row["id"]))
    search, unmatchable = search_for(rows, config)
    held: dict[int, Held] = {}
    for number, source in enumerate(sources):
        kind = source.artifact.kind
        parts = run.parts(source.artifact, columns=COLUMNS[kind])
        for matches in run.map(_find, parts, kind, source.mixture, search):
            for prompt, own in matches.items():
                one = own._replace(place=f"{source.name}, {own.place}")
                held[prompt] = max(held.get(prompt, one), one, key=lambda each: each.share)
        run.progress(number + 1, len(sources), source.name)
    _report(rows, held, _scores(evaluation), run)
    run.metric("sources", "; ".join(source.name for source in sources))
    run.metric("unknown_sources", unknown)
    run.metric("unmatchable_prompts", sum(unmatchable.values()))


def trained_on(model: Artifact) -> tuple[list[Source], int]:
    """Return the tables that a model and the models in its lineage were trained on, and the number of unknown sources."""
    sources: dict[str, Source] = {}
    waiting, seen, unknown = [model], {model.key}, 0
    while waiting:
        artifact = waiting.pop()
        unknown += artifact.kind == "model" and any(record.kind == "external" for record in artifact.manifest.inputs)
        inputs = [(record.name, Artifact(record.kind, record.key, model.files)) for record in artifact.manifest.inputs]
        mixtures = [one for _, one in inputs if one.kind == "mixture" and _is_stored(one)]
        for name, one in inputs:
            if one.key in seen or name in UNLEARNED or one.kind not in (*COLUMNS, *FOLLOWED):
                continue
            seen.add(one.key)
            if not _is_stored(one):
                unknown += 1
            elif one.kind in FOLLOWED:
                waiting.append(one)
            else:
                sources[one.key] = Source(one, mixtures[0] if one.kind == "documents" and mixtures else None)
    return list(sources.values()), unknown


def _is_stored(artifact: Artifact) -> bool:
    return artifact.files.stat(f"{artifact.place}/{NAME}") is not None


def _texts(part: Part, kind: str, mixture: Artifact | None) -> list[tuple[str, str]]:
    if kind == "documents":
        return [(row.id, row.text) for row in chosen_of(part, mixture, "train")]
    texts = []
    for row in part.read().to_pylist():
        if row["split"] == "train":
            answers = [content_of(json.loads(row[name])) for name in ("chosen", "rejected", "edited") if row.get(name)]
            texts.append((row["id"], "\n".join([text_of(messages_of(row)), *answers, row.get("reference") or ""])))
    return texts


def _find(part: Part, kind: str, mixture: Artifact | None, search: Search) -> dict[int, Held]:
    """Return, for each prompt found, its number → the text in this part with the largest share of its n-grams."""
    texts, held = _texts(part, kind, mixture), dict[int, Held]()
    for at, match in search.matches(pa.array([text for _, text in texts], pa.string())):
        for prompt, share in match.shares.items():
            one = Held(share, texts[at][0], match.text if prompt == match.prompt else "")
            held[prompt] = max(held.get(prompt, one), one, key=lambda each: each.share)
    return held


def _scores(evaluation: Artifact | None) -> dict[str, float]:
    """Return prompt id → score, or nothing without an evaluation. Raise PunaError if the evaluation has no per-prompt scores."""
    if evaluation is None:
        return {}
    rows = evaluation.read("scores").to_pylist() if "scores" in evaluation.tables else []
    scores = {row["id"]: float(row["value"]) for row in rows if row["name"] == "score"}
    if not scores and "dropped_too_long" not in evaluation.manifest.metrics:
        raise PunaError(f"contamination: {evaluation.id} has no per-prompt scores; give the output of `evaluate` on prompts")
    return scores


def _report(rows: list[dict[str, Any]], held: dict[int, Held], scores: dict[str, float], run: StageRun) -> None:
    overlaps = {row["id"]: held[number] for number, row in enumerate(rows) if number in held}
    tasks, bars = sorted({row["task"] for row in rows}), []
    for task in ["all", *tasks]:
        members = [row["id"] for row in rows if task in ("all", row["task"])]
        spoilt = wilson(sum(name in overlaps for name in members), len(members))
        run.write_rows([evaluation_row(task, "contaminated", spoilt, len(members))])
        bars.append((task, spoilt.value))
        sides = {"score": members, "score_clean": [name for name in members if name not in overlaps],
                 "score_contaminated": [name for name in members if name in overlaps]}  # fmt: skip
        for metric, names in sides.items():
            if values := [scores[name] for name in names if name in scores]:
                run.write_rows([evaluation_row(task, metric, mean(values), len(values))])
                if task == "all":
                    run.metric(metric, sum(values) / len(values))
    run.metric("prompts", len(rows))
    run.metric("contaminated_prompts", len(overlaps))
    run.write_rows([{"id": name, "name": OVERLAP, "value": one.share} for name, one in overlaps.items()], "scores")
    for row in rows:
        if (one := overlaps.get(row["id"])) is not None:
            detail = f"task {row['task']}: {one.share:.2f} of it in {one.place}"
            example = {"id": row["id"], "kind": "contaminated prompt", "prompt": as_text(messages_of(row)), "detail": detail}
            run.write_rows([{**example, "text": " ".join(one.text.split())}], "examples")
    figure = Figure("Questions that stand in training data", "task", "share of questions", {"contaminated": bars}, kind="bar")
    run.figure("contamination", figure)
