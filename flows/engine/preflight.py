"""The check of all steps' needs before the first step runs; all unmet needs are reported in one error."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import psutil
import pyarrow.compute as pc

from puna.flows.engine.declare import Flow, Given, Item, name_of, outputs
from puna.flows.engine.plan import Planner
from puna.flows.engine.recipe import Recipe
from puna.flows.engine.trace import TracedStep, complaints_of, trace
from puna.models.extraction.clean import decode
from puna.stages.contract import External, Facts, InputFacts, Stage, StageConfig, TextSample, Value, identify, rank_jobs, reusable
from puna.stages.contract.declaration import LOOK
from puna.stages.curate.ingest import IngestConfig, check_inputs, peek
from puna.stages.executors import PROCESSES
from puna.stages.reading.pages import Page
from puna.storage import Artifact, PunaError, Store

PEEK_CHARACTERS = 4000  # maximum characters of the text sampled from a page
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")  # files of NVIDIA's and AMD's drivers; if one exists, models are in its memory
STORED_PER_BYTE = 1.5  # minimum bytes of disk that curation needs per byte of its inputs: pages and their text, both compressed


def check(
    flow: Flow, recipe: Recipe, given: Mapping[str, Given], store: Store, executor: str = PROCESSES, *, planned: bool = False
) -> None:
    """Raise PunaError with all unmet needs of the flow's steps and their remedies, including a lack of disk space. A step whose artifact
    exists needs nothing. If the artifacts of all steps exist, the inputs are not sampled. `planned`: the number of processes, which only a
    run's command starts, is not checked."""
    traced = trace(flow, recipe, given)
    complaints = list(traced.complaints)
    planner = Planner(recipe, store)
    if not complaints:
        planner.walk(flow, given)
        if all(step.state == "reused" for step in planner.steps):
            return
    complaints += [] if planned else rank_jobs.idle(flow.name, (step.step.stage for step in traced.steps))
    files = [item for value in given.values() for output in outputs(value) for item in output.items if isinstance(item, External)]
    reading = next((step.config for step in traced.steps if isinstance(step.config, IngestConfig)), None)
    look: Callable[[float], TextSample] | None = None
    if reading is not None and files:
        wrong = complaints_of(lambda: check_inputs(files, reading))
        complaints += wrong
        if not wrong:
            config = reading
            look = cache(lambda seconds: page_texts(*peek(files, config, seconds), seconds))
    if not planned or store.files.folders("objects"):  # a plan without a store does not know its disk
        complaints += _room(files, store)
    facts: dict[str, InputFacts] = {}
    for spec in flow.inputs:
        for output in outputs(given.get(spec.name)):
            if not output.items and not spec.optional:  # a placeholder: nothing else is known of it
                facts[output.labels[0]] = InputFacts(spec.kind)
            for label, item in zip(output.labels, output.items, strict=bool(output.items)):
                found_facts = _facts(item, look)
                facts[label] = replace(found_facts, sources=(output.source,)) if output.source else found_facts
    reused = {step.label for step in planner.steps if step.state == "reused"}
    unmet = {step.label: needs for step in traced.steps if (needs := _unmet(step, facts, executor, planned)) and step.label not in reused}
    complaints += [needs for several in unmet.values() for needs in several]
    if complaints:
        raise PunaError("\n".join(dict.fromkeys(complaints)))


def check_stage(
    stage: Stage, config: StageConfig, given: Mapping[str, Value], store: Store, executor: str = PROCESSES, *, planned: bool = False
) -> None:
    """Raise PunaError with all unmet needs of a single stage, unless its artifact exists; `planned`: see `check`."""
    inputs = {name: tuple(_facts(item, None) for item in items) for name, items in stage.check(dict(given)).items() if items}
    misfits = [f"{stage.name}: {line}" for line in rank_jobs.misfits(stage, config, inputs)]
    complaints = ([] if planned else rank_jobs.idle(stage.name, [stage]) + misfits) + stage.unmet(config, Facts(inputs, _memory(executor)))
    if complaints and reusable(stage, identify(stage, config, dict(given)), store) is None:
        raise PunaError("\n".join(complaints))


