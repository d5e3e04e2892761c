"""The page of a run: a header with key figures, then sections in the order of the pipeline."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

from puna.flows.html.markup import THEME, Content, Html, document, duration, join, number, part, percent, section, short, table, tag
from puna.flows.report import alignment, arms, corpus, curate, lineage, training
from puna.flows.report.compare import again_view, compare_view
from puna.flows.report.funnel import Level, characters_per_token, funnel, level
from puna.flows.report.run import Run, for_people
from puna.stages.align.gate import ALL
from puna.stages.prompts.lookups import answers_without_model
from puna.stages.training.intervals import wilson

HERE = Path(__file__).parent
MAKER = hashlib.sha256(b"".join(f.read_bytes() for f in sorted([*HERE.glob("*.*"), *HERE.parent.glob("html/*.py")]))).hexdigest()
"""Digest of the code that makes pages, recorded in each page."""
SHARES = (("language", "language"), ("domain", "knowledge type"))  # columns of signals whose shares are shown, and their names
EXPERIMENTS = "Small runs that choose the mixture and predict the larger run."
LINEAGE = "How each artifact was made, from the inputs down. Hover over an artifact to see its id, metrics and neighbours."
SECTION = re.compile(r'<section id="(\w+)"><h2>(.*?)</h2>')


def page(run: Run) -> Html:
    log, levels = run.log, funnel(run)
    per_token = characters_per_token(run)
    sections = join(
        [
            _curation(run, levels, per_token),
            section("corpus", "Corpus", "What the text is made of.", [corpus.shares_view(run, *shares) for shares in SHARES],
                corpus.mixture_view(run), training.figures_view(filter(training.of_curation, run.steps), "What the steps measured")),
            section("experiments", "Experiments", EXPERIMENTS, training.experiments_view(run)),
            _pretraining(run),
            _alignment(run),
            section("times", "Time and memory", None, lineage.times_view(run)),
            section("lineage", "Lineage", LINEAGE, lineage.lineage_view(run)),
        ]
    )
    when = log.opened.strftime("%-d %B %Y, %H:%M UTC") if log.opened else ""
    reused, spent = sum(step.reused for step in run.steps), duration(sum(step.seconds for step in run.steps))
    summary = f"{len(run.steps)} artifacts, {reused} of them reused, {spent} in stages"
    title = tag("h1", for_people(f"{log.flow} run" if log.flow else "run"))
    head = [title, tag("p", when, " ", tag("code", log.name)), tag("p", summary) if run.steps else None]
    again = ["Everything here was read from the store's artifacts. ", tag("code", f"puna report {log.name}"), " recreates this page."]
    tiles = [*_corpus_tiles(run, levels), *_model_tiles(run), _accuracy_tile(run), *_claim_tiles(run)]
    about = [tag("dl", tiles, class_="tiles"), _notices(run), again_view(run)]
    return _whole(f"Puna: {log.flow or 'run'} {log.name}", "Run", head, about, sections, again)


def comparison(first: Run, second: Run) -> Html:
    names = [tag("p", run.log.flow, " ", tag("code", run.log.name), " ", run.log.state) for run in (first, second)]
    again = [tag("code", f"puna report {second.log.name} --compare {first.log.name}"), " recreates this page."]
    title = f"Puna: {first.log.name} and {second.log.name}"
    return _whole(title, "Runs", [tag("h1", "Two runs"), names], None, compare_view(first, second), again)


def _whole(title: str, top: str, head: Content, about: Content, main: Html, foot: Content) -> Html:
    """Return a self-contained page, whose navigation links to its top (with the text `top`) and to the sections of `main`."""
    links = [tag("a", Html(words), href=f"#{name}") for name, words in [("top", top), *SECTION.findall(main)]]
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    body = tag(
        "body", tag("nav", tag("b", "Puna"), links, aria_label="Sections"),
        tag("header", tag("div", tag("div", head), THEME, class_="masthead"), about, id="top"), tag("main", main), tag("footer", foot),
        Html(f"<script>{script}</script>"),
    )  # fmt: skip
    return document(title, body, tag("meta", name="generator", content=f"Puna {MAKER}"), Html(f"<style>{style}</style>"))


def _notices(run: Run) -> Content:
    notices = []
    if run.log.state != "finished":
        how = {"at work": "is still running", "stopped": "was stopped"}.get(run.log.state, f"{run.log.state}: {run.log.error}")
        notices.append(f"This run {how.rstrip('.')}. The page shows the steps so far.")
    if run.missing:
        notices.append(f"No longer in the store, and omitted here: {', '.join(run.missing)}.")
    if not run.steps:
        notices.append("No step of this run has finished yet.")
    return [tag("p", words, class_="alarm") for words in notices]


def tile(name: str, value: Content, note: Content = None, class_: str = "tile") -> Html:
    return tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="note") if note else None, class_=class_)


def _corpus_tiles(run: Run, levels: list[Level]) -> list[Html]:
    tiles = []
    if levels:
        came, kept = levels[0].came - levels[0].no_page, levels[-1].kept
        tiles.append(tile("Documents", [number(came), tag("i", " → "), number(kept)], f"{percent(kept, came)} kept"))
    for step in reversed(run.kind("tokens")):
        tokens = step.metrics.get("train_tokens", step.metrics.get("tokens"))
        if isinstance(tokens, int):
            tiles.append(tile("Training tokens", short(tokens), f"{tokens:,} packed by {step.label}"))
            break
    return tiles


def _model_tiles(run: Run) -> list[Html]:
    tiles = []
    # The task "pages" covers all pages, "pages/…" one category; the shortest name comes last and wins.
    by_length = sorted(alignment.measurements(run).items(), key=lambda item: -len(item[0][0]))
    metrics = {metric: values[0] for (_, metric), values in by_length}
    if bits := metrics.get("document_bits_per_byte"):
        names = (("ngram_bits_per_byte", "n-grams"), ("ngram_page_bits_per_byte", "n-grams + page's"), ("dictionary_bits_per_byte", "zstd"))
        baselines = [f"{label} {metrics[metric].value:.3f}" for metric, label in names if metric in metrics]
        against = f"baselines: {', '.join(baselines)}" if baselines else None
        tiles.append(tile("Base model, bits per byte", f"{bits.value:.3f}", against))
    rewards = [step.metrics for step in run.steps if step.stage == "reward_model" and "heldout_accuracy" in step.metrics]
    if rewards:
        note = f"of {number(rewards[-1].get('heldout_pairs'))} held-out pairs in the right order"
        tiles.append(tile("Reward model", f"{100 * rewards[-1]['heldout_accuracy']:.1f} %", note))
    return tiles


def _accuracy_tile(run: Run) -> Content:
    values = alignment.measurements(run).get((ALL, "accuracy"))
    if not values:
        return None
    steps = []
    for m in values:
        span = f"{100 * m.low:.0f}–{100 * m.high:.0f}" if m.low is not None and m.high is not None else ""
        steps.append(tag("li", tag("b", f"{100 * m.value:.1f} %"), tag("small", span), tag("span", m.label)))
    note = f"with 95 % intervals, over {number(values[-1].n)} held-out questions"
    return tile("Held-out task accuracy", tag("ol", steps, class_="chain"), note, "tile wide")


def _claim_tiles(run: Run) -> list[Html]:
    tiles = []
    for arms_of_round in arms.rounds([(step.name, step.artifact) for step in run.steps], run.log.made):
        lines = [
            tag("li", tag("b", f"{100 * claim.gain.value:+.1f}"),
                tag("small", f"{100 * claim.gain.low:+.1f} to {100 * claim.gain.high:+.1f}"),
                tag("span", f"{arms.METRICS[claim.metric]}: {claim.verdict}"))
            for claim in arms_of_round.claims() if claim.name == next(iter(arms.CLAIMS))
        ]  # fmt: skip
        if lines:
            claims = tag("ul", lines, class_="chain plain")
            tiles.append(tile(f"Round {arms_of_round.number} over its strongest control", claims, "points, paired", "tile claim"))
    return tiles


def _curation(run: Run, levels: list[Level], per_token: float | None) -> Html:
    rate = f"Tokens are estimated at this run's {per_token:.2f} characters per token." if per_token else None
    lead = "Every page and document that came in is kept or was dropped by one rule. Open a rule to read what it dropped."
    return section(
        "curation", "Curation", lead if levels else None,
        part("Funnel", curate.funnel_view(levels, per_token), note=rate) if levels else None,
        [curate.duplicates_view(run, step) for step in run.kind("documents") if step.has("duplicates")],
        [curate.lines_view(step) for step in run.kind("documents") if step.has("removed_lines")],
        corpus.examples_view(run.kind("pages", "documents")),
        corpus.kept_view(run),
    )  # fmt: skip


def _pretraining(run: Run) -> Html:
    base = [s for s in run.kind("model") if s.stage == "pretrain" and not s.name.startswith("control_")]
    models = {s.artifact.key for s in base}
    judged = [s for s in alignment.evaluations(run) if any(a.key in models for a in run.inputs(s))]
    figures = training.figures_view(judged, "What the base model can do")
    heat = training.heat_view([*base, *judged])
    return section("pretraining", "Pretraining", "The base model's training.", training.training_view(base, "Base model"),
        training.gains_view(run), heat, figures)  # fmt: skip


def _alignment(run: Run) -> Html:
    trained = [s for s in run.kind("model") if s.stage != "pretrain" and s.stage not in training.EXPERIMENTS]
    filters = [level(run, s) for s in run.kind("preferences", "instructions") if s.has("dropped")]
    others = [s for s in run.steps if s.artifact.kind not in ("model", "evaluation") and not training.of_curation(s)]
    base = {s.artifact.key for s in run.kind("model") if s.stage == "pretrain"}
    judged = [s for s in alignment.evaluations(run) if not any(a.key in base for a in run.inputs(s))]
    return section(
        "alignment", "Evaluation and alignment", "The gain from each training step, and the model's answers.",
        measured_view(run),
        alignment.gates_view(run),
        alignment.accuracy_view(run),
        alignment.arms_view(run),
        alignment.answers_view(run),
        alignment.reward_view(run),
        part("Rules on preferences and instructions", curate.funnel_view(filters, None, "rows")) if filters else None,
        training.training_view(trained, "Training"),
        training.figures_view(others, "Data of the rounds"),
        # The first plots of the section show accuracy by task already.
        training.figures_view(judged, "More measurements", without="accuracy"),
        alignment.table_view(run),
    )  # fmt: skip


def measured_view(run: Run) -> Html | None:
    """Return a table of the annotator, the prompts and model-free baselines; None without evaluations and preferences."""
    if not (alignment.evaluations(run) or run.kind("preferences")):
        return None  # curation reads prompts, too, to keep them out of training
    rows: list[list[Content]] = []
    for step in run.kind("preferences"):
        config = step.artifact.manifest.config
        if step.stage == "preferences":
            taste = f"it prefers by {json.dumps(config['taste'])}" if config.get("taste") else "it prefers answers near the gold one"
            flips = f"{float(config.get('flips', 0)):.0%} of its preferences are reversed"
            rows.append(["annotator", f"simulated: {taste}; {flips}"])
            break
    for step in run.kind("prompts")[:1]:
        prompts = step.artifact.read().to_pylist()
        tasks = Counter(row["task"] for row in prompts if row["split"] == "heldout")
        rows.append(["tasks", ", ".join(f"{task} ({count:,} held-out questions)" for task, count in sorted(tasks.items()))])
        for name, right in answers_without_model(prompts).items():
            share = wilson(round(sum(right.values())), len(right))
            rows.append([f"no model: {name}", f"{share.value:.3f} ({share.low:.3f} to {share.high:.3f}) right"])
    note = (
        "The rows without a model answer a held-out question with a gold answer of the training questions: that of the nearest question,"
        " unchanged or with the differing tokens replaced, or the most frequent one. An arm that is no better may have learned nothing "
        "beyond the training questions."
    )
    return part("What this was measured on", table(["what", "in this run"], rows), tag("p", note, class_="note")) if rows else None
