"""What the ranks train: models and objectives, and the features that each of them has."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from puna.models.config import Mla, ModelConfig, Moe
from puna.models.training import objectives as o
from puna.models.training.losses import LOSSES
from puna.models.training.objectives.base import Ask, Metrics, Model, Objective, Targets, Totals
from puna.models.training.optimizers import OPTIMIZERS
from puna.models.training.parallel.context import ContextTransformer
from puna.models.training.settings import LoraSettings

PLAIN: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.1}
MLA = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
RICH: dict[str, Any] = {
    "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4, "tie_word_embeddings": True, "qkv_bias": True, "o_bias": True,
    "qk_norm": True, "sliding_window": 5, "sliding_layers": (1,), "parallel_block": True, "reward_pooling": "mean", "final_logit_softcapping": 5.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
}  # fmt: skip
"""All features of a model with plain attention; heads that two and three ranks can divide."""
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deep": {"num_hidden_layers": 4},
    "tied": {"tie_word_embeddings": True},
    "biases": {"qkv_bias": True, "o_bias": True, "qk_norm": True},
    "window": {"sliding_window": 5, "sliding_layers": (1,)},
    "parallel_block": {"parallel_block": True},
    "rich": RICH,
    "capped": {"final_logit_softcapping": 5.0},
    "moe": {"moe": MOE},
    "rich_moe": RICH | {"moe": MOE | {"num_experts": 6, "norm_topk_prob": False}},
    "mla": {"num_key_value_heads": 4, "mla": MLA},
    "rich_mla": {
        "num_key_value_heads": 4, "mla": MLA | {"q_lora_rank": 6}, "qkv_bias": True, "o_bias": True, "parallel_block": True,
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 8},
    },
    "mla_moe": {"num_key_value_heads": 4, "mla": MLA | {"q_lora_rank": 6}, "moe": MOE},
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"rslora": True, "loraplus_ratio": 4.0, "targets": ("q_proj", "down_proj")}, "dora": {"dora": True, "alpha": 8.0},
    "pissa": {"initialization": "pissa"}, "dropout": {"dropout": 0.1}, "nf4": {"quantization": "nf4"},
    "rich_lora": {"rslora": True, "loraplus_ratio": 4.0, "targets": ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"), "initialization": "pissa", "alpha": 8.0},
    "rich_dora": {"rslora": True, "loraplus_ratio": 4.0, "targets": ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"), "dora": True, "alpha": 8.0},
    "dora_moe": {"rslora": True, "loraplus_ratio": 4.0, "targets": ("q_proj", "o_proj"), "dora": True, "alpha": 8.0},
}  # fmt: skip
"""Variants of adapters, on the plain model unless their name has another."""
MODELS |= {key: RICH if "rich" in key else {"moe": MOE} if "moe" in key else {} for key in ADAPTERS}
SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "initializer_range", "zero_residual", "rope_theta", "rms_norm_eps", "model_type"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
}
"""Fields of a model's shape that are sizes, numbers or initial values: each value runs the same code."""

Declared = dict[str, tuple[type[Objective[Any]], dict[str, Any]]]


def _pair_losses() -> Declared:
    more: dict[str, dict[str, float]] = {"sigmoid": {"label_smoothing": 0.1, "length_weight": 0.02}}
    return {
        name: (o.Dpo, {"loss": name, "beta": 0.3, "nll_weight": 0.1 * (1 + i % 3), "nll_normalization": ("sequence", "tokens")[i % 2],
                       "parameters": more.get(name, {})})
        for i, (name, one) in enumerate(sorted(LOSSES.items())) if one.of == "pairs" and one.function.__module__.startswith("puna.")
    }  # fmt: skip


def _answer_losses() -> Declared:
    more: dict[str, dict[str, float]] = {"kto": {"desirable_weight": 1.5}}
    return {
        f"{name} {of}": (o.Kto, {"loss": name, "beta": 0.2, "nll_weight": 0.1, "nll_normalization": of, "parameters": more.get(name, {})})
        for name, one in sorted(LOSSES.items()) if one.of == "answers" and one.function.__module__.startswith("puna.")
        for of in ("sequence", "tokens")
    }  # fmt: skip


