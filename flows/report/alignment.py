"""Sections on alignment: gates, accuracy and reward after each step, control arms, answers before and after."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from puna.flows.html.markup import Content, Html, details, excerpt, join, number, part, table, tag
from puna.flows.html.plot import Plot, grid
from puna.flows.report import arms, training
from puna.flows.report.run import Run, Step, for_people
from puna.stages.align.gate import ALL
from puna.stages.training.intervals import Interval, mean
from puna.storage import Artifact, Store

TASKS_IN_A_PLOT = 4
ANSWERS_SHOWN = 8


@dataclass(frozen=True)
class Measured:
    """A metric's value with its 95 % interval over `n` items, from the evaluation `step`."""

    step: Step
    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def label(self) -> str:
        return model_label(self.step.name)


def model_label(step: str) -> str:
    return for_people(step.removeprefix("evaluate_"))


def models_by_step(store: Store) -> dict[str, str]:
    """Return evaluation key → label of the evaluated model: "Round 1"; for a control arm, "gold answers only (round 1)".
    If several runs name an evaluation, the newest run counts."""
    models: dict[str, str] = {}
    for name in store.runs():
        for event in store.events(name):
            if event.get("kind") != "evaluation":
                continue
            step, key = str(event["step"]), str(event["key"])
            if match := arms.CONTROL.fullmatch(step):
                models[key] = f"{arms.NAMES.get(match[1], match[1].replace('_', ' '))} (round {match[2]})"
            elif step.startswith("evaluate_"):
                models[key] = model_label(step)
    return models


def evaluations(run: Run) -> list[Step]:
    """Return the steps that wrote an evaluation and have a model among their inputs, except gates and control arms."""
    others = ("gate", "contamination", *training.EXPERIMENTS)
    steps = [s for s in run.kind("evaluation") if s.stage not in others and any(i.kind == "model" for i in s.artifact.manifest.inputs)]
    return [s for s in steps if not arms.CONTROL.fullmatch(s.name)]


def gate_basis(gate: Artifact) -> str:
    """Return a gate's metric and prompts as text: "score, mean over 600 held-out prompts of 2 tasks: chain_sum, digits"."""
    metric = str(gate.manifest.config.get("metric", "score"))
    prompts = {row["task"]: row["n"] for row in gate.read().to_pylist() if row["metric"] == "gain"}
    tasks = sorted(prompts.keys() - {ALL})
    more = f" and {len(tasks) - 4} more" if len(tasks) > 4 else ""
    basis = f" of {len(tasks)} task{'' if len(tasks) == 1 else 's'}: {', '.join(tasks[:4])}{more}" if tasks else ""
    return f"{metric}, mean over {prompts.get(ALL, 0):,} held-out prompts{basis}"


def gates_view(run: Run) -> Html | None:
    """Return a table of each round's gate: verdict, metric, prompts, gain and reason; None without gates."""
    rows: list[list[Content]] = [
        [s.round, s.metrics["verdict"], gate_basis(s.artifact), number(s.metrics["gain"], 3),
         f"{number(s.metrics['gain_low'], 3)} to {number(s.metrics['gain_high'], 3)}", s.metrics["reason"]]
        for s in run.steps if s.stage == "gate"
    ]  # fmt: skip
    head = ("round", "verdict", "compared", "gain", "95 % interval", "why")
    return part("Gates of the rounds", table(head, rows, numeric=[3])) if rows else None


def measurements(run: Run) -> dict[tuple[str, str], list[Measured]]:
    """Return (task, metric) → measurements, in the order of the run's evaluations of models."""
    by_metric: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for step in evaluations(run):
        for row in step.artifact.read().to_pylist():
            by_metric[row["task"], row["metric"]].append(Measured(step, row["value"], row["low"], row["high"], row["n"]))
    return dict(by_metric)


