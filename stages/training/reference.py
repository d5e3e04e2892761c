"""Answers as the targets of a preference loss, and their log-probabilities under the reference model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from puna.stages.contract import StageRun
from puna.stages.draws import identifier
from puna.stages.executors import ranks
from puna.stages.training.train import Example, by_answer, device, training_precision
from puna.storage import Artifact

if TYPE_CHECKING:
    import torch

    from puna.models.accounting import Precision
    from puna.models.training.objectives import Targets
    from puna.models.training.parallel.base import Parallel
    from puna.models.transformer import Transformer
    from puna.stages.training.settings import DpoConfig


def targets_of(examples: Sequence[Example], mask_format: bool) -> Targets:
    """Return prompts with their answers, packed into one row. `mask_format`: leave masked tokens out of preference terms."""
    from puna.models.training.objectives import Targets

    masks = [e.masks if mask_format else [[True] * len(a) for a in e.answers] for e in examples]
    return Targets.from_answers([e.prompt for e in examples], [e.answers for e in examples], masks)


class Reference:
    """Log-probabilities of answers under the reference model of a preference loss, read from `stored` or computed."""

    def __init__(self, config: DpoConfig, run: StageRun, stored: Mapping[str, float] | None = None) -> None:
        self._config, self._run, self._stored = config, run, stored or {}
        self.computed = 0

    def of(self, model: Transformer, examples: Sequence[Example], note: str = "reference") -> list[list[float]]:
        """Return the sum of every answer's unmasked log-probs in nats, prompt by prompt; zeros if the loss needs no reference.

        The model computes in the precision of training; otherwise ratios would contain bf16 rounding errors."""
        from puna.models.training.parallel.parallel import part_of
        from puna.models.training.trainer import computing_in

        config = self._config
        if not config.preference.needs_reference:
            return [[0.0] * len(example.answers) for example in examples]
        names = [answer_ids(example) for example in examples]
        missing = [i for i, some in enumerate(names) if not all(name in self._stored for name in some)]
        self.computed += sum(len(names[i]) for i in missing)
        size, layout = config.training.compute.micro_batch_tokens, config.training.compute.layout
        precision = training_precision(config.training.compute, self._run)
        held = part_of(model, layout, ranks.mesh(layout), device(), None if precision == "fp32" else precision)
        with computing_in(held.model, precision):  # after training, the pieces of a divided model are in fp32
            sums = sum_logprobs(
                held, [examples[i] for i in missing], config.mask_format, size, lambda done, total: self._run.progress(done, total, note)
            )
        computed = dict(zip(missing, sums, strict=True))
        return [computed[i] if i in computed else [self._stored[name] for name in some] for i, some in enumerate(names)]


def sum_logprobs(
    model: Transformer | Parallel, examples: Sequence[Example], mask_format: bool, micro_batch_tokens: int,
    progress: Callable[[int, int], None],
) -> list[list[float]]:  # fmt: skip
    """Return the summed unmasked log-probability of every answer under the model, prompt by prompt."""
    from puna.models.training.objectives import reference_logprobs
    from puna.models.training.parallel.parallel import alone

    def compute(some: list[Example]) -> torch.Tensor:
        return alone(model).ask(reference_logprobs, targets_of(some, mask_format))

    return [values.tolist() for values in by_answer(examples, micro_batch_tokens, compute, progress)]


def stored_logprobs(preferences: Sequence[Artifact], model: Artifact, config: DpoConfig, run: StageRun) -> dict[str, float]:
    """Return answer id → log-probability under `model` in the training precision, as `reference_logprobs` stored it with `preferences`.
    Return nothing if training quantizes the matrices, since the reference then has other values."""
    if config.quantization != "none":
        return {}
    name = name_of(model, config.mask_format, training_precision(config.training.compute, run))
    tables = [artifact.read("scores").to_pylist() for artifact in preferences if "scores" in artifact.tables]
    return {row["id"]: row["value"] for rows in tables for row in rows if row["name"] == name}


def name_of(model: Artifact, mask_format: bool, precision: Precision) -> str:
    """Return the `name` of a model's log-probabilities in the table `scores`."""
    return f"{'content' if mask_format else 'answer'}_logprob {precision} {model.data_digest}"


def answer_ids(example: Example) -> list[str]:
    """Return an id for each answer of an example: a digest of the prompt's and answer's tokens, and of the mask."""
    return [identifier(example.prompt, ids, mask) for ids, mask in zip(example.answers, example.masks, strict=True)]