TEACHER, HEAD = "teacher", "head"
"""Values that `objective` replaces: a network, and the head of a language model."""
LANGUAGE: Declared = {
    "pretrain": (o.LanguageModeling, {}), "z_loss": (o.LanguageModeling, {"z_loss": 0.1}), "sft": (o.Sft, {}), **_pair_losses(), "distill": (o.Distill, {"teacher": TEACHER, "beta": 0.5, "temperature": 1.3}),
    "ppo": (o.Ppo, {"entropy_weight": 0.05, "temperature": 0.9}), "dapo": (o.Ppo, {"clip_high": 0.3, "clip": 0.25, "normalizer": "answers"}),
    "cispo": (o.Ppo, {"surrogate": "cispo", "normalizer": "constant", "max_tokens": 9}),
    "gspo": (o.Ppo, {"ratio": "sequence", "normalizer": "answers", "clip": 0.3}),
}  # fmt: skip
SCALAR: Declared = {
    "reward": (o.Reward, {}), "reward with nll": (o.Reward, {"nll_weight": 0.5, "head": HEAD}), "value": (o.Value, {"clip": 0.3}),
    "reward with capped nll": (o.Reward, {"nll_weight": 0.5, "head": HEAD, "softcap": 5.0}),
}
DECLARED: dict[str, Declared] = {
    "language": LANGUAGE, "language and kto": LANGUAGE | _answer_losses(), "scalar": SCALAR,
    "outputs": {name: LANGUAGE[name] for name in ("z_loss", "sft", "distill", "ppo", "sigmoid")},
    "pretrain": {"pretrain": (o.LanguageModeling, {})},
    "dpo": {"dpo": (o.Dpo, {})}, "grpo": {"grpo": (o.Ppo, {"clip_high": 0.3})}, "reward": {"reward": (o.Reward, {})},
    **{name: {name: LANGUAGE[name]} for name in ("sft", "distill", "ppo")}, "value": {"value": (o.Value, {})},
}  # fmt: skip
"""What a row trains by: one objective, or the sum of several on the same forests. `outputs` has one objective for each way of using the
output layer: losses of preferences and of answers differ only in what they compute from the same log-probs."""
WITH_SCALARS = ("scalar", "reward", "value")


def features_of(objective: str, variant: str, more: Mapping[str, Any]) -> set[str]:
    """Return the names of what a row trains: objectives and their parameters, features of the model, settings of the training."""
    found = {f"optimizer.{more.get('optimizer', 'adamw')}", *(name for name, value in more.items() if value is True)}
    found |= {"bf16"} if more.get("precision") == "bf16" else set()
    for cls, own in DECLARED[objective].values():
        found |= {cls.__name__, *_named(cls, own)}
    shape = ModelConfig(**PLAIN | MODELS[variant])
    found |= {name for name in model_features() if _differs(shape, name)}
    if variant in ADAPTERS:
        found |= {f"lora.{name}" for name in LoraSettings.model_fields if name in ADAPTERS[variant]} | {"lora"}
    return found


def _named(cls: type[Objective[Any]], own: Mapping[str, Any]) -> set[str]:
    choices = _choices(cls)
    given = {name: p.default for name, p in inspect.signature(cls).parameters.items()} | dict(own)
    return {f"{cls.__name__}.{k}" + (f"={v}" if k in choices else "") for k, v in given.items() if k in choices or k in own}


def _choices(cls: type[Objective[Any]]) -> dict[str, Sequence[str]]:
    """Return the values of each parameter of an objective that is one of several names."""
    hints = get_type_hints(cls.__init__)
    found: dict[str, Sequence[str]] = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    if "loss" in hints:
        of = "answers" if cls is o.Kto else "pairs"
        found["loss"] = [name for name, one in LOSSES.items() if one.of == of and one.function.__module__.startswith("puna.")]
    return found


