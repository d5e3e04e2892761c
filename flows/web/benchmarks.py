"""Pages about benchmarks: the leaderboard, two models' differences and calibration, and each question with the models' answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlencode

from fastapi import Query

from puna.flows.html.markup import Content, Html, details, excerpt, percent, section, table, tag
from puna.flows.html.plot import Plot, grid
from puna.flows.report.alignment import verdict
from puna.flows.web.frame import Here, artifact_link, bar, button, note, pages, problem, projects_nav, tab
from puna.stages.evaluation.calibration import bins
from puna.stages.evaluation.comparison import SURE, TABLE, Difference, Measured, differences, evaluations_of, main_metric, scores_of
from puna.stages.evaluation.task_file import LOWER
from puna.storage import Artifact, PunaError, Store

MOST = 30  # maximum number of models on the leaderboard
SHOWN = 400  # maximum number of questions on a page
TITLE = 140  # maximum number of characters in a question's heading
WHICH = {"": "all", "differ": "one model is right", "wrong": "no model is right"}
HOW = "The {} models evaluated last, best first: main metric, 95 % interval, difference from {} on the same questions; bold: Holm's p < {}."
ECE = "Confidence is the probability of the chosen option among the options. A calibrated model lies on the diagonal."
router = pages("benchmarks", "Benchmarks", at=6)


class Candidate(NamedTuple):
    """A model on the leaderboard: its artifact, its aliases or id, and its measured scores."""

    model: Artifact
    name: str
    results: Measured

    @staticmethod
    def of(store: Store, model: Artifact, evaluations: Sequence[Artifact]) -> Candidate:
        return Candidate(model, _name(store, model), scores_of(evaluations_of(model, evaluations)))


def _name(store: Store, model: Artifact) -> str:
    return ", ".join(store.names().get(model.key, [])) or model.id


def _evaluations(store: Store, project: str | None = None) -> list[Artifact]:
    """Return the benchmark evaluations of a project, newest first; of all projects if `project` is None."""
    entries = [one for one in store.entries(project) if one["kind"] == "evaluation" and TABLE in one["tables"]]
    return [Artifact(one["kind"], one["key"], store.files) for one in reversed(entries)]


def _model(evaluation: Artifact) -> Artifact:
    return next(Artifact(one.kind, one.key, evaluation.files) for one in evaluation.manifest.inputs if one.name == "model")


@router.get("/benchmarks")
def board_page(site: Here, project: str | None = None, beside: str | None = None) -> str:
    """Return the leaderboard of the `MOST` models evaluated last. `beside`: key prefix of the model to compare with (None: the best)."""
    store = site.store.within(project).require_project()
    evaluations = _evaluations(store, project)
    candidates = [one for one in {_model(one).key: _model(one) for one in evaluations}.values() if store.find(one.kind, one.key)]
    models = rank([Candidate.of(store, one, evaluations) for one in candidates[:MOST]])
    about, switch = f"project={project}&" if project else "", projects_nav(store, project, "/puna/benchmarks", every=True)
    reference = next((one for one in models if one.model.key.startswith(beside or "")), models[0] if models else None)
    start = tag("p", button("Evaluate a model", "/puna/start/benchmark"), class_="buttons")
    if reference is None:
        nothing = tag("p", "No model was evaluated yet. ", tag("code", "puna evaluate MODEL --tasks FILE"), " does that.", class_="lead")
        return site.page("Benchmarks", switch, nothing, start, here="benchmarks")
    tasks = sorted({task for one in models for task in one.results})
    rows: list[list[Content]] = []
    for one in models:
        gaps = {} if one is reference else {gap.task: gap for gap in differences(reference.results, one.results)[0]}
        box = tag("input", type="checkbox", name="model", value=one.model.key[:12], aria_label=f"compare {one.name}")
        link = tab("reference" if one is reference else "compare all with it", f"?{about}beside={one.model.key[:12]}", one is reference)
        cells = [_score(one.results.get(task), gaps.get(task)) for task in tasks]
        rows.append([box, [artifact_link(one.model, one.name), tag("small", link)], *cells])
    first = [next(one.results[task] for one in models if task in one.results) for task in tasks]
    head = [[task, Html("<br>"), tag("small", _metric(main_metric(metrics)))] for task, metrics in zip(tasks, first, strict=True)]
    listed = table([tag("small", "pick"), "model", *head], rows, numeric=range(2, 2 + len(tasks)))
    lead = HOW.format(len(models), reference.name, SURE)
    form = tag("form", listed, tag("p", tag("button", "Compare two")), action="/puna/benchmarks/compare", method="get")
    return site.page("Benchmarks", switch, section("board", "Leaderboard", lead, form), start, here="benchmarks")


def rank(models: Sequence[Candidate]) -> list[Candidate]:
    """Return the models, best first, by the share of models that each beats on a task, averaged over all tasks (a missing task: 0)."""
    values: dict[str, dict[int, float]] = {}
    for at, one in enumerate(models):
        for task, metrics in one.results.items():
            name = main_metric(metrics)
            values.setdefault(task, {})[at] = metrics[name][0]["value"] * (-1 if name in LOWER else 1)

    def beaten(at: int) -> float:
        shares = [sum(own[at] > value for value in own.values()) / len(own) for own in values.values() if at in own]
        return sum(shares) / max(1, len(values))

    return [models[at] for at in sorted(range(len(models)), key=lambda at: (-beaten(at), at))]


def _score(metrics: Mapping[str, tuple[dict[str, Any], Any]] | None, gap: Difference | None) -> Content:
    """Return a leaderboard cell: the score with a link to the questions, its interval, contamination, and the gap to the reference."""
    if metrics is None:
        return "–"
    row = metrics[main_metric(metrics)][0]
    span = "" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
    more = [tag("small", f"{percent(row['contaminated'], 1)} contaminated, {_clean(row)} without")] if row.get("contaminated") else []
    if gap is not None:
        words = f"{gap.difference.value:+.3f}, p {gap.holm:.2g}"
        more.append(tag("small", tag("b", words) if gap.holm < SURE else words))
    title = f"{row['metric']}, {row['n']:,} questions"
    return [tag("a", f"{row['value']:.3f}", href=_questions(row["task"], row["evaluation"]), title=title), tag("small", span), more]


def _metric(name: str) -> str:
    return f"{name}, less is better" if name in LOWER else name


def _clean(row: Mapping[str, Any]) -> str:
    return "no clean question" if row.get("clean") is None else f"{row['clean']:.3f}"


def _questions(task: str, *evaluations: str, **more: object) -> str:
    return f"/puna/benchmarks/questions?{urlencode({'task': task, 'evaluation': [key[:12] for key in evaluations], **more}, doseq=True)}"


@router.get("/benchmarks/compare")
def compare_page(site: Here, names: Annotated[list[str], Query(alias="model")] = []) -> str:  # noqa: B006
    if len(names) != 2:
        raise PunaError(f"compare: choose two models, not {len(names)}")
    evaluations = _evaluations(site.store)
    one, other = (Candidate.of(site.store, site.store.resolve(f"model/{name}"), evaluations) for name in names)
    gaps, remarks = differences(one.results, other.results)
    rows: list[list[Content]] = []
    for gap in gaps:
        first, second = (side.results[gap.task][gap.metric][0] for side in (one, other))
        link = tag("a", gap.task, href=_questions(gap.task, first["evaluation"], second["evaluation"]))
        clean = [_clean(row) if row.get("contaminated") else "" for row in (first, second)]
        rows.append(
            [[link, tag("small", _metric(gap.metric))], *([f"{mean:.4f}", tag("small", f"{rest} on the clean part") if rest else None]
             for mean, rest in zip((gap.one, gap.other), clean, strict=True)), f"{gap.difference.value:+.4f}",
             f"{gap.difference.low:+.4f} to {gap.difference.high:+.4f}", gap.n, f"{gap.p:.3g}", f"{gap.holm:.3g}"]
        )  # fmt: skip
    shares = [gap for gap in gaps if gap.metric not in LOWER]
    series = {"difference": [(gap.task, gap.difference.value) for gap in shares]}
    spans = {"difference": [(gap.task, gap.difference.low, gap.difference.high) for gap in shares]}
    plot = Plot("Difference, 95 % interval", "task", "B - A", series, "scatter", lines={"equal": 0.0}, intervals=spans)
    head: list[Content] = ["task", "A", "B", "B - A", "95 %", "questions", "p", "p (Holm)"]
    return site.page(
        "Two models",
        [problem(f"Not compared: {remark}") for remark in remarks],
        section("differences", "Differences", "On the same questions. A task's name opens its questions with both answers.",
                table(head, rows, numeric=range(1, 8)), grid([plot])) if rows else None,
        section("calibration", "Calibration", ECE, _calibration(site.store, {"A": one, "B": other})),
        here="benchmarks", lead=[["A: ", artifact_link(one.model, one.name)], Html("<br>"), "B: ", artifact_link(other.model, other.name)],
    )  # fmt: skip


def _calibration(store: Store, sides: Mapping[str, Candidate]) -> Content:
    """Return a table of the models' calibration errors and a reliability plot for each multiple-choice task; None without such tasks."""
    rows: list[list[Content]] = []
    plots = []
    for task in sorted({task for side in sides.values() for task in side.results}):
        series: dict[str, list[tuple[float | str, float]]] = {}
        errors: list[Content] = []
        for name, side in sides.items():
            row, right = side.results.get(task, {}).get("acc", ({}, {}))
            errors.append("–" if row.get("calibration_error") is None else f"{row['calibration_error']:.3f}")
            if row.get("calibration_error") is not None:
                scores = store.resolve(f"evaluation/{row['evaluation']}").read("scores").to_pylist()
                sure = {one["id"]: one["value"] for one in scores if one["name"] == f"{task}/acc:confidence"}
                places = bins([*sure.values()], [right[key][0] for key in sure])
                series[name] = [(one.confidence, one.accuracy) for one in places]
        if series:
            rows.append([task, *errors])
            series["calibrated"] = [(0.0, 0.0), (1.0, 1.0)]
            plots.append(Plot(task, "confidence", "share that is right", series, faint=frozenset(["calibrated"])))
    return [table(["expected calibration error", *sides], rows, numeric=(1, 2)), grid(plots)] if rows else None


