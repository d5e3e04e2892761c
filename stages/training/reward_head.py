"""Fitting only a reward model's scalar head: Bradley-Terry as a logistic regression on a frozen model's hidden states."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.models.training.packing import pack
from puna.models.training.resumable_loop import iterate, rows_of
from puna.stages.contract import StageRun
from puna.stages.training.proxy_runs import cached_object
from puna.stages.training.rankings import all_pairs, order
from puna.stages.training.train import Example

if TYPE_CHECKING:
    from torch import Tensor

    from puna.models.transformer import Transformer

PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # L2 penalties on the head to try, for states of unit variance and a loss averaged over pairs
FOLDS = 5


class Pairs(NamedTuple):
    """Pairs of answers: differences [M, D] float64 of their states, better minus worse; weights [M] float64; folds [M] of the examples."""

    differences: Tensor
    weight: Tensor
    fold: Tensor

    def of(self, chosen: Tensor) -> Pairs:
        return Pairs(*(one[chosen] for one in self))


def fit_head(model: Transformer, examples: Sequence[Example], micro_batch_tokens: int, run: StageRun) -> None:
    """Fit the model's scalar head to these rankings, with equal weight for each example. Nothing else changes.

    The penalty is the one in `PENALTIES` whose fits best predict left-out examples (ties go to the largest). Metrics: `penalty`, and with
    more than `FOLDS` examples `cross_validated_accuracy`: each pair is judged by a head that was fitted, penalty included, without its
    example's fold. The baseline `cross_validated_longer_accuracy` prefers the longer answer."""
    import torch

    computed = answer_states(model, examples, micro_batch_tokens, run.progress, run.scratch / "states")
    pairs, scale = pairs_of(computed, examples, fold_of_each(examples, run.generator("folds")))
    if len(examples) > FOLDS:
        longer = [order(len(one.answers[a]) - len(one.answers[b])) for one in examples for a, b in all_pairs(one)]
        run.metric("cross_validated_accuracy", cross_validated(pairs, run.scratch))
        run.metric("cross_validated_longer_accuracy", sum(longer) / len(longer))
    penalty = best_penalty(pairs, run.scratch)
    run.metric("penalty", penalty)
    head = _fit(pairs, penalty, run.scratch) / scale
    with torch.no_grad():
        model.score.weight.copy_(head.to(model.score.weight)[None])


def pairs_of(states: Sequence[Tensor], examples: Sequence[Example], folds: Tensor) -> tuple[Pairs, Tensor]:
    """Return all pairs of ranked answers, with states scaled to unit variance; and the standard deviations [D]. `folds`: per example."""
    import torch

    doubles = [one.double() for one in states]
    scale = torch.cat(doubles).std(0, correction=0).clamp(min=1e-12)
    places = [(number, a, b) for number, example in enumerate(examples) for a, b in all_pairs(example)]
    own = torch.tensor([number for number, _, _ in places])
    prompts = _prompt_numbers(examples)[own]
    weight = 1 / torch.bincount(prompts).double()[prompts]
    return Pairs(torch.stack([(doubles[n][a] - doubles[n][b]) / scale for n, a, b in places]), weight, folds[own]), scale


def fold_of_each(examples: Sequence[Example], generator: np.random.Generator) -> Tensor:
    """Return the fold of each example, int64. If a prompt's answers need several examples, these are in the same fold."""
    import torch

    prompts = _prompt_numbers(examples)
    return torch.as_tensor(generator.permutation(int(prompts.max()) + 1) % FOLDS)[prompts]


def _prompt_numbers(examples: Sequence[Example]) -> Tensor:
    import torch

    numbers: dict[tuple[int, ...], int] = {}
    return torch.tensor([numbers.setdefault(tuple(example.prompt), len(numbers)) for example in examples])