def objective_features() -> set[str]:
    """Return the name of each objective, and of each parameter of one, with its values where it is one of several names."""
    found, left = set[str](), list[type[Any]]([Objective])
    while left:
        cls = left.pop()
        left += (below := cls.__subclasses__())
        if not below and cls.__module__.startswith("puna."):
            choices = _choices(cls)
            found |= {cls.__name__} | {f"{cls.__name__}.{name}={value}" for name, values in choices.items() for value in values}
            found |= {f"{cls.__name__}.{name}" for name in inspect.signature(cls).parameters if name not in choices}
    return found


def model_features() -> set[str]:
    """Return the names of the fields that make a model differ from a plain one, and not in its size alone."""
    inner = {f"{name}.{field}" for name, kind in (("moe", Moe), ("mla", Mla)) for field in kind.model_fields.keys() - SIZES}
    return ModelConfig.model_fields.keys() - SIZES | inner


def _differs(shape: ModelConfig, name: str) -> bool:
    outer, _, inner = name.partition(".")
    if inner and getattr(shape, outer) is not None:
        value, field = getattr(getattr(shape, outer), inner), type(getattr(shape, outer)).model_fields[inner]
        return bool(value != field.default)
    return not inner and bool(getattr(shape, outer) != ModelConfig.model_fields[outer].default)


def setting_features() -> set[str]:
    """Return the names of settings of a training that change what ranks compute together in a step. Adapters are initialized before."""
    lora = {f"lora.{name}" for name in LoraSettings.model_fields if name not in ("rank", "dropout", "keep", "initialization")}
    own = {f"optimizer.{name}" for name, kind in OPTIMIZERS.items() if kind.__module__.startswith("puna.")}
    return {"activation_checkpointing", "bf16", "lora", *lora, *own}


# --- batches ---


@dataclass(frozen=True)
class EveryBatch(o.Batch):
    """The same forest as a batch of each of several objectives."""

    parts: dict[str, Any]