@router.get("/benchmarks/questions")
def questions_page(site: Here, task: str, names: Annotated[list[str], Query(alias="evaluation")], which: str = "") -> str:
    """Return the page of up to `SHOWN` questions of a task, with one or two models' stored answers. `which`: the filter, see `WHICH`."""
    evaluations = [site.store.resolve(f"evaluation/{name}") for name in names]
    titles = ["A", "B"] if len(names) > 1 else [""]
    if len(names) > 2 or which not in WHICH:
        raise PunaError("questions: choose one or two evaluations, and with `which` the questions: differ, wrong, or all if empty")
    results = [scores_of([one]).get(task) for one in evaluations]
    if missing := [one.id for one, own in zip(evaluations, results, strict=True) if not own]:
        raise PunaError(f"{missing[0]} has no task {task}")
    if not (common := set.intersection(*(set(own) for own in results if own))):
        raise PunaError(f"{task}: the two evaluations have no metric in common")
    metric = main_metric(common)
    answers = [_answers(one, task) for one in evaluations]
    both = [key for key in answers[0] if all(key in own for own in answers)]
    right = {key: [own[key]["about"].get(metric) for own in answers] for key in both}
    some = {"": both, "differ": [key for key in both if len({*right[key]}) > 1], "wrong": [key for key in both if {*right[key]} == {0.0}]}
    keys = some[which]
    total = max(len(own[metric][1]) for own in results if own)
    offered = {name: words for name, words in WHICH.items() if name != "differ" or len(names) > 1}
    links = [tab(words, _questions(task, *names, which=name), name == which) for name, words in offered.items()]
    summary = f"{len(keys):,} of the {len(both):,} questions stored with answers (setting examples); {total:,} were asked."
    if len(keys) > SHOWN:
        summary += f" The first {SHOWN} are shown."
    questions = [_question([own[key] for own in answers], right[key], titles) for key in keys[:SHOWN]]
    models = [artifact_link(model, _name(site.store, model)) for model in map(_model, evaluations)]
    lead = [[f"{title}: " if title else "", link, " "] for title, link in zip(titles, models, strict=True)]
    return site.page(task, tag("nav", links, aria_label="Questions"), note(summary), tag("div", questions, class_="pairs"),
                     here="benchmarks", lead=lead)  # fmt: skip


