"""`experiments`: small runs that choose the mixture, and the size and loss of the large run."""

from __future__ import annotations

from typing import Annotated

from puna.flows.engine.declare import Output, flow, publish, step
from puna.stages.contract import Kind
from puna.stages.experiments.choose_size import choose_size
from puna.stages.experiments.ladder import ladder
from puna.stages.experiments.law import law
from puna.stages.experiments.mix_experiment import mix_experiment
from puna.stages.pretrain.mix import mix
from puna.stages.pretrain.split import split
from puna.stages.pretrain.tokenize import tokenize
from puna.stages.pretrain.tokenizer import tokenizer


@flow
def experiments(
    documents: Annotated[Output, Kind("documents")],
    domains: Annotated[Output, Kind("signals")],
    deduplicated: list[Annotated[Output, Kind("documents")]] | None = None,
) -> Output:
    """Find the weights of the mixture from documents and their knowledge types, and predict the loss of a run on it."""
    sides = step(split, documents=documents, signals=domains)
    vocabulary = step(tokenizer, documents=documents, mixture=sides)
    weights = step(mix_experiment, documents=documents, split=sides, tokenizer=vocabulary)
    mixture = step(mix, documents=documents, split=sides, weights=weights, deduplicated=deduplicated)
    tokens = step(tokenize, documents=documents, mixture=mixture, tokenizer=vocabulary)
    if rungs := step(ladder, off=True, tokens=tokens, tokenizer=vocabulary):
        surface = publish("law", step(law, ladders=[rungs]))
        step(choose_size, off=True, law=surface)
    return publish("weights", weights)
