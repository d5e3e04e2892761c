"""Learning rates and batch sizes as pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal


@dataclass(frozen=True)
class Ramp:
    """A batch size or sequence length that grows, as in Llama 3 405B (section 3.4.1): `values[i]` from step `starts[i]` on (1-based).
    The constructor raises ValueError if values fall, or if starts do not rise from 1."""

    values: tuple[int, ...]
    starts: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if not self.values or min(self.values) < 1 or len(self.values) != len(self.starts):
            raise ValueError(f"a ramp needs a first step for each of its positive values, not {self.values} and {self.starts}")
        if self.starts[0] != 1 or any(a >= b for a, b in pairwise(self.starts)):
            raise ValueError(f"a ramp's first steps must rise from 1: {self.starts}")
        if list(self.values) != sorted(self.values):
            raise ValueError(f"a ramp's values must not fall: {self.values}")

    def at(self, step: int) -> int:
        """Return the size in step number `step` (1-based)."""
        return self.values[bisect_right(self.starts, step) - 1]

    def before(self, step: int) -> int:
        """Return the sum of the sizes in all steps before step number `step` (1-based)."""
        ends = (*self.starts[1:], step)
        spans = (max(0, min(end, step) - start) for start, end in zip(self.starts, ends, strict=True))
        return sum(value * span for value, span in zip(self.values, spans, strict=True))


Schedule = Literal["cosine", "linear", "wsd", "constant"]


def learning_rate(
    step: int, *, steps: int, peak: float, warmup_steps: int = 0, schedule: Schedule = "cosine", final_ratio: float = 0.0,
    decay_steps: int = 0, anneal_steps: int = 0,
) -> float:  # fmt: skip
    """Return the learning rate of optimization step `step`, from 1 to `steps`; raise ValueError for any other step.

    Warm-up is linear: step `warmup_steps` is the first at the peak. A falling rate reaches its end value one step after the last, so that
    no step runs at a rate of 0. After the warm-up:

    - ``cosine`` falls along half a cosine to ``final_ratio * peak`` (Loshchilov and Hutter 2017, SGDR), which it reaches
      after `decay_steps` if these are more than `steps`;
    - ``linear`` falls to ``final_ratio * peak`` in a straight line;
    - ``constant`` stays at the peak;
    - ``wsd`` (warm-up, stable, decay; Hu et al. 2024, MiniCPM) stays at the peak and falls over the
      last `decay_steps` as ``1 - sqrt`` (Hägele et al. 2024), to ``final_ratio * peak``.

    The last `anneal_steps` then override the schedule with a straight line from the rate the schedule
    had when annealing began down to 0 (Llama 3, section 3.4.3)."""
    if not 1 <= step <= steps:
        raise ValueError(f"step {step} lies outside 1..{steps}")
    anneal_start = steps - anneal_steps
    if step > anneal_start:
        start = learning_rate(
            max(anneal_start, 1), steps=steps, peak=peak, warmup_steps=warmup_steps, schedule=schedule, final_ratio=final_ratio,
            decay_steps=decay_steps,
        )  # fmt: skip
        return start * (steps + 1 - step) / (anneal_steps + 1)
    if step < warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    if schedule == "wsd":
        shape = 1.0 - math.sqrt(max(0.0, (step - (steps - decay_steps)) / (decay_steps + 1)))
    else:
        # Step 1 without warm-up, or step `warmup_steps` with it, is at the peak.
        first = max(warmup_steps, 1)
        end = max(steps, decay_steps) if schedule == "cosine" else steps
        done = (step - first) / (end + 1 - first)
        shape = 0.5 * (1.0 + math.cos(math.pi * done)) if schedule == "cosine" else 1.0 - done
    return peak * (final_ratio + (1.0 - final_ratio) * shape)
