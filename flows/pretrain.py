"""The flow `pretrain`, which trains a base model on clean documents."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from puna.flows.engine.declare import Files, Output, current_walk, flow, publish, step, switch, together
from puna.flows.engine.recipe import Step
from puna.stages.contract import Kind
from puna.stages.curate.contamination import contamination
from puna.stages.evaluation.evaluate import evaluate
from puna.stages.evaluation.needle import needle
from puna.stages.experiments.anneal_experiment import anneal_experiment
from puna.stages.experiments.choose_size import choose_size
from puna.stages.experiments.ladder import LadderConfig, ladder
from puna.stages.experiments.law import law
from puna.stages.experiments.phase_gains import phase_gains
from puna.stages.pretrain.mix import MixConfig, mix
from puna.stages.pretrain.pretrain import PretrainConfig
from puna.stages.pretrain.pretrain import pretrain as train
from puna.stages.pretrain.split import SplitConfig, split
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.pretrain.tokenizer import tokenizer
from puna.stages.prompts.prompts import prompts
from puna.stages.training.phase import Phase, control_phases
from puna.storage import PunaError


@flow
def pretrain(
    documents: Annotated[Output, Kind("documents")], domains: list[Annotated[Output, Kind("signals")]] | None = None,
    weights: Annotated[Output, Kind("evaluation")] | None = None, model: Annotated[Output, Kind("model")] | None = None,
    tasks: list[Files] | None = None,
) -> Output:  # fmt: skip
    """Train a base model on documents. `domains`: signals by which `split` sorts the documents into categories. `weights`: the mixture
    weights from `experiments`. `tasks`: folders of task files with their data; the training log records the scores on these tasks.

    Training starts from scratch or continues from any `model`, with that model's tokenizer. A training phase may have its own tokens and
    mixture, from the steps `tokenize_NAME` and `mix_NAME`; NAME is fresh, long or best. If the recipe names `anneal_experiment`, `mix_best`
    uses the mixture that this experiment accepts. A `ladder` of small runs on the first tokens forecasts the loss of a larger budget; with
    `train_chosen_size`, the model has the size that `choose_size` derives from this forecast. With `phase_controls`, `phase_gains` compares
    the model with runs on the same number of tokens, each of which lacks one phase."""
    sides = step(split, documents=documents, signals=domains)
    vocabulary = step(tokenizer, documents=documents, mixture=sides, model=model)
    mixture = step(mix, through="split", documents=documents, split=sides, weights=weights, tokenizer=vocabulary)
    _check_heldout(mixture)
    tokens = step(tokenize, documents=documents, mixture=mixture, tokenizer=vocabulary)
    verdict = step(anneal_experiment, off=True, tokens=tokens, tokenizer=vocabulary, model=model, documents=documents, mixture=mixture)
    further: list[Output | None] = []
    for name in ("fresh", "long", "best"):
        label, evaluation = f"tokenize_{name}", verdict if verdict and name == "best" else weights
        own = step(
            mix, f"mix_{name}", off=True, serves=label, documents=documents, split=sides, weights=evaluation, tokenizer=vocabulary
        )  # fmt: skip
        token_table = step(tokenize, label, off=True, documents=documents, mixture=own or mixture, tokenizer=vocabulary)
        if own and not token_table:
            raise PunaError(f"mix_{name}: no step reads this mixture; add {label} to the recipe")
        if verdict and name == "best":
            _check_verdict(own, token_table)
        further.append(token_table or None)
    fresh, long, best = further
    inputs: dict[str, Any] = {"tokens": tokens, "tokenizer": vocabulary, "fresh": fresh, "long": long, "best": best, "model": model}
    inputs["size"] = _size(tokens, vocabulary)
    base = step(train, **inputs, tasks=tasks)
    questions = step(prompts)
    evaluation = step(evaluate, "evaluate_base", model=base, documents=documents, mixture=mixture, prompts=questions)
    step(evaluate, "evaluate_input", off=True, model=model, documents=documents, mixture=mixture, prompts=questions)
    step(contamination, "contamination_base", off=True, prompts=[questions], model=base, evaluation=evaluation)
    step(needle, off=True, model=base, documents=documents, mixture=mixture)
    if switch("phase_controls", False, description="Also train control runs that each lack one phase, and compare the model with them"):
        given: dict[str, Any] = {"documents": documents, "mixture": mixture}
        natural = own and step(tokenize, "tokenize_natural", field="tokenize_best", off=True, tokenizer=vocabulary, **given)
        step(phase_gains, model=base, best=own or None, **given, **_control_models(inputs, natural))
    publish("tokenizer", vocabulary)
    publish("mixture", mixture)
    return publish("base", base)


def _check_heldout(mixture: Output) -> None:
    """Raise PunaError if the recipe evaluates the base model on held-out documents, but holds none out."""
    configs = current_walk().configs
    sides = configs(Step("split", "split", split))
    none = not mixture or any(isinstance(config, SplitConfig) and config.heldout_fraction == 0 for config in sides)
    if none and configs(Step("evaluate_base", "evaluate_base", evaluate)):
        raise PunaError("evaluate_base measures documents that split holds out: hold some out, or leave it out (evaluate_base=null)")


def _check_verdict(mixture: Output, tokens: Output) -> None:
    """Raise PunaError if the recipe's best data would ignore the verdict of `anneal_experiment`."""
    configs = current_walk().configs(Step("mix_best", "mix_best", mix, off=True))
    if any(isinstance(config, MixConfig) and config.weights for config in configs):
        raise PunaError("mix_best.weights and anneal_experiment both set the best mixture: leave out mix_best.weights, so that the "
                        "experiment sets it, or anneal_experiment")  # fmt: skip
    if tokens and not mixture:
        raise PunaError("tokenize_best reads no verdict of anneal_experiment without mix_best: name mix_best in the recipe (mix_best: {}), "
                        "or leave out anneal_experiment")  # fmt: skip