def _unmet(step: TracedStep, known: dict[str, InputFacts], executor: str, planned: bool) -> list[str]:
    """Return the unmet needs of a step, and add the facts about its output to `known`."""
    stage = step.step.stage
    inputs = {name: tuple(known[label] for label in labels if label in known) for name, labels in step.inputs.items() if labels}
    before = [item for items in inputs.values() for item in items]
    unknown = any(item.sources is None and item.kind in ("external", "pages", "documents") for item in before)
    sources = () if unknown else tuple(dict.fromkeys(source for item in before for source in item.sources or ()))
    look = next((looked for items in inputs.values() if (looked := _together(items))), None)
    tables = stage.tables(step.config) if step.config is not None else None
    model = next((item.model for item in before if item.model), None) if stage.kind == "model" else None
    known[step.label] = InputFacts(stage.kind, tables, sources or None, None, look, model)
    if step.config is None:
        return []
    needs = stage.needs(step.config, Facts(inputs, _memory(executor))) if stage.needs else []
    return [f"{step.label}: {need}" for need in (*([] if planned else rank_jobs.misfits(stage, step.config, inputs)), *needs)]


def _together(items: Sequence[InputFacts]) -> Callable[[float], TextSample] | None:
    """Return a function that samples all files and artifacts of an input; None if there are none, or if one cannot be sampled."""
    if not items or any(item.look is None for item in items):
        return None
    looks = dict.fromkeys(item.look for item in items if item.look is not None)  # one look may sample several inputs

    def look(seconds: float) -> TextSample:
        samples = [one(seconds) for one in looks]
        whole = sum(len(texts) / share for texts, share in samples if texts and share)
        together = tuple(text for texts, _ in samples for text in texts)
        return together, len(together) / whole if whole else 0.0

    return look


def _facts(item: Item, look: Callable[[float], TextSample] | None) -> InputFacts:
    """Return the facts about an input of the run. `look`: a function that samples the pages in all files of the run."""
    if isinstance(item, Artifact):
        tables = {name: tuple(record.columns) for name, record in item.manifest.tables.items()}
        names = tuple(i.name.partition(":")[2] for i in item.manifest.inputs if i.kind == "external")
        size = sum(record.bytes for record in item.manifest.files.values())
        facts = InputFacts(item.kind, tables, names or None, size, model=item if item.kind == "model" else None)
        if item.kind != "documents":
            return facts
        sources, texts, share = document_texts(item, LOOK)
        return InputFacts(item.kind, tables, sources or names or None, size, lambda seconds: (texts, share))
    return InputFacts("external", None, (item.name,), sum(file.bytes for file in item.files), look)


def _memory(executor: str) -> int | None:
    elsewhere = executor != PROCESSES or any(Path(device).exists() for device in ACCELERATORS)
    return None if elsewhere else psutil.virtual_memory().available


def _room(files: list[External], store: Store) -> list[str]:
    needed = STORED_PER_BYTE * sum(file.bytes for item in files for file in item.files)
    free = store.files.free()
    if free is None or needed <= free:
        return []
    names = ", ".join(name_of(item) for item in files[:3])
    amounts = f"has {free / 1e9:.1f} GB free, and the artifacts made from {names} need about {needed / 1e9:.1f} GB at least"
    return [f"store {store.uri}: {amounts}; free some (`puna gc` removes unneeded artifacts), or choose another disk with --store"]


def page_texts(pages: Sequence[Page], share: float, seconds: float) -> tuple[tuple[str, ...], float]:
    """Return rough texts of a random sample of `pages`, and the sample's share of all pages; stop after `seconds`. `share`: the share of
    all pages that is in `pages`."""
    until = time.monotonic() + seconds
    texts: dict[int, str] = {}
    for at in random.Random(0).sample(range(len(pages)), len(pages)):
        texts[at] = page_text(pages[at])
        if time.monotonic() > until:
            break
    return tuple(texts[at] for at in sorted(texts)), share * len(texts) / max(1, len(pages))


def document_texts(documents: Artifact, seconds: float) -> tuple[tuple[str, ...], tuple[str, ...], float]:
    """Return the documents' sources (empty unless all were read in time), the starts of the texts read, and the share of documents read.
    The first documents are a random sample, since ids are hashes."""
    until = time.monotonic() + seconds
    texts: list[str] = []
    sources: set[str] = set()
    for part in documents.parts(columns=["source", "text"]):
        rows = part.read()
        texts += pc.utf8_slice_codeunits(rows["text"], 0, PEEK_CHARACTERS).to_pylist()
        sources.update(rows["source"].unique().to_pylist())
        if time.monotonic() > until:
            break
    whole = len(texts) == documents.rows()
    return tuple(sorted(sources)) if whole else (), tuple(texts), len(texts) / max(1, documents.rows())


def page_text(page: Page) -> str:
    """Return a rough text of a page, enough to see its topic."""
    from resiliparse.extract.html2text import extract_plain_text

    html = page.content_type.endswith(("html", "xhtml+xml"))
    body = decode(page.body[: 50 * PEEK_CHARACTERS], page.charset, html=html)
    if html:
        body = extract_plain_text(body, main_content=True)
    return body[:PEEK_CHARACTERS]