class Every(Objective[EveryBatch]):
    """The sum of several objectives, whose metrics begin with their names. A model passes each forest once, as under one objective."""

    def __init__(self, objectives: Mapping[str, Objective[Any]]) -> None:
        self.objectives = objectives

    def totals(self, batch: EveryBatch) -> dict[str, float]:
        return {f"{name}|{key}": v for name, one in self.objectives.items() for key, v in one.totals(batch.parts[name]).items()}

    def measure(self, ask: Ask, batch: EveryBatch) -> dict[str, float]:
        return {f"{name}|{key}": v for name, one in self.objectives.items() for key, v in one.measure(ask, batch.parts[name]).items()}

    def loss(self, model: Model, batch: EveryBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        losses, metrics = list[Tensor](), Metrics()
        with passed_once(model):
            for name, one in self.objectives.items():
                own = {key.partition("|")[2]: value for key, value in totals.items() if key.startswith(f"{name}|")}
                loss, values = one.loss(model, batch.parts[name], own)
                losses.append(loss)
                metrics |= {f"{name} loss": loss.detach(), **{f"{name} {key}": value for key, value in values.items()}}
        return torch.stack(losses).sum(), metrics


@contextlib.contextmanager
def passed_once(model: Any) -> Iterator[None]:
    """Within the context, let a model compute the states and the log-probs of a forest once."""

    def once(compute: Callable[..., Any]) -> Callable[..., Any]:
        known: dict[Any, Any] = {}

        def call(forest: Any, *given: Any, **more: Any) -> Any:
            key = (id(forest), *(tuple(one.tolist()) if isinstance(one, Tensor) else one for one in given), *more.values())
            if key not in known:
                known[key] = compute(forest, *given, **more)
            return known[key]

        return call

    names = ("hidden", "token_logprobs", *(("_own_hidden",) if isinstance(model, ContextTransformer) else ()))
    with mock.patch.multiple(model, **{name: once(getattr(model, name)) for name in names}):
        yield


def _conversations(step: int, count: int) -> list[Targets]:
    """Return micro-batches of unequal length, each with prompts of two or three answers with masks."""
    rng = np.random.default_rng([3, step])
    parts = []
    for part in range(count):
        prompts = [rng.integers(0, 37, rng.integers(3, 9)).tolist() for _ in range(1 + part % 3)]
        answers = [[rng.integers(0, 37, rng.integers(2, 12)).tolist() for _ in range(2 + (part + i) % 2)] for i in range(len(prompts))]
        masks = [[(rng.random(len(a)) < 0.8).tolist() for a in row] for row in answers]
        parts.append(Targets.from_answers(prompts, answers, masks))
    return parts


def _numbers(rng: np.random.Generator, middle: float, width: float, count: int) -> Tensor:
    return torch.from_numpy(rng.normal(middle, width, count).astype(np.float32))


def _dpo(t: Targets, rng: np.random.Generator) -> o.DpoBatch:
    first = torch.tensor([int((t.prompt == p).nonzero()[0]) for p in range(int(t.prompt.max()) + 1)])
    return o.DpoBatch(t, first, first + 1, _numbers(rng, -20, 3, t.answers))


def _kto(t: Targets, rng: np.random.Generator) -> o.KtoBatch:
    """Return labelled answers, with mismatched ones to the first prompt only, and none at all in short micro-batches."""
    answers = [[rng.integers(0, 37, rng.integers(2, 9)).tolist() for _ in range(2 * (i == 0 and len(t) > 30))] for i in range(int(t.prompt.max()) + 1)]
    others = Targets.from_answers([rng.integers(0, 37, 4).tolist() for _ in answers], answers)
    good = torch.from_numpy(rng.random(t.answers) < 0.5)
    return o.KtoBatch(t, good, _numbers(rng, -20, 3, t.answers), others, _numbers(rng, -40, 3, others.answers))


def _ppo(t: Targets, rng: np.random.Generator) -> o.PpoBatch:
    numbers = [_numbers(rng, m, 0.7, len(t.tokens)) for m in (-4, 0, 0, 0)]
    return o.PpoBatch(t, *numbers, left_out=3 if len(t) % 2 else 0, answers_left_out=len(t) % 2)


def _reward(t: Targets, rng: np.random.Generator) -> o.RewardBatch:
    return o.RewardBatch(t, torch.from_numpy(rng.permutation(t.answers)))


BATCHES: dict[type[Any], Callable[[Targets, np.random.Generator], Any]] = {
    o.LanguageModeling: lambda t, _: t, o.Sft: lambda t, _: t, o.Distill: lambda t, _: t, o.Dpo: _dpo, o.Kto: _kto, o.Reward: _reward, o.Ppo: _ppo, o.Value: _ppo,
}  # fmt: skip


def micro_batches(objective: str, step: int, count: int = 3) -> list[Any]:
    rng = np.random.default_rng([5, step])
    if objective == "pretrain":
        return [Targets.from_documents([rng.integers(0, 37, rng.integers(2, 14)).tolist() for _ in range(1 + i % 3)]) for i in range(count)]
    parts = _conversations(step, count)
    rows = [{name: BATCHES[cls](t, rng) for name, (cls, _) in DECLARED[objective].items()} for t in parts]
    return [EveryBatch(t, row) if len(row) > 1 else next(iter(row.values())) for t, row in zip(parts, rows, strict=True)]


def objective_of(name: str, teacher: Callable[[], Any]) -> Objective[Any]:
    """Return what a row trains by. `teacher`: gives the network of a language model."""
    made: dict[str, Objective[Any]] = {}
    for part, (cls, own) in DECLARED[name].items():
        values = {key: teacher() if value == TEACHER else value for key, value in own.items()}
        if values.get("head") == HEAD:
            generator = torch.Generator().manual_seed(8)
            values["head"] = torch.empty(PLAIN["vocab_size"], PLAIN["hidden_size"]).normal_(0, 0.2, generator=generator)
        made[part] = cls(**values)
    return Every(made) if len(made) > 1 else next(iter(made.values()))
