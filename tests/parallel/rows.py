"""Comparisons with one process: a table of layouts, objectives and models, the rows that the tests run, and what no row proves."""

from __future__ import annotations

from typing import Any, NamedTuple

from puna.models.config import ModelConfig
from puna.models.training.parallel.layout import AXES, PROVED, Layout

from .features import MODELS, PLAIN, features_of, model_features, objective_features, setting_features

Sizes = dict[str, int]
EQUAL = 1e-5
"""Maximum relative difference in fp32."""
INTERLEAVED = {"pipeline": 2, "virtual_stages": 2}
MUON, GALORE, TWICE, BF16 = {"optimizer": "muon"}, {"optimizer": "galore"}, {"activation_checkpointing": True}, {"precision": "bf16"}


class Row(NamedTuple):
    """A training of two steps under a layout, which a test compares with one process. `more`: settings; `size`: layers, micro-batches."""

    layout: Sizes
    objective: str
    variant: str = "plain"
    more: dict[str, Any] = {}
    size: tuple[int, int] | None = None

    @property
    def has_same_bits(self) -> bool:
        """True if the gradients have the bits of one process: those of stages without copies, and without a matrix at both ends."""
        return set(self.layout) <= {"pipeline", "virtual_stages"} and not self._is_tied

    @property
    def rounds_alike(self) -> bool:
        """True if ranks compute the numbers of one process, in the same order within a micro-batch, and only then sum them in fp32."""
        return set(self.layout) <= {"data", "shard", *(() if self._is_tied else ("pipeline", "virtual_stages"))}

    @property
    def _is_tied(self) -> bool:
        return bool(MODELS[self.variant].get("tie_word_embeddings"))

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the job that compares."""
        more = self.more | ({"size": self.size} if self.size else {})
        return {"layout": self.layout, "objective": self.objective, "variant": self.variant, **more}

    @property
    def covers(self) -> set[tuple[Any, ...]]:
        """The row's set of axes; and each of its axes with each of its features, with its number of ranks, and with whether gradients must have one process's bits."""
        axes, features = Layout(**self.layout).axes, features_of(self.objective, self.variant, self.more)
        sizes = {(axis, size, self.has_same_bits) for axis, size in self.layout.items()}
        return {(axes,), *sizes, *((axis, feature) for axis in axes for feature in features)}

    def is_equal(self, result: dict[str, float]) -> bool:
        """True if a comparison finds what it may. Weights may differ more: clipping sums squares stage by stage, which rounds differently."""
        if result["unequal"]:
            return False
        if self.more.get("precision") == "bf16":
            return self.is_equal_in_bf16(result)
        return result["gradients"] <= (0 if self.has_same_bits else EQUAL) and result["rows"] <= EQUAL and result["weights"] <= 5 * EQUAL

    def is_equal_in_bf16(self, result: dict[str, float]) -> bool:
        """True if a training in bf16 differs from fp32 as one process in bf16 does: its gradients and weights have errors that are at most a
        quarter larger, those of a single weight at most five times (a norm of heads has few numbers). The log differs by at most 2 %. If ranks
        compute the same products as one process, gradients differ from one process's by as little as in fp32."""
        alike = not self.rounds_alike or result["gradients"] <= (0 if self.has_same_bits else EQUAL)
        return alike and result["excess"] <= 1.25 and result["excess of a weight"] <= 5 and result["rows"] <= 2e-2

    def __str__(self) -> str:
        layout = " ".join(f"{axis} {size}" for axis, size in self.layout.items())
        return "-".join([layout, self.objective, self.variant, *(f"{k} {v}" for k, v in self.more.items()), *map(str, self.size or ())])


def _one_axis(axis: str) -> list[Row]:
    two, three, rich = {axis: 2}, {axis: 3}, "rich_moe" if axis == "expert" else "rich"
    rows = [
        Row(two, "language and kto", "moe" if axis == "expert" else "plain"), Row(two, "scalar", rich, MUON), Row(three, "pretrain", rich, TWICE),
    ]  # fmt: skip
    return rows if axis == "tensor" else [*rows, Row(two, "sft", "mla_moe" if axis == "expert" else "rich_mla", MUON)]


def _axes(axes: frozenset[str]) -> list[Row]:
    """Return rows of a set of axes: all objectives on all features of a model, optimizers, adapters, bf16. Stages are of two layers and of one."""
    layout = dict.fromkeys(sorted(axes), 2)
    other = layout | (INTERLEAVED if "pipeline" in axes else {})
    if "expert" in axes:
        # After a step of GaLore, six experts differ by up to 8e-4 although their gradients differ by 5e-7: a matrix has nearly equal directions.
        rows = [Row(layout, "language and kto", "rich_moe"), Row(layout, "scalar", "mla_moe", MUON | TWICE), Row(layout, "sft", "moe", GALORE)]
        return [*rows, Row(layout, "sft", "dora_moe"), Row(layout, "sft", "moe", BF16)]
    adapters, latent = ("rich_lora", "rich") if "tensor" in axes else ("rich_dora", "rich_mla")
    rows = [Row(layout, "language and kto", "rich", GALORE), Row(other, "scalar", adapters if len(axes) > 2 else latent, MUON | TWICE)]
    if len(axes) > 2:
        return [*rows, Row(layout, "sft", latent, BF16)]
    return [*rows, Row(layout, "sft", adapters), Row(layout, "sft", "plain", BF16)]


