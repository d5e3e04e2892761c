"""`curate`: raw pages to clean documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from puna.flows.program import Files, Output, flow, publish, step
from puna.stages.align.prompts import prompts
from puna.stages.contract import Kind, Stage
from puna.stages.curate.code_reasoning import code_reasoning, train_code_reasoning
from puna.stages.curate.decontaminate import decontaminate
from puna.stages.curate.domains import domains, train_domains
from puna.stages.curate.extract import extract
from puna.stages.curate.heuristics import heuristics
from puna.stages.curate.ingest import ingest
from puna.stages.curate.language import language
from puna.stages.curate.learned.trained import purpose_of
from puna.stages.curate.line_dedup import line_dedup
from puna.stages.curate.minhash_dedup import minhash_dedup
from puna.stages.curate.pii import pii
from puna.stages.curate.quality import quality
from puna.stages.curate.select import select
from puna.stages.curate.semantic_dedup import semantic_dedup
from puna.stages.curate.substring_dedup import substring_dedup
from puna.stages.curate.train_classifier import train_classifier
from puna.stages.curate.url_dedup import url_dedup
from puna.stages.curate.url_filter import url_filter
from puna.storage import Artifact, PunaError

APPLIED = ("language", "code_reasoning", "domains", "quality")
"""Steps that apply a classifier."""


@dataclass(frozen=True)
class Curated:
    """Clean documents, their knowledge types, and the documents after near-duplicates went, which say what each stands for."""

    documents: Output
    domains: Output
    deduplicated: Output


@flow
def curate(
    inputs: list[Files],
    evaluations: list[Annotated[Output, Kind("prompts")]] | None = None,
    classifiers: list[Annotated[Output, Kind("classifier")]] | None = None,
) -> Curated:
    """Pages to clean documents.

    `evaluations` are more prompts that no document may contain; `classifiers` take the place of those that would be trained.
    """
    given = _by_purpose(classifiers or [])
    held_out = [step(prompts), *(evaluations or [])]
    documents = step(extract, pages=step(ingest, inputs=inputs))
    documents = step(url_filter, documents=documents)
    documents = step(url_dedup, documents=documents)
    languages = step(language, documents=documents, classifier=given.get("language"))
    trained = given.get("code_reasoning") or _train(train_code_reasoning, "code_reasoning", documents)
    technical = step(code_reasoning, documents=documents, classifier=trained)
    signals = [languages, technical, step(heuristics, documents=documents, language=languages)]
    documents = step(select, documents=documents, signals=signals)
    documents = step(pii, documents=documents)
    deduplicated = documents = step(minhash_dedup, documents=documents)
    documents = step(semantic_dedup, off=True, documents=documents)
    documents = step(line_dedup, documents=documents)
    documents = step(substring_dedup, off=True, documents=documents)
    trained = given.get("domains") or _train(train_domains, "domains", documents)
    types = step(domains, documents=documents, classifier=trained)
    trained = given.get("quality") or _train(train_classifier, "quality", documents)
    scores = [types, technical, step(quality, documents=documents, classifier=trained, language=languages)]
    documents = step(select, "select_model", documents=documents, signals=scores)
    documents = step(decontaminate, documents=documents, prompts=held_out)
    publish("domains", types)
    return Curated(publish("documents", documents), types, deduplicated)


def _by_purpose(classifiers: Sequence[Output]) -> dict[str, Output]:
    """The classifiers that were given, by the step that applies each."""
    given: dict[str, Output] = {}
    for output in classifiers:
        for item in output.items:
            assert isinstance(item, Artifact)
            purpose = purpose_of(item)
            if purpose not in APPLIED:
                raise PunaError(f"curate: {item.id} was made for {purpose!r}; the flow applies classifiers for {', '.join(APPLIED)}")
            if purpose in given:
                raise PunaError(f"curate: {item.id} is the second classifier for {purpose!r}; give one")
            given[purpose] = Output("classifier", output.labels, (item,))
    return given


def _train(stage: Stage, purpose: str, documents: Output) -> Output:
    """Train what the step `purpose` applies, where the recipe has that step; the next crawl takes NAME_classifier@latest."""
    return publish(f"{purpose}_classifier", step(stage, f"train_{purpose}", serves=purpose, documents=documents))
