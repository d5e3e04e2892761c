"""The flow `experiments`: small runs that choose the mixture."""

from __future__ import annotations

from typing import Annotated

from puna.flows.engine.declare import Output, flow, publish, step
from puna.stages.contract import Kind
from puna.stages.experiments.mix_experiment import mix_experiment
from puna.stages.pretrain.split import split
from puna.stages.pretrain.tokenizer import tokenizer


@flow
def experiments(documents: Annotated[Output, Kind("documents")], domains: list[Annotated[Output, Kind("signals")]]) -> Output:
    """Find the weights of the mixture from documents and their knowledge types."""
    sides = step(split, documents=documents, signals=domains)
    vocabulary = step(tokenizer, documents=documents, mixture=sides)
    return publish("weights", step(mix_experiment, documents=documents, split=sides, tokenizer=vocabulary))
