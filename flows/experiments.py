"""The flow `experiments`: small proxy runs that choose the training mixture and measure the rules of curation."""

from __future__ import annotations

from puna.flows.engine.declare import Documents, Output, Signals, current_walk, flow, publish, step
from puna.flows.engine.recipe import Step
from puna.stages.experiments.filter_ablation import filter_ablation
from puna.stages.experiments.mix_experiment import mix_experiment
from puna.stages.pretrain.split import split
from puna.stages.pretrain.tokenizer import tokenizer
from puna.storage import PunaError


@flow
def experiments(
    documents: Documents, domains: list[Signals], unselected: Documents | None = None, selected: Documents | None = None,
) -> Output:  # fmt: skip
    """Choose the weights of the training mixture in small proxy runs. `domains`: signals by which `split` makes categories.

    If the recipe names `filter_ablation`, small runs also measure what each rule of a selection earns or costs. `unselected` and
    `selected`: the documents before and after this selection, such as the step `select` of `curate`."""
    sides = step(split, documents=documents, signals=domains)
    vocabulary = step(tokenizer, documents=documents, mixture=sides)
    # In a trace of all steps, the configuration is None.
    asked = any(current_walk().configs(Step("filter_ablation", "filter_ablation", filter_ablation, off=True)))
    if unselected and selected:
        step(filter_ablation, off=True, documents=unselected, selected=selected, tokenizer=vocabulary)
    elif asked:
        raise PunaError("filter_ablation needs the documents before and after a selection: give --input unselected=documents/ID and "
                        "--input selected=documents/ID, or leave it out (filter_ablation=null)")  # fmt: skip
    return publish("weights", step(mix_experiment, documents=documents, split=sides, tokenizer=vocabulary))