def answer_states(
    model: Transformer, examples: Sequence[Example], micro_batch_tokens: int, progress: Callable[[int, int, str], None], folder: Path
) -> list[Tensor]:
    """Return each example's final hidden states [answers, D], at the last token of an answer or averaged over its tokens (the model's
    `reward_pooling`). They are saved in `folder`."""
    import torch

    from puna.models.training.objectives import Targets

    place = next(model.parameters()).device
    batches = pack([len(example) for example in examples], micro_batch_tokens)
    after = dict(zip(map(tuple, batches), itertools.accumulate(map(len, batches)), strict=True))

    def states_of(batch: list[int]) -> NDArray[np.float32]:
        some = [examples[i] for i in batch]
        targets = Targets.from_answers([e.prompt for e in some], [e.answers for e in some]).to(place)
        with torch.no_grad():
            hidden, mean = model.hidden(targets.forest), model.config.reward_pooling == "mean"
            states = hidden[targets.rows if mean else targets.last].float().cpu()
            if mean:
                states = torch.stack([some.mean(0) for some in states.split(targets.lengths.tolist())])
        progress(after[tuple(batch)], len(examples), "hidden states")
        return states.numpy()

    places = [i for batch in batches for i in batch]
    states = torch.from_numpy(rows_of(states_of, batches, folder, "batch of hidden states"))
    by_example = dict(zip(places, states.split([len(examples[i].answers) for i in places]), strict=True))
    return [by_example[i] for i in range(len(examples))]


def best_penalty(pairs: Pairs, scratch: Path | None = None) -> float:
    """Return the penalty with the smallest cross-validated loss; with a single fold, the largest. The fits are saved in `scratch`."""
    numbers = pairs.fold.unique().tolist()
    if len(numbers) < 2:
        return PENALTIES[-1]

    def loss(penalty: float) -> float:
        masks = [pairs.fold == number for number in numbers]
        fits = [(pairs.of(out), _fit(pairs.of(~out), penalty, scratch)) for out in masks]
        return sum(_loss(left.differences, left.weight, head) for left, head in fits)

    return min(PENALTIES, key=lambda penalty: (loss(penalty), -penalty))


def cross_validated(pairs: Pairs, scratch: Path | None = None) -> float:
    """Return the share of left-out pairs in the right order. Each is judged by a head fitted to the other folds, with a penalty chosen on
    them. The fits are saved in `scratch`."""
    right = 0.0
    for number in pairs.fold.unique().tolist():
        out = pairs.fold == number
        rest = pairs.of(~out)
        margins = pairs.of(out).differences @ _fit(rest, best_penalty(rest, scratch), scratch)
        right += sum(map(order, margins.tolist()))
    return right / len(pairs.fold)


def _fit(pairs: Pairs, penalty: float, scratch: Path | None) -> Tensor:
    """Return the head fitted to `pairs`, all pairs of some folds, with a penalty; read it from `scratch` if it is saved there."""
    import torch

    if scratch is None:
        return bradley_terry(pairs.differences, pairs.weight, penalty)
    folds = "-".join(map(str, pairs.fold.unique().tolist()))

    def make(state: Path) -> dict[str, Any]:
        return {"head": bradley_terry(pairs.differences, pairs.weight, penalty, state).tolist()}

    return torch.tensor(cached_object(scratch / f"fit-{folds}-{penalty:g}.json", make)["head"], dtype=torch.float64)


def _loss(differences: Tensor, weight: Tensor, head: Tensor) -> float:
    import torch.nn.functional as F

    return -float(weight @ F.logsigmoid(differences @ head))


def bradley_terry(differences: Tensor, weight: Tensor, penalty: float, state: Path | None = None) -> Tensor:
    """Return the head [D] that minimizes ``-weight . log sigmoid(differences @ head) / sum(weight) + penalty / 2 |head|^2``.

    `differences` [M, D] float64: better minus worse; `weight` [M] float64. The method is Newton's with step halving; the minimum is unique.
    The fit is saved in the folder `state` and resumed from it; raise ValueError if the folder belongs to a different fit."""
    import torch

    share, head = weight / weight.sum(), differences.new_zeros(differences.shape[1])
    identity = penalty * torch.eye(len(head), dtype=head.dtype)

    def value(at: Tensor) -> float:
        return _loss(differences, share, at) + penalty / 2 * float(at @ at)

    def newton() -> bool:
        now, doubt = value(head), torch.sigmoid(-(differences @ head))
        gradient = penalty * head - differences.T @ (share * doubt)
        if float(gradient.abs().max()) < 1e-10:
            return True
        curved = differences * (share * doubt * (1 - doubt))[:, None]
        step, length = torch.linalg.solve(differences.T @ curved + identity, gradient), 1.0
        while value(head - length * step) > now and length > 1e-6:
            length /= 2
        head.sub_(length * step)
        return False

    about = {"pairs": len(share), "penalty": penalty}
    iterate(newton, 100, lambda: {"head": head.numpy()}, lambda arrays: head.copy_(torch.tensor(arrays["head"])), state, about)
    return head
