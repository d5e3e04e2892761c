"""Settings of the stages that train on answers, and the subset that TRL's trainers support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from puna.models.training.losses import LOSSES, PreferenceLoss
from puna.models.training.registry import parameters_help
from puna.models.training.settings import LoraSettings, TrainingSettings
from puna.stages.contract import SeededConfig
from puna.stages.conversations import Level
from puna.stages.training.bad_rows import BadRowsConfig

CLEAR: tuple[Level, ...] = ("significantly_better", "better")
TRL_LOSSES = ("sigmoid", "ipo", "hinge", "robust", "sigmoid_norm", "apo_zero", "apo_down")
"""Losses that TRL's DPOTrainer and `models.training.losses` compute in the same way."""
TRL_ONLY: dict[str, tuple[object, ...]] = {
    "optimizer.name": ("adamw",), "optimizer.embedding_scale": (1.0,), "optimizer.spike_window": (0,),
    "schedule.shape": ("cosine", "linear", "constant"), "schedule.final_ratio": (0.0,), "schedule.anneal_steps": (0.0,),
    "schedule.average": (0,), "schedule.ema": (0.0,), "compute.deterministic": (False,),
}  # fmt: skip
"""Setting → the only values for which TRL's trainers behave like Puna's."""


class AdapterConfig(BadRowsConfig, SeededConfig):
    """Settings of a stage that trains either all weights of a model or adapters."""

    method: Literal["full", "lora"] = Field("full", description="full: all weights; lora: low-rank adapters, merged at the end")
    lora: LoraSettings = Field(LoraSettings(), description="Settings of the adapters, if method is `lora`")

    @model_validator(mode="after")
    def _adapters_are_used(self) -> Self:
        return self if self.method != "full" else self.refuse_unused("method is full", "lora")

    @property
    def quantization(self) -> Literal["none", "nf4"]:
        """Return the number format that frozen matrices are quantized to in training, or none."""
        return self.lora.quantization if self.method == "lora" else "none"

    def unmet(self) -> list[str]:
        """Return error messages for requirements of the adapters that this machine does not meet."""
        return self.lora.unmet("lora") if self.method == "lora" else []


class AdaptableConfig(AdapterConfig):
    """Settings of a stage that can train in Puna's loop or in TRL's trainer."""

    engine: Literal["puna", "trl"] = Field("puna", description="Trainer: Puna's own loop, or TRL's for this objective")
    training: TrainingSettings = Field(TrainingSettings(), description="Optimization")

    @model_validator(mode="after")
    def _trl_trains_the_same(self) -> Self:
        if self.engine == "puna":
            return self
        for path, supported in TRL_ONLY.items():
            group, name = path.split(".")
            if (value := getattr(getattr(self.training, group), name)) not in supported:
                raise ValueError(f"engine trl supports only {path} {' or '.join(map(str, supported))}: training.{path} cannot be {value}")
        if self.method == "lora" and self.lora.loraplus_ratio != 1:
            raise ValueError("engine trl trains A and B at the same rate: lora.loraplus_ratio must be 1")
        if self.quantization != "none":
            raise ValueError("engine trl gets unquantized matrices: lora.quantization must be none")
        return self


class SftConfig(AdaptableConfig):
    training: TrainingSettings = Field(
        TrainingSettings(), description="Optimization; an example is one instruction, or several to one prompt: `answers_together`"
    )
    answers_together: int = Field(1, ge=1, le=1024, description="Maximum answers to a prompt in one example, whose prompt is computed once")
    neftune_alpha: float = Field(
        0.0, ge=0, le=100, description="Uniform noise on embeddings in training, up to value / sqrt(mean tokens of an example x model "
        "width) (NEFTune, Jain et al. 2023, uses 5 to 15); needs engine puna; 0: none"
    )  # fmt: skip
    more_steps: int = Field(0, ge=0, description="Additional steps beyond those of `training`, for a control run of RL")
    ask_every: int = Field(100, ge=1, description="Number of steps between evaluations on `tasks`; also after the last step")

    @model_validator(mode="after")
    def _noise_has_an_engine(self) -> Self:
        if self.engine == "trl" and self.neftune_alpha:
            raise ValueError("neftune_alpha needs engine puna: this setting is not passed to TRL's trainer")
        if self.engine == "trl" and self.answers_together > 1:
            raise ValueError("answers_together needs engine puna: TRL's trainer computes the prompt for each answer")
        return self

    def with_more_steps(self, examples: int) -> Self:
        """Return the settings with `more_steps` added to the steps that `training` takes for `examples` examples."""
        if not self.more_steps:
            return self
        steps = self.training.train_config(examples).steps + self.more_steps
        return self.model_copy(update={"training": self.training.replace(steps=steps), "more_steps": 0})