def _answers(evaluation: Artifact, task: str) -> dict[str, dict[str, Any]]:
    """Return id → row of the table `examples` (a question and its answer) for a task; `about` holds the row's parsed details."""
    rows = [{**row, "about": json.loads(row["detail"])} for row in evaluation.read("examples").to_pylist()]
    return {row["id"]: row for row in rows if row["about"].get("task") == task}


def _question(rows: Sequence[Mapping[str, Any]], right: Sequence[float | None], titles: Sequence[str]) -> Html:
    """Return a collapsible view of a question: the prompt, the right answer, and each model's answer."""
    first = rows[0]
    verdicts = [verdict(value, title) for title, value in zip(titles, right, strict=True)]
    sides = [tag("div", tag("h4", title), verdict(value), _answer(row)) for title, row, value in zip(titles, rows, right, strict=True)]
    target = tag("p", "right answer: ", tag("b", excerpt(_target(first["about"]))))
    prompt = tag("p", str(first["prompt"]), class_="said", dir="auto")
    return details([tag("b", excerpt(str(first["prompt"]), TITLE)), " ", verdicts], prompt, target, tag("div", sides, class_="sides"))


def _target(about: Mapping[str, Any]) -> str:
    choices, target = list(about.get("nats", ())), about.get("target")
    return choices[target] if isinstance(target, int) and target < len(choices) else str(target)


def _answer(row: Mapping[str, Any]) -> Content:
    """Return the view of a model's answer: the options with their probabilities, or else the answer's text and the verifier's remarks."""
    about = row["about"]
    if not (nats := about.get("nats")):
        remarks = [tag("p", text, class_="note") for text in dict.fromkeys(about.get("said") or ()) if text]
        return [tag("p", str(row["text"]), class_="said", dir="auto"), remarks]
    whole = sum(math.exp(value - max(nats.values())) for value in nats.values())
    rows: list[list[Content]] = []
    for choice, value in nats.items():
        share = math.exp(value - max(nats.values())) / whole
        words = tag("b", excerpt(choice)) if choice == row["text"] else excerpt(choice)
        rows.append([words, bar(share, percent(share, 1)), percent(share, 1)])
    return table(["option", "probability", ""], rows, numeric=(2,))