SETS = sorted((frozenset(some) for some in PROVED), key=lambda axes: (len(axes), sorted(axes)))


ROWS = [
    *(row for axis in ("data", "shard", "tensor", "context", "expert") for row in _one_axis(axis)),
    *(row for axes in SETS if len(axes) > 1 for row in _axes(axes)),
    *(Row({axis: 2}, "sft", "rich_lora" if axis == "tensor" else "dora_moe" if axis == "expert" else "rich_dora") for axis in AXES),
    *(Row({axis: 3}, "reward", "rich_lora", BF16 | MUON) for axis in AXES if axis != "expert"), Row({"data": 2}, "sft", "nf4"), Row(INTERLEAVED, "sft", "lora", BF16), Row({"data": 2}, "sft", "rich_moe"),
    *(Row({axis: 2}, "outputs", "capped", GALORE) for axis in AXES if axis != "expert"),
    *(Row({axis: 2}, "outputs", "moe" if axis == "expert" else "plain", BF16) for axis in AXES),
    *(Row({axis: 3}, "scalar", "rich_moe" if axis == "expert" else "rich", BF16 | more) for axis, more in zip(AXES, [MUON, GALORE, TWICE] * 2, strict=True)),
    Row({"shard": 2}, "sft", "rich_moe"), Row({"data": 2, "shard": 2}, "sft", "rich_moe"), Row({"context": 4}, "outputs", "rich"), Row({"context": 4}, "pretrain"),
    Row({"context": 4, "tensor": 2}, "pretrain", "rich"), Row({"context": 4, "pipeline": 2}, "pretrain", "rich"), Row({"shard": 4, "pipeline": 2}, "pretrain", "rich", size=(3, 1)),
    Row({"context": 4}, "pretrain", "mla"), Row({"expert": 4}, "sft", "moe", TWICE | GALORE), Row({"pipeline": 4, "tensor": 2}, "pretrain", "tied", MUON),
    *(Row(layout, objective) for layout in ({"pipeline": 2}, INTERLEAVED) for objective in ("language and kto", "scalar")),
    Row({"pipeline": 3}, "pretrain", "rich", TWICE), Row({"pipeline": 2}, "scalar", "rich_mla", MUON), Row({"pipeline": 4}, "sft", "rich", GALORE),
    Row(INTERLEAVED, "sft", "rich", TWICE | MUON), Row(INTERLEAVED, "sft", "rich_mla", TWICE | GALORE),
    Row({"pipeline": 2, "virtual_stages": 3}, "pretrain", size=(7, 1)), Row({"pipeline": 4}, "pretrain", size=(5, 2)),
]  # fmt: skip
"""`context` of four has micro-batches of three tokens, of which a rank has none. Micro-batches of a pipeline are more than its ranks, fewer,
and no multiple of them; stages are of one layer and of two."""


def covering(rows: list[Row]) -> list[Row]:
    """Return few rows that together cover what all rows cover, found greedily by what a row adds for each of its processes."""
    chosen, left = list[Row](), set().union(*(row.covers for row in rows))
    while left:
        chosen.append(max(rows, key=lambda row: len(row.covers & left) / (2 + Layout(**row.layout).processes)))
        left -= chosen[-1].covers
    return chosen


def proved(axes: frozenset[str]) -> set[str]:
    """Return the features that rows prove under a set of axes."""
    rows = [row for row in ROWS if Layout(**row.layout).axes == axes]
    return {feature for row in rows for feature in features_of(row.objective, row.variant, row.more)}


def refused(axes: frozenset[str], feature: str) -> bool:
    """True if a training with a feature is refused under a set of axes."""
    layout = Layout(**dict.fromkeys(axes, 2))
    shapes = [MODELS["moe"] if "expert" in axes else {}]
    if feature in model_features():
        outer, _, inner = feature.partition(".")
        able = [one for one in MODELS.values() if outer in one and (not inner or inner in one[outer])]
        shapes = able or [{}]
    used: dict[str, Any] = {"dora": feature == "lora.dora", "nf4": feature == "lora.quantization", "dropout": False}
    configs = [ModelConfig(**PLAIN | one) for one in shapes]
    return all(layout.refusal("cpu", config, **used) for config in configs)


def unproved(axes: frozenset[str]) -> set[str]:
    """Return the features of objectives, models and settings that under a set of axes no row proves, and no error refuses."""
    every = objective_features() | model_features() | setting_features()
    return {feature for feature in every - proved(axes) if not refused(axes, feature)}