def _size(tokens: Output, vocabulary: Output) -> Output | None:
    """Return the model size that `choose_size` derives from the `ladder`; None unless the recipe sets `train_chosen_size`."""
    rungs = step(ladder, off=True, tokens=tokens, tokenizer=vocabulary)
    surface = publish("law", step(law, ladders=[rungs])) if rungs else rungs
    size = publish("size", step(choose_size, off=True, law=surface))
    if not switch("train_chosen_size", False, description="Train the model size that choose_size chooses instead of the recipe's size"):
        return None
    if not size:
        raise PunaError("train_chosen_size needs the steps ladder and choose_size: name both in the recipe")
    (small, *_), (large, *_) = (current_walk().configs(Step(stage.name, stage.name, stage)) or [None] for stage in (ladder, train))
    if isinstance(small, LadderConfig) and isinstance(large, PretrainConfig) and small.z_loss != large.z_loss:
        raise PunaError(f"ladder.z_loss is {small.z_loss} and pretrain.z_loss {large.z_loss}: with train_chosen_size, give both the same, "
                        "so that the forecast is of this model")  # fmt: skip
    return size


def _control_models(inputs: dict[str, Any], natural: Output) -> dict[str, Any]:
    """Train the control runs of `control_phases`; return their models by name. `natural`: tokens for annealing (falsy: no such run)."""
    configs = [current_walk().configs(Step(stage.name, stage.name, stage)) for stage in (tokenize, train)]
    (rows, *_), (own, *_) = (given or [None] for given in configs)
    controls: dict[str, tuple[Phase, ...]] = dict.fromkeys(("short_rows", "natural", "constant", "fresh"), ())  # in a trace of all steps
    if isinstance(rows, TokenizeConfig) and isinstance(own, PretrainConfig):
        controls = {name: one for name, one in control_phases(own.phases, rows.sequence_length).items() if natural or name != "natural"}
        if not controls:
            raise PunaError("phase_controls: pretrain.phases has no phase to compare; give several phases, or leave phase_controls out")
    models: dict[str, Any] = {}

    def train_control(name: str) -> None:
        given = inputs | ({"best": natural} if name == "natural" else {})
        models[name] = step(train, f"control_{name}", field="pretrain", adapt=lambda one: one.replace(phases=controls[name]), **given)

    together(*(partial(train_control, name) for name in controls))
    return models
