"""The order in which a pipeline's ranks run their stages on a step's micro-batches, as data (Narayanan et al. 2021)."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple


class Action(NamedTuple):
    """One pass of a micro-batch through a stage."""

    micro_batch: int
    stage: int
    backward: bool


def schedule(rank: int, ranks: int, stages: int, micro_batches: int) -> list[Action]:
    """Return a rank's actions in order. Stage s is on rank s modulo `ranks`: one stage a rank gives 1F1B, several its interleaved form.

    As many micro-batches as ranks pass a rank's stages in turn, then the next ones. A rank first runs `stages - 1 - rank` passes forward,
    then one forward and one backward in turn. It never holds the activations of more than `stages - rank` passes: at most those that the
    first rank of 1F1B has. Each stage runs the micro-batches backward in their order, so gradients add up as in one process.
    """
    own, rounds = range(rank, stages, ranks), [range(i, min(i + ranks, micro_batches)) for i in range(0, micro_batches, ranks)]
    forward = [Action(number, stage, False) for some in rounds for stage in own for number in some]
    backward = [Action(number, stage, True) for some in rounds for stage in reversed(own) for number in some]
    ahead = stages - 1 - rank
    turns = zip_longest(forward[ahead:], backward)
    return forward[:ahead] + [action for turn in turns for action in turn if action is not None]


def lane(source: int, target: int, ranks: int) -> int:
    """Return which of four groups of processes carries a message from one stage to another: in each, two ranks have one direction.

    Direction means from the first ranks to the last or back; a message between the last rank and the first one goes round.
    """
    return 2 * (target % ranks - source % ranks != target - source) + (target < source)
