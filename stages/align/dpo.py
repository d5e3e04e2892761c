"""Direct preference optimisation of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from puna.models.training.settings import TrainingSettings
from puna.stages.align.lora import AdaptableConfig, adapted
from puna.stages.align.preferences import Level
from puna.stages.align.reward_model import CLEAR, read_preferences, render_ranked
from puna.stages.contract import Model, Preferences, StageRun, did_you_mean, stage
from puna.stages.contract.plugins import offers
from puna.stages.training.bad_rows import BadRows
from puna.stages.training.train import Example, by_answer, check_trl, fit, load_model, row_limit, save_model
from puna.storage import PunaError

if TYPE_CHECKING:
    import torch

    from puna.models.training.objectives import Dpo, DpoBatch
    from puna.models.transformer import Transformer


TRL_LOSSES = ("sigmoid", "ipo", "hinge")
"""What TRL's DPOTrainer computes as `models.training.losses` does."""
LOSSES = (*TRL_LOSSES, "simpo", "orpo")


class DpoConfig(AdaptableConfig):
    """How the policy is optimised."""

    engine: Literal["puna", "trl"] = Field("puna", description="Whose trainer: Puna's own loop, or TRL's DPOTrainer")
    loss: str = Field(
        "sigmoid",
        description="Preference loss: sigmoid (DPO), ipo, hinge; without a reference simpo, orpo (set nll_weight 1); or a plugin's",
    )
    beta: float = Field(0.1, gt=0, description="Strength of the tie to the reference: the scale of the implicit reward")
    simpo_gamma: float = Field(0.5, ge=0, description="Margin between the rewards of two answers that loss simpo asks for")
    nll_weight: float = Field(0.2, ge=0, description="Weight of the log-likelihood term on the better answer")
    nll_normalization: Literal["sequence", "tokens"] = Field(
        "sequence", description="The likelihood term: mean over answers of each answer's mean, or mean over tokens (TRL's)"
    )
    mask_format: bool = Field(True, description="Leave header and termination tokens out of the preference term")
    levels: tuple[Level, ...] = Field(CLEAR, min_length=1, description="Preference levels that are learned from")
    pairs: Literal["best_worst", "best_rest"] = Field(
        "best_rest",
        description="The best of a preference's ranked answers against the worst alone, or against each of the others",
    )
    training: TrainingSettings = Field(TrainingSettings(), description="Optimisation; an example is one prompt with all its preferences")

    @field_validator("loss")
    @classmethod
    def _known(cls, loss: str) -> str:
        if loss in LOSSES:
            return loss
        from puna.models.training.losses import REGISTRY

        offers("puna.losses")
        if loss not in REGISTRY:
            raise ValueError(f"there is no preference loss {loss}" + did_you_mean(loss, sorted(REGISTRY)))
        return loss

    @model_validator(mode="after")
    def _engine(self) -> DpoConfig:
        if self.engine == "trl":
            check_trl(self.training)
            if self.loss not in TRL_LOSSES:
                raise ValueError(f"TRL's DPOTrainer has no loss {self.loss}, only {', '.join(TRL_LOSSES)}: set engine puna")
            if self.method == "lora":
                raise ValueError("engine trl trains all weights of a policy here: set engine puna for method lora")
            if self.nll_weight and self.nll_normalization != "tokens":
                raise ValueError("TRL's likelihood term is a mean over tokens: nll_normalization must be tokens with engine trl")
        return self

    def reaches(self) -> list[tuple[str, str]]:
        """A loss from outside: its code decides the model as the stage's own does."""
        if self.loss in LOSSES:
            return []
        from puna.models.training.losses import REGISTRY

        function = REGISTRY[self.loss].function
        return [(function.__module__, function.__qualname__)]


@stage(kind="model", device=True)
def dpo(model: Model, preferences: list[Preferences], config: DpoConfig, run: StageRun) -> None:
    """DPO, or another preference loss, with format tokens masked and an NLL term on the better answer (Llama 3, section 4.1.4).

    The reference is the policy that training starts from; where the loss needs its log-probabilities, those of the preferences
    that training comes to are computed once, before the first step.
    The metrics `heldout_accuracy` and `heldout_margin` are of the held-out pairs, after training.
    Preferences that the chat template refuses, and those longer than a packed row, are in `dropped`; see `bad_rows`.
    """
    rows = read_preferences(preferences, config.levels)
    train = [row for row in rows if row["split"] == "train"]
    if not train:
        raise PunaError(f"there is no training preference of the levels {', '.join(config.levels)}: nothing to learn from")
    policy, tokenizer = load_model(model, "lm")
    bad, limit = BadRows(config, "dpo"), row_limit(config.training)
    examples = [one.example for one in render_ranked(tokenizer, train, limit, bad)]
    bad.check_left(len(examples), f"{len(train)} training preferences")
    run.metric("preferences", len(train) - len(bad.dropped))
    heldout = [one.example for one in render_ranked(tokenizer, [row for row in rows if row["split"] == "heldout"], limit, bad)]
    bad.write(run)
    known = reference(policy, heldout, config, run)
    if config.engine == "trl":
        from puna.stages.align.trl_engine import hub_tokenizer, train_dpo

        policy = train_dpo(policy, examples, hub_tokenizer(model, tokenizer), config, run)
    else:
        _train(policy, examples, config, run)
    _measure(policy, heldout, known, config, run)
    save_model(policy, tokenizer, run.folder)


