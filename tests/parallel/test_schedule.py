"""The order of a pipeline's passes, simulated for many sizes."""

from __future__ import annotations

import itertools
from collections import deque

import pytest

from puna.models.training.parallel.pipeline import Action, lane, schedule

FORWARD, BACKWARD = 1, 2
"""Time units of a forward and of a backward pass through a stage."""
SIZES = [(ranks, groups, count) for ranks in range(2, 6) for groups in range(1, 5) for count in range(1, 13)]


def play(ranks: int, stages: int, micro_batches: int) -> tuple[int, list[int]]:
    """Return the time at which all passes have ended, and the largest number of passes whose activations each rank held.

    Ranks wait for what they receive. Messages on a lane between two ranks must arrive in the order of the receives. A rank waits for its
    oldest message on a lane while more than `ranks` messages are under way.
    """
    programs = [deque(schedule(rank, ranks, stages, micro_batches)) for rank in range(ranks)]
    lanes: dict[tuple[int, int, int], deque[tuple[Action, int]]] = {}
    clocks, held, peaks = [0] * ranks, [set[tuple[int, int]]() for _ in range(ranks)], [0] * ranks
    while any(programs):
        ended = False
        for rank, program in enumerate(programs):
            while program and all(len(sent) <= ranks for (source, _, _), sent in lanes.items() if source == rank):
                number, stage, backward = action = program[0]
                source, target = (stage + 1, stage - 1) if backward else (stage - 1, stage + 1)
                start = clocks[rank]
                if 0 <= source < stages:
                    arriving = lanes.get((source % ranks, rank, lane(source, stage, ranks)))
                    if not arriving:
                        break
                    message, arrival = arriving.popleft()
                    assert message == Action(number, source, backward), f"rank {rank} receives {message} where {action} comes"
                    start = max(start, arrival)
                program.popleft()
                ended, clocks[rank] = True, start + (BACKWARD if backward else FORWARD)
                if 0 <= target < stages:
                    lanes.setdefault((rank, target % ranks, lane(stage, target, ranks)), deque()).append((action, clocks[rank]))
                (held[rank].remove if backward else held[rank].add)((number, stage))
                peaks[rank] = max(peaks[rank], len(held[rank]))
        assert ended, f"all ranks wait: {[program[0] for program in programs if program]}"
    assert not any(lanes.values()) and not any(held)
    assert all((target, source, number) not in lanes for source, target, number in lanes), "two ranks send to each other on one lane"
    return max(clocks), peaks


def test_no_rank_waits_for_ever_or_holds_more_than_its_bound():
    for ranks, groups, count in SIZES:
        stages = ranks * groups
        assert play(ranks, stages, count)[1] == [min(stages - rank, groups * count) for rank in range(ranks)]


def test_each_stage_runs_all_micro_batches_in_order():
    for ranks, groups, count in SIZES:
        for rank in range(ranks):
            actions = schedule(rank, ranks, ranks * groups, count)
            for stage, backward in itertools.product(range(rank, ranks * groups, ranks), (False, True)):
                assert [a.micro_batch for a in actions if a[1:] == (stage, backward)] == list(range(count))
            assert len(actions) == 2 * groups * count


@pytest.mark.parametrize("ranks, groups, rounds", [(2, 1, 3), (4, 1, 2), (2, 3, 2), (4, 2, 3), (6, 4, 2)])
def test_ranks_wait_for_one_pass_of_the_others_stages_and_no_more(ranks: int, groups: int, rounds: int):
    """The bubble of Narayanan et al., section 2.2.2: (ranks - 1) passes through one stage, which has 1 / v of a rank's layers."""
    passes = ranks * rounds * groups
    assert play(ranks, ranks * groups, ranks * rounds)[0] == (passes + ranks - 1) * (FORWARD + BACKWARD)


def test_two_ranks_of_one_and_of_two_stages():
    def short(rank: int, stages: int, count: int) -> str:
        return " ".join(f"{'b' if a.backward else 'f'}{a.micro_batch}{a.stage}" for a in schedule(rank, 2, stages, count))

    assert short(0, 2, 3) == "f00 f10 b00 f20 b10 b20" and short(1, 2, 3) == "f01 b01 f11 b11 f21 b21"
    assert short(0, 4, 2) == "f00 f10 f02 f12 b02 b12 b00 b10" and short(1, 4, 2) == "f01 f11 f03 b03 f13 b13 b01 b11"
