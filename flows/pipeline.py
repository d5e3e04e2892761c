"""The flow `pipeline`, which turns raw pages into an aligned model."""

from __future__ import annotations

from puna.flows.align import align
from puna.flows.curate import curate
from puna.flows.engine.declare import Classifier, Files, Output, Sourced, flow
from puna.flows.experiments import experiments
from puna.flows.pretrain import pretrain


@flow
def pipeline(
    inputs: list[Files] | None = None, documents: list[Sourced] | None = None, classifiers: list[Classifier] | None = None,
) -> Output:  # fmt: skip
    """Turn raw pages or documents into an aligned model; `classifiers` are used instead of training new ones."""
    curated = curate(inputs, documents, classifiers=classifiers)
    weights = experiments(curated.documents, curated.domains, curated.unselected, curated.selected)
    model = pretrain(curated.documents, curated.domains, weights)
    aligned: Output = align(model)
    return aligned
