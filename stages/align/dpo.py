"""Direct preference optimisation of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from puna.stages.align.fitting import Example, Fitting, check_trl, fit, load_model, save_model
from puna.stages.align.preferences import Level
from puna.stages.align.reward_model import CLEAR, read_preferences, render_ranked
from puna.stages.contract import Model, Preferences, SeededConfig, StageRun, stage
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.training.objectives import DpoBatch


class DpoConfig(SeededConfig):
    """How the policy is optimised."""

    engine: Literal["puna", "trl"] = Field("puna", description="Whose trainer: Puna's own loop, or TRL's DPOTrainer")
    beta: float = Field(0.1, gt=0, description="Strength of the tie to the reference: the scale of the implicit reward")
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
    fitting: Fitting = Field(default_factory=Fitting, description="Optimisation; an example is one prompt with all its preferences")

    @model_validator(mode="after")
    def _engine(self) -> DpoConfig:
        if self.engine == "trl":
            check_trl(self.fitting)
            if self.nll_weight and self.nll_normalization != "tokens":
                raise ValueError("TRL's likelihood term is a mean over tokens: nll_normalization must be tokens with engine trl")
        return self


@stage(kind="model")
def dpo(model: Model, preferences: list[Preferences], config: DpoConfig, run: StageRun) -> None:
    """DPO with format tokens masked and an NLL term on the better answer (Llama 3, section 4.1.4).

    The reference is the policy that training starts from; its log-probabilities are computed once.
    """
    rows = [row for row in read_preferences(preferences, config.levels) if row["split"] == "train"]
    if not rows:
        raise PunaError(f"there is no training preference of the levels {', '.join(config.levels)}: nothing to learn from")
    run.metric("preferences", len(rows))
    if config.engine == "trl":
        from puna.stages.align.trl_engine import train_dpo

        train_dpo(model, rows, config, run)
    else:
        _train(model, rows, config, run)


def pairs_of(example: Example, pairs: str) -> list[tuple[int, int]]:
    """(better, worse) indices of answers: the best of each group against its last, or against each other one."""
    return [
        (group[0], worse) for group in example.groups for worse in (group[-1:] if pairs == "best_worst" else group[1:])
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


def reference(model: Any, examples: Sequence[Example], config: DpoConfig) -> list[list[float]]:
    """Summed unmasked log-probability of every answer under the model, prompt by prompt."""
    from puna.models.training.objectives import reference_logprobs
    from puna.models.training.packing import pack

    place = next(model.parameters()).device
    found: dict[int, list[float]] = {}
    for row in pack([len(e) for e in examples], config.fitting.row_tokens):
        batch = collate([(examples[i], [0.0] * len(examples[i].answers)) for i in row], config)
        values = reference_logprobs(model, batch.targets.to(place)).tolist()
        for i in row:
            count = len(examples[i].answers)
            found[i], values = values[:count], values[count:]
    return [found[i] for i in range(len(examples))]


def _train(artifact: Artifact, rows: list[dict[str, Any]], config: DpoConfig, run: StageRun) -> None:
    from functools import partial

    from puna.models.training.objectives import Dpo
    from puna.models.training.packing import Sampler

    model, tokenizer = load_model(artifact, "lm")
    fitting = config.fitting
    examples = render_ranked(tokenizer, rows, fitting.row_tokens)
    sampler = Sampler(
        list(zip(examples, reference(model, examples, config), strict=True)),
        fitting.batch_size,
        partial(collate, config=config),
        length=lambda item: len(item[0]),
        capacity=fitting.row_tokens,
        seed=run.seed("order"),
    )
    objective = Dpo(config.beta, config.nll_weight, config.nll_normalization)
    log = fit(model, objective, sampler, fitting, fitting.steps(len(examples)), run)
    for name in ("accuracy", "margin", "chosen_logprob", "rejected_logprob"):
        run.metric(f"first_{name}", log[0][name])
        run.metric(f"final_{name}", log[-1][name])
    save_model(model, tokenizer, run.folder)
