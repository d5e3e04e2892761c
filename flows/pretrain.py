"""The flow `pretrain`: clean documents to a base model."""

from __future__ import annotations

from typing import Annotated

from puna.flows.engine.declare import Output, flow, publish, step
from puna.stages.contract import Kind
from puna.stages.evaluation.evaluate import evaluate
from puna.stages.pretrain.mix import mix
from puna.stages.pretrain.pretrain import pretrain as train
from puna.stages.pretrain.split import split
from puna.stages.pretrain.tokenize import tokenize
from puna.stages.pretrain.tokenizer import tokenizer
from puna.stages.prompts.prompts import prompts


@flow
def pretrain(
    documents: Annotated[Output, Kind("documents")],
    domains: Annotated[Output, Kind("signals")],
    weights: Annotated[Output, Kind("evaluation")] | None = None,
    deduplicated: list[Annotated[Output, Kind("documents")]] | None = None,
) -> Output:
    """Train a base model on documents with their knowledge types; `weights` come from `experiments`."""
    sides = step(split, documents=documents, signals=domains)
    vocabulary = step(tokenizer, documents=documents, mixture=sides)
    mixture = step(mix, documents=documents, split=sides, weights=weights, deduplicated=deduplicated)
    tokens = step(tokenize, documents=documents, mixture=mixture, tokenizer=vocabulary)
    model = step(train, tokens=tokens, tokenizer=vocabulary)
    step(evaluate, "evaluate_base", model=model, documents=documents, mixture=mixture, prompts=step(prompts))
    publish("tokenizer", vocabulary)
    publish("mixture", mixture)
    return publish("base", model)