def accuracy_view(run: Run) -> Html:
    """Show accuracy after each step with its interval, overall and by task, then other metrics; a series needs two evaluations."""
    series = measurements(run)
    overall = series.get((ALL, "accuracy"), [])
    plots = [_plot("Accuracy on held-out tasks", "accuracy", {"all tasks": overall})] if len(overall) > 1 else []
    tasks = {t: v for (t, metric), v in series.items() if metric == "accuracy" and t != ALL and len(v) > 1}
    if len(tasks) > 1:
        names = sorted(tasks)
        # Divided evenly, since a plot of a single task has no legend to name the task.
        size = -(-len(names) // -(-len(names) // TASKS_IN_A_PLOT))
        groups = [names[i : i + size] for i in range(0, len(names), size)]
        for number_, group in enumerate(groups, 1):
            of = f" ({number_} of {len(groups)})" if len(groups) > 1 else ""
            plots.append(_plot(f"Accuracy by task{of}", "accuracy", {t: tasks[t] for t in group}))
    others: dict[str, dict[str, list[Measured]]] = defaultdict(dict)
    for (task, metric), values in sorted(series.items()):
        if metric != "accuracy" and len(values) > 1:
            others[metric][task] = values
    plots += [_plot(f"{metric.replace('_', ' ').capitalize()}", metric.replace("_", " "), group) for metric, group in others.items()]
    return part("After each step", grid(plots), note="Whiskers are 95 % intervals over the held-out items.")


def _plot(title: str, y: str, groups: Mapping[str, Sequence[Measured]]) -> Plot:
    series = {name: [(m.label, m.value) for m in values] for name, values in groups.items()}
    spans: dict[str, list[tuple[float | str, float, float]]] = defaultdict(list)
    for name, values in groups.items():
        spans[name] += [(m.label, m.low, m.high) for m in values if m.low is not None and m.high is not None]
    return Plot(title, "step", y, series, intervals=spans)


def table_view(run: Run) -> Html:
    """Show every measurement: one row per task and metric, one column per evaluation."""
    series = measurements(run)
    steps = evaluations(run)
    if not series:
        return Html("")
    rows: list[list[Content]] = []
    for (task, metric), values in sorted(series.items()):
        by_step = {m.step.name: m for m in values}
        cells = [_cell(by_step.get(step.name)) for step in steps]
        rows.append([task, metric.replace("_", " "), *cells, max(m.n for m in values)])
    head: list[Content] = ["task", "metric", *[model_label(s.name) for s in steps], "items"]
    return details("All measurements", table(head, rows, numeric=range(2, len(head))), class_="more")


def _cell(m: Measured | None) -> Content:
    if m is None:
        return "–"
    return [number(m.value), tag("small", f"{number(m.low, 3)} to {number(m.high, 3)}") if m.low is not None else None]


def arms_view(run: Run) -> Html:
    """Show, for each round, its arms' metrics, the round's gain over each arm and their ratio of budgets; then the claims (`CLAIMS`)."""
    parts = []
    for one in arms.rounds([(step.name, step.artifact) for step in run.steps], run.log.made):
        titles = [title for metric in one.metrics for title in (arms.METRICS[metric], "gain of the round")]
        rows = [[arms.NAMES.get(arm, arm), *(cell for metric in one.metrics for cell in _share_and_gain(one, arm, metric)),
                 _ratio(one, arm)] for arm in one.scores]  # fmt: skip
        claims: list[list[Content]] = [
            [claim.name, arms.NAMES[claim.control], arms.METRICS[claim.metric], _gain(claim.gain), claim.verdict] for claim in one.claims()
        ]
        beside = table(["what", "over", "metric", "gain", "verdict"], claims, numeric=[3])
        shares = table(["arm", *titles, "budget"], rows, numeric=range(1, len(titles) + 2))
        parts.append(part(f"Round {one.number} and its control arms", shares, beside, _budgets(one)))
    note = (
        "With a budget of 1 or more, an arm used at least as many checker calls, labels, sampled tokens, updates, answers per update and "
        "CPU seconds (0.9 of them are enough, since they vary) as the round. Gains are differences on the same held-out prompts, with 95 % "
        "intervals; an interval that contains 0 shows no gain."
    )
    return join([tag("p", note, class_="note"), *parts]) if parts else Html("")


def _share_and_gain(one: arms.Arms, arm: str, metric: str) -> tuple[Content, Content]:
    share = one.share(arm, metric)
    gain = "" if arm == "round" or "round" not in one.scores else _gain(one.gain("round", arm, metric))
    return [f"{share.value:.3f}", tag("small", f"{share.low:.3f} to {share.high:.3f}")], gain


def _ratio(one: arms.Arms, arm: str) -> str:
    """Return an arm's budget divided by the round's (`Budget.ratio`) as text; empty if either is unknown or the round used nothing."""
    ratio = one.ratio(arm, "round")
    return "" if ratio is None or math.isinf(ratio) else f"{math.floor(ratio * 100) / 100:.2f}"


def _budgets(one: arms.Arms) -> Html:
    costs = ("checker_calls", "labels", "sampled_tokens", "updates", "answers_per_update", "trained_tokens", "cpu_seconds")
    rows: list[list[Content]] = [
        [arms.NAMES.get(arm, arm), *(f"{getattr(budget, name):,.0f}" for name in costs)] for arm, budget in one.budgets.items() if budget
    ]
    head = ["arm", *(name.replace("_", " ") for name in costs)]
    return details("Budgets", table(head, rows, numeric=range(1, len(head)))) if rows else Html("")


def _gain(gain: Interval) -> Content:
    return [f"{gain.value:+.3f}", tag("small", f"{gain.low:+.3f} to {gain.high:+.3f}")]


def reward_view(run: Run) -> Html:
    models = [s for s in run.steps if s.stage == "reward_model"]
    plots = []
    series: dict[str, list[tuple[float | str, float]]] = {}
    for name, label in (("heldout_accuracy", "held-out pairs"), ("train_accuracy", "training pairs")):
        series[label] = [(s.label, float(s.metrics[name])) for s in models if name in s.metrics]
    if any(series.values()):
        plots.append(Plot("Reward model: pairs in the right order", "step", "accuracy", series, "bar"))
    for column, title in (("score", "Reward of sampled answers"), ("gold", "Verified score of sampled answers")):
        plots.append(_answers_plot(run, column, title))
    note = "Answers that were sampled in each round, by the model that wrote them; whiskers are 95 % intervals of the mean."
    return part("Reward", grid(plots), note=note)


def _rewards(run: Run, answers: Step) -> dict[str, float]:
    """Return answer id → the reward model's score, from the records of rejection sampling."""
    accuracies: dict[str, float] = {}
    for step in run.kind("instructions"):
        if step.has("scores") and any(a.key == answers.artifact.key for a in run.inputs(step)):
            rows = step.artifact.read("scores").to_pylist()
            accuracies.update({row["id"]: row["value"] for row in rows if row["name"] == "reward"})
    return accuracies


def _answers_plot(run: Run, column: str, title: str) -> Plot:
    """Return a plot of the mean of a column of the answers, with its interval, by step and model; see `_rewards` for missing scores."""
    points: dict[str, list[tuple[float | str, float]]] = defaultdict(list)
    spans: dict[str, list[tuple[float | str, float, float]]] = defaultdict(list)
    for step in run.kind("answers"):
        groups: dict[str, list[float]] = defaultdict(list)
        rewards = _rewards(run, step) if column == "score" else {}
        for row in step.artifact.read(columns=["id", "model", column]).to_pylist():
            value = row[column] if row[column] is not None else rewards.get(row["id"])
            if value is not None:
                groups[row["model"]].append(value)
        order = [i.data_digest for i in step.artifact.manifest.inputs if i.kind == "model"]
        for digest in sorted(groups, key=lambda d: (order.index(d) if d in order else len(order), d)):
            estimate = mean(groups[digest])
            name = "policy" if order[:1] == [digest] else "other model" if digest in order else digest[:8]
            points[name].append((step.label, estimate.value))
            spans[name].append((step.label, estimate.low, estimate.high))
    return Plot(title, "step", f"mean {column}", points, intervals=spans)


def answers_view(run: Run) -> Html:
    """Show the answers of the first, second and last evaluated model to the same questions; then the models' continuations of texts."""
    steps = [step for step in evaluations(run) if step.has("examples")]
    if not steps:
        return Html("")
    steps = list({s.name: s for s in (steps[0], steps[min(1, len(steps) - 1)], steps[-1])}.values())
    answers: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for step in steps:
        for row in step.artifact.read("examples").to_pylist():
            answers[row["id"]][step.name] = {**row, "about": json.loads(row["detail"])}
    questions = {i: rows for i, rows in answers.items() if any(row["kind"] != "continuation" for row in rows.values())}
    outcomes = {i: {(row["kind"], str(row["about"].get("score"))) for row in rows.values()} for i, rows in questions.items()}
    ranked = sorted(questions, key=lambda i: (-len(questions[i]), len(outcomes[i]) == 1, i))
    # The first question of every task, then the second of every task, and so on.
    turns: Counter[str] = Counter()
    place = {}
    for i in ranked:
        task = str(next(iter(questions[i].values()))["about"].get("task"))
        place[i] = turns[task]
        turns[task] += 1
    ids = sorted(ranked, key=place.__getitem__)[:ANSWERS_SHOWN]
    blocks = [_question(questions[i], steps) for i in ids]
    continuations = [_continuation(row) for i in sorted(answers) if i not in questions for row in answers[i].values()]
    view = part("Answers before and after", tag("div", blocks, class_="questions") if blocks else None)
    return join([view, part("Continuations by the base model", tag("div", continuations, class_="cards") if continuations else None)])


def _question(rows: Mapping[str, Mapping[str, Any]], steps: Sequence[Step]) -> Html:
    first = next(iter(rows.values()))
    facts = first["about"]
    tags = [tag("span", facts["task"], class_="tag")] if facts.get("task") else []
    if facts.get("reference") is not None:
        tags.append(tag("span", "a right answer: ", tag("b", excerpt(str(facts["reference"]), 120)), class_="note"))
    sides = [_answer(model_label(step.name), rows.get(step.name)) for step in steps]
    prompt = tag("p", excerpt(str(first["prompt"] or ""), 600), class_="prompt", dir="auto")
    return tag("article", tag("p", tags) if tags else None, prompt, tag("div", sides, class_="sides"), class_="question")


def _answer(title: str, row: Mapping[str, Any] | None) -> Html:
    if row is None:
        return tag("div", tag("h4", title), tag("p", "not asked", class_="note"))
    score = row["about"].get("score")
    judged = verdict(score if isinstance(score, (int, float)) else None)
    return tag("div", tag("h4", title, " ", judged), tag("blockquote", excerpt(str(row["text"]), 500) or "(empty)", dir="auto"))


def verdict(score: float | None, title: str = "") -> Html | None:
    """Return a label for an answer's score (right, wrong, or the score in between), after `title`; None without a score."""
    if score is None:
        return None
    kind, words = ("right", "right") if score >= 1 else ("wrong", "wrong") if score <= 0.01 else ("", f"score {number(score, 3)}")
    return tag("span", f"{title} {words}".strip(), class_=f"tag {kind}".strip())


def _continuation(row: Mapping[str, Any]) -> Html:
    about = row["about"]
    own = None
    if about.get("page"):
        own = details("how the page itself continues", tag("blockquote", excerpt(str(about["page"]), 300), dir="auto"), class_="more")
    category = tag("p", tag("span", about["category"], class_="tag")) if about.get("category") else None
    prompt = tag("p", excerpt(str(row["prompt"] or ""), 300), class_="prompt", dir="auto")
    return tag("article", category, prompt, tag("blockquote", excerpt(str(row["text"]), 420) or "(empty)", dir="auto"), own, class_="card")
