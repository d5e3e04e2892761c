"""The order in which a pipeline's ranks run their stages on a step's micro-batches, as lists of actions (Narayanan et al. 2021)."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple


class Action(NamedTuple):
    """One forward or backward pass of a micro-batch through a stage."""

    micro_batch: int
    stage: int
    backward: bool


def schedule(rank: int, ranks: int, stages: int, micro_batches: int) -> list[Action]:
    """Return a rank's actions in order. Stage s is on rank s modulo `ranks`: one stage per rank gives 1F1B, several its interleaved form.

    Groups of `ranks` micro-batches pass a rank's stages in turn. A rank first runs `stages - 1 - rank` forward passes, then one forward
    and one backward pass in turn. It never holds the activations of more than `stages - rank` passes: no more memory than the first
    rank of 1F1B needs. Each stage runs backward passes in the order of the micro-batches, so gradients add up as in one process.
    """
    own, rounds = range(rank, stages, ranks), [range(i, min(i + ranks, micro_batches)) for i in range(0, micro_batches, ranks)]
    forward = [Action(number, stage, False) for some in rounds for stage in own for number in some]
    backward = [Action(number, stage, True) for some in rounds for stage in reversed(own) for number in some]
    ahead = stages - 1 - rank
    turns = zip_longest(forward[ahead:], backward)
    return forward[:ahead] + [action for turn in turns for action in turn if action is not None]


def lane(source: int, target: int, ranks: int) -> int:
    """Return which of four process groups carries a message between two stages: in a group, any two ranks send in one direction only.

    Groups 0 and 1 carry messages to the next and the previous rank; 2 and 3 carry those between the last and the first rank.
    """
    return 2 * (target % ranks - source % ranks != target - source) + (target < source)