class RewardModelConfig(AdaptableConfig):
    levels: tuple[Level, ...] = Field(CLEAR, min_length=1, description="Preference levels to train and evaluate on")
    nll_weight: float = Field(
        0.0, ge=0, description="Weight of the best answers' negative log-likelihood under the policy's head (GRM), which "
        "keeps what the policy knows while rewards are still equal; needs engine puna",
    )  # fmt: skip
    head_only: bool = Field(
        False, description="Fit only the head, exactly (for few preferences; fast); of `training`, only compute.micro_batch_tokens is used"
    )
    pooling: Literal["last", "mean"] = Field(
        "last", description="Read the reward at an answer's last token, or as the mean over its tokens, which exports do not support"
    )
    training: TrainingSettings = Field(TrainingSettings(), description="Optimization; an example is one prompt with all its preferences")

    @model_validator(mode="after")
    def _engine(self) -> RewardModelConfig:
        if self.engine == "trl" and self.nll_weight:
            raise ValueError(f"TRL's RewardTrainer has no likelihood term: nll_weight must be 0 with engine trl, not {self.nll_weight}")
        if self.engine == "trl" and self.pooling == "mean":
            raise ValueError("TRL's RewardTrainer reads the last token: pooling must be last with engine trl")
        if self.head_only and (self.engine == "trl" or self.method == "lora" or self.nll_weight):
            raise ValueError("head_only trains no layer: engine must be puna, method full and nll_weight 0")
        return self


class DpoConfig(AdaptableConfig):
    loss: str = Field(
        "sigmoid",
        description="Preference loss: sigmoid (DPO), robust, sigmoid_norm (by length), apo_zero, apo_down, ipo, hinge; without a reference "
        "simpo, orpo (set nll_weight 1); kto, which also uses single answers labelled good or bad; or a plugin's",
        json_schema_extra=lambda schema: schema.update(enum=list(LOSSES)),
    )
    loss_parameters: dict[str, float] = Field(
        {}, description=f"The loss's own parameters. {parameters_help({name: one.function for name, one in LOSSES.items()})}"
    )
    beta: float = Field(0.1, gt=0, description="Scale of the implicit reward: larger values keep the policy closer to the reference")
    nll_weight: float = Field(0.2, ge=0, description="Weight of the log-likelihood term on the better answer")
    nll_normalization: Literal["sequence", "tokens"] = Field(
        "sequence", description="Likelihood term: the mean over answers of each answer's mean, or the mean over all tokens (as in TRL)"
    )
    mask_format: bool = Field(True, description="Leave header and termination tokens out of the preference term")
    levels: tuple[Level, ...] = Field(CLEAR, min_length=1, description="Preference levels to train on")
    pairs: Literal["best_worst", "best_rest"] = Field(
        "best_rest", description="Compare the best of a preference's ranked answers with only the worst, or with each of the others"
    )
    training: TrainingSettings = Field(
        TrainingSettings(), description="Optimization settings; an example is one prompt with all its preferences, with engine trl one pair"
    )

    @property
    def preference(self) -> PreferenceLoss:
        return LOSSES[self.loss]

    @model_validator(mode="after")
    def _engine(self) -> DpoConfig:
        self.preference.own(self.loss_parameters)
        if not self.nll_weight:
            self.refuse_unused("nll_weight 0 leaves the likelihood term out", "nll_normalization")
        if self.preference.of == "answers" and self.pairs != "best_rest":
            raise ValueError(f"loss {self.loss} compares no pairs, so pairs={self.pairs} would do nothing: leave pairs out")
        if self.engine == "trl":
            if self.loss not in TRL_LOSSES:
                raise ValueError(f"TRL's DPOTrainer has no loss {self.loss}, only {', '.join(TRL_LOSSES)}: set engine puna")
            if self.loss == "sigmoid" and any(self.loss_parameters.values()):
                raise ValueError("TRL's loss sigmoid has no parameters: set engine puna, or leave loss_parameters out")
            if self.method == "lora" and self.lora.initialization == "pissa":
                raise ValueError("TRL's reference is the policy without its adapters, which with pissa is not the policy at the start of "
                    "training: set engine puna, or lora.initialization zero")  # fmt: skip
            if self.nll_weight and self.mask_format:
                raise ValueError(
                    "TRL also leaves the tokens masked by mask_format out of the likelihood term: set mask_format false or nll_weight 0 "
                    "with engine trl"
                )
            if self.nll_weight and self.nll_normalization != "tokens":
                raise ValueError("TRL's likelihood term is a mean over tokens: nll_normalization must be tokens with engine trl")
        return self

    def implementations(self) -> list[Callable[..., Any]]:
        return [self.preference.function]
