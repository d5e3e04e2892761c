"""The flow `experiments`: small proxy runs that choose the training mixture."""

from __future__ import annotations

from puna.flows.engine.declare import Documents, Output, Signals, flow, publish, step
from puna.stages.experiments.mix_experiment import mix_experiment
from puna.stages.pretrain.split import split
from puna.stages.pretrain.tokenizer import tokenizer


@flow
def experiments(documents: Documents, domains: list[Signals]) -> Output:
    """Choose the weights of the training mixture in small proxy runs. `domains`: signals by which `split` makes categories."""
    sides = step(split, documents=documents, signals=domains)
    vocabulary = step(tokenizer, documents=documents, mixture=sides)
    return publish("weights", step(mix_experiment, documents=documents, split=sides, tokenizer=vocabulary))
