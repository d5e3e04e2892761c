"""Cost estimates of steps from earlier runs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.flows.engine.plan import Experience, Size
from puna.flows.html.markup import duration
from puna.storage import Store


def store_of(*past: tuple[float, dict[str, Any], float]) -> Any:
    """Return a store with one stage that took `seconds` on `rows` with `config`, several times."""
    made: list[Any] = []
    for number, (rows, config, seconds) in enumerate(past):
        source = SimpleNamespace(stage="source", timings={}, inputs=[], config={}, files={"a": SimpleNamespace(bytes=10 * rows)})
        given = SimpleNamespace(key=f"s{number}", kind="documents", tables=("documents",), manifest=source, rows=lambda rows=rows: rows)
        work = SimpleNamespace(
            stage="work", timings={"seconds": seconds}, inputs=[SimpleNamespace(key=given.key)], config=config, peak_memory_bytes=1e9,
            files={"a": SimpleNamespace(bytes=5 * rows)},
        )  # fmt: skip
        made += [given, SimpleNamespace(key=f"w{number}", kind="signals", tables=("signals",), manifest=work, rows=lambda rows=rows: rows)]
    return SimpleNamespace(artifacts=lambda: made)


SIZE = st.one_of(st.just(0.0), st.floats(1, 1e12))
PAST = st.lists(st.tuples(SIZE, st.fixed_dictionaries({"steps": st.sampled_from([1, 2, 1000, 10**9])}), SIZE), min_size=1, max_size=6)


@given(PAST, SIZE, st.integers(1, 10**12))
@settings(max_examples=200, deadline=None)
def test_no_past_makes_an_estimate_that_is_no_size(past: list[Any], rows: float, steps: int) -> None:
    found = Experience(store_of(*past)).expect("work", {"steps": steps}, [Size(rows, 10 * rows)])
    near = [one for _, one, _ in past if one["steps"] <= 10 * steps and steps <= 10 * one["steps"]]
    assert (found is not None) == bool(near)
    if found is None:
        return
    for size in (found.seconds, found.bytes, found.memory, found.rows):
        assert math.isfinite(size) and math.copysign(1, size) == 1
    # The estimated output of a step is the input of the next step's estimate.
    assert Experience(store_of(*past)).expect("work", {"steps": steps}, [found.size]) is not None


def test_nothing_that_comes_in_gives_nothing() -> None:
    found = Experience(store_of((1e6, {}, 100.0), (1e6, {}, 100.0), (5.0, {}, 0.001), (0.0, {}, 0.0))).expect("work", {}, [Size(0, 0)])
    assert found is not None and found.rows == 0 and found.seconds >= 0


def test_a_run_of_another_order_tells_nothing() -> None:
    """Counts more than ten times larger or smaller are not comparable; floats, booleans, seeds and zeros do not affect the estimate."""
    experience = Experience(store_of((1000, {"model": {"hidden_size": 48}, "rate": 0.03, "ema": True, "warm": 0, "seed": 1}, 10.0)))
    near = {"model": {"hidden_size": 480}, "rate": 0.0001, "ema": 1000, "warm": 900, "seed": 5000}
    assert experience.expect("work", near, [Size(1000, 10)]) is not None
    assert experience.expect("work", {**near, "model": {"hidden_size": 481}}, [Size(1000, 10)]) is None


def test_what_never_ran_is_not_guessed(tmp_path: Path) -> None:
    assert Experience(Store.open(tmp_path)).expect("work", {}, [Size(10, 10)]) is None


def test_the_run_with_the_most_equal_settings_counts_and_of_equals_the_newest() -> None:
    past = [(1000, {"phases": [{"steps": steps}]}, seconds) for steps, seconds in ((10, 100.0), (40, 400.0), (40, 500.0), (10, 120.0))]
    found = Experience(store_of(*past)).expect("work", {"phases": [{"steps": 40}]}, [Size(4000, 40_000)])
    assert found is not None and found.seconds == pytest.approx(500 * 4**0.7)
    assert (found.rows, found.bytes, found.memory) == (4000, pytest.approx(5000 * 4**0.9), pytest.approx(1e9 * 4**0.2))


def test_one_run_is_repeated_and_scales_with_what_comes_in_between_not_at_all_and_in_proportion() -> None:
    experience = Experience(store_of((1000, {"bands": 20}, 10.0)))
    same = experience.expect("work", {"bands": 20}, [Size(1000, 10_000)])
    more = experience.expect("work", {"bands": 20}, [Size(4000, 40_000)])
    other = experience.expect("work", {"bands": 30}, [Size(1000, 10_000)])
    assert same and more and other and same.seconds == 10 == other.seconds
    assert 10 < more.seconds < 40


def test_runs_of_the_same_kind_count_alone_and_the_seed_counts_for_nothing() -> None:
    past = [(1000, {"method": "full", "seed": 1}, 100.0), (1000, {"method": "lora", "seed": 2}, 10.0)]
    found = Experience(store_of(*past)).expect("work", {"method": "lora", "seed": 99}, [Size(1000, 0)])
    assert found is not None and found.seconds == 10


@given(st.floats(-1e6, 0))
def test_a_duration_is_never_shown_below_0(seconds: float) -> None:
    assert duration(seconds) == duration(0.0) == "0.0 s"