def pairs_of(example: Example, pairs: str) -> list[tuple[int, int]]:
    """(better, worse) indices of answers: the best of each ranking against the worst, or against each that is worse."""
    return [
        (better, worse)
        for tiers in example.groups
        for better in tiers[0]
        for tier in (tiers[-1:] if pairs == "best_worst" else tiers[1:])
        for worse in tier
    ]


def collate(examples: Sequence[tuple[Example, list[float]]], config: DpoConfig) -> DpoBatch:
    """One packed row of pairs; with each example come its answers' reference log-probabilities."""
    import torch

    from puna.models.training.objectives import DpoBatch, Targets

    chosen, rejected, start = [], [], 0
    for example, _ in examples:
        for better, worse in pairs_of(example, config.pairs):
            chosen.append(start + better)
            rejected.append(start + worse)
        start += len(example.answers)
    masks = [e.masks if config.mask_format else [[True] * len(a) for a in e.answers] for e, _ in examples]
    return DpoBatch(
        targets=Targets.from_answers([e.prompt for e, _ in examples], [e.answers for e, _ in examples], masks),
        chosen=torch.tensor(chosen),
        rejected=torch.tensor(rejected),
        reference=torch.tensor([value for _, values in examples for value in values], dtype=torch.float32),
    )


def reference(model: Any, examples: Sequence[Example], config: DpoConfig, run: StageRun) -> list[list[float]]:
    """Summed unmasked log-probability of every answer under the model, prompt by prompt; zeros where the loss needs no reference."""
    from puna.models.training.objectives import reference_logprobs

    if not objective(config).preference.needs_reference:
        return [[0.0] * len(example.answers) for example in examples]

    def compute(some: list[Example]) -> torch.Tensor:
        return reference_logprobs(model, collate([(one, [0.0] * len(one.answers)) for one in some], config).targets)

    size = config.training.compute.micro_batch_tokens
    return by_answer(examples, size, compute, lambda done, total: run.progress(done, total, "reference"))


def objective(config: DpoConfig) -> Dpo:
    """The loss, as configured."""
    from puna.models.training.objectives import Dpo

    return Dpo(config.beta, config.nll_weight, config.nll_normalization, config.loss, config.simpo_gamma)


def _measure(model: Transformer, examples: list[Example], known: list[list[float]], config: DpoConfig, run: StageRun) -> None:
    """How the policy orders held-out pairs by its implicit reward, and by how much."""
    import torch

    from puna.models.training.packing import pack

    found, pairs = {"accuracy": 0.0, "margin": 0.0}, 0
    for row in pack([len(example) for example in examples], config.training.compute.micro_batch_tokens):
        batch = collate([(examples[i], known[i]) for i in row], config)
        with torch.no_grad():
            _, metrics = objective(config)(model, batch.to(next(model.parameters()).device))
        pairs += len(batch.chosen)
        for name in found:
            found[name] += float(metrics[name]) * len(batch.chosen)
    run.metric("heldout_pairs", pairs)
    for name, total in found.items():
        if pairs:
            run.metric(f"heldout_{name}", total / pairs)


def _train(model: Transformer, examples: list[Example], config: DpoConfig, run: StageRun) -> None:
    from puna.models.training.packing import Sampler

    training = config.training
    known = {i: [0.0] * len(example.answers) for i, example in enumerate(examples)}
    sampler = Sampler(
        range(len(examples)),
        training.batch_size,
        lambda chosen: collate([(examples[i], known[i]) for i in chosen], config),
        length=lambda i: len(examples[i]),
        micro_batch_tokens=training.compute.micro_batch_tokens,
        seed=run.seed("order"),
    )
    settings = training.train_config(len(examples))
    visited = sampler.visited(settings.steps)
    known |= zip(visited, reference(model, [examples[i] for i in visited], config, run), strict=True)
    with adapted(model, config, run) as scales:
        log = fit(model, objective(config), sampler, settings, run, scales)
    for name in ("accuracy", "margin", "chosen_logprob", "rejected_logprob"):
        run.metric(f"first_{name}", log[0][name])
        run.metric(f"final_{name}", log[-1][name])
