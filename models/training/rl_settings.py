"""Settings of reinforcement learning: rollouts, PPO and GRPO with its variants."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from puna.models.settings import NO_RESULT, Settings
from puna.models.training.settings import ComputeSettings, OptimizerSettings, ScheduleSettings, TrainConfig

Baseline = Literal["grpo", "mean", "rloo"]
Surrogate = Literal["clipped", "cispo"]
Ratio = Literal["token", "sequence"]
Normalizer = Literal["tokens", "answers", "constant"]
Credit = Literal["answer", "steps"]


class RolloutSettings(Settings):
    """Settings that PPO and GRPO share: reinforcement learning of a policy on its own samples."""

    rollouts: int = Field(8, ge=1, description="Number of rollouts")
    prompts: int = Field(64, ge=1, description="Prompts per rollout")
    answers: int = Field(4, ge=1, description="Answers to each prompt of a rollout")
    epochs: int = Field(2, ge=1, description="Passes over a rollout")
    minibatches: int = Field(2, ge=1, description="Updates per pass")
    schedule: ScheduleSettings = Field(
        ScheduleSettings(learning_rate=3e-4, warmup_steps=0, shape="constant"), description="Learning rate of the policy; steps are updates"
    )
    optimizer: OptimizerSettings = Field(OptimizerSettings(weight_decay=0.0, beta2=0.999), description="The optimizer")
    compute: ComputeSettings = Field(ComputeSettings(micro_batch_tokens=4096), description="Precision and memory")
    clip: float = Field(0.2, gt=0, lt=1, description="Clip range of the probability ratio")
    entropy_weight: float = Field(0.0, ge=0, description="Weight of the entropy bonus")
    kl_coefficient: float = Field(0.05, ge=0, description="Reward (grpo: advantage) subtracted per nat of KL divergence from the reference")
    temperature: float = Field(1.0, gt=0, le=10, description="Temperature of sampling and of all log-probabilities")
    max_tokens: int = Field(64, ge=1, description="Maximum tokens of an answer, its stop token included")
    unfinished_penalty: float = Field(1.0, ge=0, description="Penalty subtracted from the reward of a truncated answer")
    generate: int = Field(
        0, ge=0, le=1024, description="Number of last ranks that only sample answers, while the other ranks train; 0: all do both",
        json_schema_extra=NO_RESULT,
    )  # fmt: skip
    generate_tensor: int = Field(
        1, ge=1, le=64, description="With `generate`: number of sampling processes that share one policy and its reference by tensor "
        "parallelism; 1: each process has both models whole", json_schema_extra=NO_RESULT,
    )  # fmt: skip
    max_stale: int = Field(
        0, ge=0, le=1, description="1: sample a rollout before (with `generate`, during) the previous rollout's updates, with weights that "
        "are one rollout older, to which the probability ratios refer. 0: sample a rollout after the previous rollout's updates"
    )  # fmt: skip
    engine: Literal["puna", "vllm"] = Field("puna", description="Engine that samples answers: Puna's own, or vLLM if it is installed")
    importance_cap: float = Field(
        2.0, ge=1, description="vllm: cap on the factor of a token's loss, which is the policy's probability over vLLM's (truncated "
        "importance sampling, Yao et al. 2025)"
    )  # fmt: skip
    gpu_memory: float = Field(0.4, gt=0, lt=1, description="vllm: share of the GPU's memory that vLLM takes")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.engine == "vllm" and (self.generate or self.compute.layout.processes > 1):
            raise ValueError("engine vllm: no test covers it with several processes: set generate to 0 and leave compute.layout out")
        if self.minibatches > self.prompts:
            raise ValueError(f"minibatches {self.minibatches} must not exceed prompts {self.prompts}: each needs one at least")
        if self.answers * self.max_tokens >= self.compute.micro_batch_tokens:
            raise ValueError(f"compute.micro_batch_tokens {self.compute.micro_batch_tokens} cannot hold {self.answers} answers of "
                f"{self.max_tokens} tokens and a prompt")  # fmt: skip
        if self.generate and len((layout := self.compute.layout).axes) > 1:
            raise ValueError(f"generate: no test proves training by {layout} beside ranks that sample: set one axis, or generate to 0")
        if (tensor := self.generate_tensor) > 1 and not self.generate:
            raise ValueError(f"generate_tensor {tensor} has no effect without generate: set generate to a multiple of it, or leave it out")
        if self.generate % tensor:
            raise ValueError(f"generate {self.generate} is not a multiple of generate_tensor {tensor} processes")
        if tensor > 1 and self.compute.precision not in ("fp32", "auto"):  # auto is fp32 on CPUs, and generate is refused on GPUs
            raise ValueError(f"generate_tensor {tensor} is proved only in fp32: set compute.precision to fp32, or generate_tensor to 1")
        if self.schedule.ema or self.schedule.average:
            raise ValueError("answers are sampled with the weights that are trained: schedule.ema and schedule.average must be 0")
        spikes = "rollouts have no spike detection, and stop when two are skipped"
        self.optimizer.refuse_unused(spikes, "spike_window", "spike_limit", "max_skipped", group="optimizer.")
        if self.engine == "puna":
            self.refuse_unused("it is for engine vllm", "importance_cap", "gpu_memory")
        self.training(self.schedule.learning_rate)
        return self

    @property
    def updates(self) -> int:
        return self.epochs * self.minibatches

    def training(self, rate: float | None) -> TrainConfig:
        """Return the training loop's settings with the peak learning rate `rate` (None: the optimizer's default)."""
        return TrainConfig(
            steps=self.rollouts * self.updates, schedule=self.schedule.replace(learning_rate=rate), optimizer=self.optimizer,
            compute=self.compute,
        )  # fmt: skip


class PpoSettings(RolloutSettings):
    """Settings of proximal policy optimization (PPO) of a policy and its critic (Schulman et al. 2017)."""

    critic_learning_rate: float = Field(3e-4, gt=0, le=1, description="Peak learning rate of the critic, on the policy's schedule")
    value_clip: float = Field(0.2, gt=0, description="Clip range of the critic's values around the values at sampling")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token")
    lam: float = Field(0.95, ge=0, le=1, description="GAE's lambda")
    normalize_rewards: bool = Field(True, description="Shift and scale rewards by the mean and deviation of the first rollout's scores")


class GrpoSettings(RolloutSettings):
    """Settings of policy optimization without a critic (GRPO and its variants): the answers to a prompt are compared with each other."""

    answers: int = Field(8, ge=2, description="Answers to each prompt of a rollout, which are compared with each other")
    epochs: int = Field(1, ge=1, description="Passes over a rollout")
    baseline: Baseline = Field(
        "grpo", description="An answer's advantage. grpo: its reward minus the group's mean, divided by the group's standard deviation; "
        "mean (Dr. GRPO): its reward minus the group's mean; rloo: its reward minus the mean reward of the other answers"
    )  # fmt: skip
    credit: Credit = Field(
        "answer", description="Advantage of a token. answer: from its answer's reward; steps: the sum over the token's own and later steps "
        "(process supervision, Shao et al. 2024), the answer's reward included; the verifier must reward steps, as chain does"
    )  # fmt: skip
    surrogate: Surrogate = Field(
        "clipped", description="A token's loss. clipped: PPO's, without a gradient once the ratio leaves its range; cispo (MiniMax 2025): "
        "the log-probability times the detached ratio, capped at 1 + clip_high, so that every token has a gradient"
    )  # fmt: skip
    ratio: Ratio = Field(
        "token", description="Probability ratio to the sampling policy. token: of each token; sequence (GSPO, Zheng et al. 2025): the "
        "geometric mean over the answer, which is far nearer to 1; the authors set clip 0.0003 and clip_high 0.0004"
    )  # fmt: skip
    normalizer: Normalizer = Field(
        "tokens", description="Divisor of the loss. tokens: the update's tokens (DAPO); answers: each answer's tokens, then the number of "
        "answers (GRPO, Shao et al. 2024); constant: answers times max_tokens, which favours no length (Dr. GRPO, Liu et al. 2025)"
    )  # fmt: skip
    clip_high: float | None = Field(
        None, gt=0, description="Clip range of the probability ratio above 1, if it differs (DAPO: 0.28); null: clip"
    )
    turns: int = Field(
        1, ge=1, le=64, description="Maximum turns of the policy in an answer. Between turns, a tool replies, or the prompt's verifier if "
        "it is an environment. Only the policy's tokens are trained; max_tokens limits all turns and replies together"
    )  # fmt: skip
    resample: int = Field(
        0, ge=0, le=20, description="Maximum draws of more prompts in a rollout, until enough prompts have answers with different rewards; "
        "such prompts are preferred for training (DAPO's dynamic sampling); 0: none"
    )  # fmt: skip

    @model_validator(mode="after")
    def _one_loss(self) -> Self:
        if self.ratio == "sequence" and (self.normalizer != "answers" or self.surrogate != "clipped"):
            raise ValueError("ratio sequence weighs whole answers: set normalizer to answers and surrogate to clipped, not "
                f"{self.normalizer} and {self.surrogate}")  # fmt: skip
        if self.surrogate == "cispo" and self.clip_high is not None:
            self.refuse_unused("surrogate cispo has no lower bound, and clip_high is the upper one", "clip")
        if self.engine == "vllm" and self.turns > 1:
            raise ValueError(f"engine vllm answers in one turn: set turns to 1, not {self.turns}, or engine to puna")
        if self.credit == "steps" and (self.ratio == "sequence" or self.baseline == "rloo"):
            raise ValueError("credit steps compares steps, not answers: set ratio to token, and baseline to grpo or mean")
        return self
