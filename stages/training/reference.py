"""Answers as the targets of a preference loss, and the reference's log-probabilities of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from puna.stages.contract import StageRun
from puna.stages.draws import identifier
from puna.stages.training.train import Example, by_answer, training_precision
from puna.storage import Artifact

if TYPE_CHECKING:
    import torch

    from puna.models.machine import Precision
    from puna.models.training.objectives import Targets
    from puna.models.training.objectives.base import Model
    from puna.models.transformer import Transformer
    from puna.stages.training.settings import DpoConfig


def targets_of(examples: Sequence[Example], mask_format: bool) -> Targets:
    """The prompts with their answers in one row; what is masked counts in no preference term."""
    from puna.models.training.objectives import Targets

    masks = [e.masks if mask_format else [[True] * len(a) for a in e.answers] for e in examples]
    return Targets.from_answers([e.prompt for e in examples], [e.answers for e in examples], masks)


class Reference:
    """The log-probabilities of answers under the reference of a preference loss: those that were kept, the others computed."""

    def __init__(self, config: DpoConfig, run: StageRun, known: Mapping[str, float] | None = None) -> None:
        """`known`: see `kept`."""
        self._config, self._run, self._known = config, run, known or {}
        self.computed = 0

    def of(self, model: Transformer, examples: Sequence[Example], note: str = "reference") -> list[list[float]]:
        """Summed unmasked log-probability of every answer, prompt by prompt; zeros where the loss needs no reference.

        The model computes as it does in training: a ratio of bf16 to fp32 would have bf16's rounding in it.
        """
        from puna.models.training.trainer import computing_in

        config = self._config
        if not config.preference.needs_reference:
            return [[0.0] * len(example.answers) for example in examples]
        names = [written(example) for example in examples]
        missing = [i for i, some in enumerate(names) if not all(name in self._known for name in some)]
        self.computed += sum(len(names[i]) for i in missing)
        size = config.training.compute.micro_batch_tokens
        with computing_in(model, training_precision(config.training.compute, self._run)):
            found = summed(
                model, [examples[i] for i in missing], config.mask_format, size, lambda done, total: self._run.progress(done, total, note)
            )
        made = dict(zip(missing, found, strict=True))
        return [made[i] if i in made else [self._known[name] for name in some] for i, some in enumerate(names)]


def summed(
    model: Model, examples: Sequence[Example], mask_format: bool, micro_batch_tokens: int, progress: Callable[[int, int], None]
) -> list[list[float]]:
    """Summed unmasked log-probability of every answer under the model as it is, prompt by prompt."""
    from puna.models.training.objectives import reference_logprobs

    def compute(some: list[Example]) -> torch.Tensor:
        return reference_logprobs(model, targets_of(some, mask_format))

    return by_answer(examples, micro_batch_tokens, compute, progress)


def kept(preferences: Sequence[Artifact], model: Artifact, config: DpoConfig, run: StageRun) -> dict[str, float]:
    """What stage `reference_logprobs` wrote beside these preferences of this model in this precision, by the names of `written`."""
    name = name_of(model, config.mask_format, training_precision(config.training.compute, run))
    tables = [artifact.read("scores").to_pylist() for artifact in preferences if "scores" in artifact.tables]
    return {row["id"]: row["value"] for rows in tables for row in rows if row["name"] == name}


def name_of(model: Artifact, mask_format: bool, precision: Precision) -> str:
    """What the log-probabilities of a model are called in `scores`."""
    return f"{'content' if mask_format else 'answer'}_logprob {precision} {model.data_digest}"


def written(example: Example) -> list[str]:
    """A name for each answer of an example with its prompt: their tokens, and which of them are masked."""
    return [identifier(example.prompt, ids, mask) for ids, mask in zip(example.answers, example.masks, strict=True)]
