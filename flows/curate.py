"""The flow `curate`, which turns raw pages into clean documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from puna.flows.engine.declare import Classifier, Files, Output, Prompts, Sourced, flow, publish, step
from puna.stages.contract import Stage, StageConfig
from puna.stages.curate.classifiers.fold_models import purpose_of
from puna.stages.curate.code_reasoning import code_reasoning, train_code_reasoning
from puna.stages.curate.decontaminate import decontaminate
from puna.stages.curate.domains import domains, train_domains
from puna.stages.curate.extract import extract
from puna.stages.curate.gather import GatherConfig, gather
from puna.stages.curate.harm import harm
from puna.stages.curate.heuristics import heuristics
from puna.stages.curate.ingest import ingest
from puna.stages.curate.language import language
from puna.stages.curate.line_dedup import line_dedup
from puna.stages.curate.minhash_dedup import minhash_dedup
from puna.stages.curate.pii import pii
from puna.stages.curate.quality import quality
from puna.stages.curate.select import SelectConfig, select
from puna.stages.curate.semantic_dedup import semantic_dedup
from puna.stages.curate.substring_dedup import substring_dedup
from puna.stages.curate.train_classifier import train_classifier
from puna.stages.curate.url_dedup import url_dedup
from puna.stages.curate.url_filter import url_filter
from puna.stages.prompts.prompts import prompts
from puna.storage import Artifact, PunaError

APPLIED = ("language", "code_reasoning", "domains", "quality")  # steps that apply a classifier
RULE_GROUPS = [name for name, field in SelectConfig.model_fields.items() if isinstance(field.default, StageConfig)]
BY_MODELS = SelectConfig.model_validate({**dict.fromkeys(RULE_GROUPS), "code_reasoning": {}, "quality": {}})
"""The default configuration of the step `select_model`: only rules on classifier scores, since `select` has already applied the others."""


@dataclass(frozen=True)
class Curated:
    """The outputs of `curate`. `domains`: signals of domain, language, code and reasoning; empty if the recipe omits `domains`.
    `unselected` and `selected`: input and output of the step `select`."""

    documents: Output
    domains: list[Output]
    unselected: Output
    selected: Output


@flow
def curate(
    inputs: list[Files] | None = None, documents: list[Sourced] | None = None, evaluations: list[Prompts] | None = None,
    classifiers: list[Classifier] | None = None,
) -> Curated:  # fmt: skip
    """Turn pages, documents or both into clean documents.

    `documents`: text that is already extracted, for example imported. Documents that contain prompts of `evaluations` or of the recipe's
    step `prompts` are removed. `classifiers`: trained classifiers, used instead of training new ones."""
    models = _by_purpose(classifiers or [])
    held_out = [output for output in (step(prompts, off=True), *(evaluations or [])) if output]
    pages = step(url_filter, documents=_entering(inputs or [], documents or []))
    pages = step(url_dedup, documents=pages)
    languages = step(language, documents=pages, classifier=models.get("language"))
    trained = models.get("code_reasoning") or _train(train_code_reasoning, "code_reasoning", pages)
    technical = step(code_reasoning, documents=pages, classifier=trained)
    measures = step(heuristics, documents=pages, language=languages)
    selected = step(select, documents=pages, signals=[languages, technical, measures])
    unselected, pages = pages, step(pii, documents=selected)
    pages = step(minhash_dedup, documents=pages)
    pages = step(semantic_dedup, off=True, documents=pages)
    pages = step(line_dedup, documents=pages)
    pages = step(substring_dedup, off=True, documents=pages)
    trained = models.get("domains") or _train(train_domains, "domains", pages)
    types = step(domains, documents=pages, classifier=trained)
    trained = models.get("quality") or _train(train_classifier, "quality", pages, off=True)
    scores = [measures, types, technical, step(quality, documents=pages, classifier=trained, language=languages)]
    scores.append(step(harm, off=True, documents=pages, language=languages))
    pages = step(select, "select_model", default=BY_MODELS, documents=pages, signals=scores)
    pages = step(decontaminate, off=not held_out, documents=pages, prompts=held_out)
    publish("domains", types)
    return Curated(publish("documents", pages), [types, languages, technical] if types else [], unselected, selected)


def _entering(inputs: list[Files], documents: list[Sourced]) -> Output:
    """Combine the flow's inputs: documents extracted from pages, then given documents. Raise PunaError if there are none."""
    if not inputs and not documents:
        raise PunaError("flow curate needs pages or documents: --input [NAME=]URI, or --input [NAME=]documents/ID or [NAME=]ALIAS@latest")
    pages = [step(extract, pages=step(ingest, inputs=inputs))] if inputs else []
    outputs = [*pages, *sorted(documents, key=lambda output: (output.source, output.labels))]
    names = tuple(output.source for output in outputs)
    if len(outputs) == 1 and not names[0]:
        return outputs[0]

    def name_sources(config: GatherConfig) -> GatherConfig:
        return config.model_copy(update={"sources": names}) if any(names) else config

    return step(gather, documents=outputs, adapt=name_sources)


def _by_purpose(classifiers: Sequence[Output]) -> dict[str, Output]:
    """Return the classifiers by purpose: the step that applies them. Raise PunaError for an unknown or repeated purpose."""
    by_purpose: dict[str, Output] = {}
    for output in classifiers:
        for item in output.items:
            assert isinstance(item, Artifact)
            purpose = purpose_of(item)
            if purpose not in APPLIED:
                raise PunaError(f"curate: {item.id} was trained for {purpose!r}; the flow applies classifiers for {', '.join(APPLIED)}")
            if purpose in by_purpose:
                raise PunaError(f"curate: {item.id} is the second classifier for {purpose!r}; give only one")
            by_purpose[purpose] = Output("classifier", output.labels, (item,))
    return by_purpose


def _train(stage: Stage, purpose: str, documents: Output, off: bool = False) -> Output:
    """Train a classifier for the step `purpose`, unless the recipe omits that step; publish and return it, for reuse on the next crawl.
    `off`: train only if the recipe names the training step, since a default model exists."""
    return publish(f"{purpose}_classifier", step(stage, f"train_{purpose}", off=off, serves=purpose, documents=documents))
