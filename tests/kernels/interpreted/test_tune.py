"""The tuner of the kernel table: everything between a GPU's clock and the file, under Triton's interpreter."""

import math
from dataclasses import replace

import pytest
import torch

from puna.kernels import configurations
from puna.kernels.configurations import Configuration, Place
from tests.benchmarks import tune_kernels as tune

SMALL = Configuration(16, 16, 4, 1, 16)


def test_the_table_reads_as_it_is_written():
    assert configurations.FILE.read_text(encoding="utf-8") == tune.written(configurations.table())


def test_the_newest_generation_that_the_gpu_has_then_the_narrowest_width_that_holds_the_heads():
    assert configurations.place_of("attention_forward", 89, 65) == Place("attention_forward", 80, 128)
    assert configurations.place_of("attention_forward", 103, 64) == Place("attention_forward", 100, 64)
    assert configurations.place_of("attention_key_gradient", 90, 128, True) == Place("attention_key_gradient", 90, 128)
    assert configurations.place_of("attention_forward", 90, 100, False, True) == Place("attention_forward", 80, 128, False, True)
    with pytest.raises(ValueError, match="attention_forward has no configuration for width 1000"):
        configurations.place_of("attention_forward", 90, 1000)


PLACES = [
    Place("attention_forward", 80, 16, False, True), Place("attention_key_gradient", 80, 16, True, True), Place("grouped_linear", 80),
    Place("grouped_weights", 80), Place("scaled_product", 80),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.kernel)
def test_the_fastest_right_one_is_found(monkeypatch, place):
    """With a stub clock: the second configuration is the fastest, the third does not run, the fourth gives wrong results."""
    attention = ("attention_forward", "attention_query_gradient", "attention_key_gradient")
    others = ("grouped_linear", "grouped_weights", "scaled_product")
    for name in attention if place.kernel in attention else others:  # small enough to be interpreted
        monkeypatch.setitem(configurations.table(), replace(place, kernel=name), (SMALL, None))
    configurations.configuration.cache_clear()
    run, tried = tune.work(place, torch.device("cpu"), 48), [SMALL]
    slow, fast, broken, wrong = (replace(SMALL, warps=n) for n in (1, 2, 8, 16))

    def among(_):
        for values in (slow, fast, broken, wrong):
            tried.append(values)
            yield values

    def result():
        if tried[-1] is broken:
            raise RuntimeError("PassManager::run failed")
        assert configurations.configuration(place.kernel, 80, place.width, place.window, place.fp32) == tried[-1]
        return tuple(x * 2 for x in run()) if tried[-1] is wrong else run()

    seconds = {SMALL: 2.0, slow: 3.0, fast: 1.0, wrong: 0.1}
    found, shortest, usual = tune.best(place, result, lambda _: seconds[tried[-1]], among)
    configurations.configuration.cache_clear()
    assert (found, shortest, usual) == (fast, 1.0, 2.0)


def test_noise_leaves_the_table_alone(monkeypatch):
    place = Place("grouped_linear", 80)
    monkeypatch.setitem(configurations.table(), place, (SMALL, None))
    configurations.configuration.cache_clear()
    times = iter([1.0, 1.0 - tune.GAIN / 2])
    result = (torch.ones(2),)
    found, _, _ = tune.best(place, lambda: result, lambda _: next(times), lambda _: iter([replace(SMALL, warps=1)]))
    configurations.configuration.cache_clear()
    assert found == SMALL


def test_candidates_are_ones_that_a_gpu_could_run():
    for place, least in ((Place("attention_forward", 90, 128), 10), (Place("attention_query_gradient", 80, 256), 3), (Place("grouped_linear", 90), 20)):
        found = list(tune.candidates(place))
        assert least <= len(found) == len(set(found)) <= 120
        assert all(values.descriptors <= (place.capability >= 90) and values.specialize <= (place.capability >= 100) for values in found)
    assert any(values.library for values in found)


def test_a_number_that_is_none_is_wrong():
    assert math.isnan(tune.differs((torch.tensor([math.nan]),), (torch.ones(1),)))
    assert tune.differs((torch.tensor([1.5, 4.0]),), (torch.tensor([1.0, 4.0]),)) == 0.125


def test_without_a_gpu_it_refuses():
    with pytest.raises(SystemExit, match="the tuner times kernels on a GPU, and there is none here"):
        tune.main(["--write"])


def test_every_kernel_of_the_table_is_tuned_on_a_new_gpu():
    found = tune.places(103, "")
    assert {p.capability for p in found} == {103}
    assert {p.kernel for p in found} == {p.kernel for p in configurations.table()}
    assert all(p.kernel.startswith("grouped") for p in tune.places(80, "grouped"))
