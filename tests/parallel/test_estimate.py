"""Estimates for layouts: time and memory derived by hand, and the search among layouts that a test proves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from puna.models.accounting import GPUS, Machine, optimizer_bytes, state_bytes, step_time
from puna.models.config import ModelConfig
from puna.models.parameters import parameters
from puna.models.training.parallel.estimate import NODE, REACHED, Work, best_layouts, estimate, layouts
from puna.models.training.parallel.layout import AXES, BUCKET, PROVED, Layout
from puna.models.training.parallel.pipeline import schedule

SHEET, MACHINE = GPUS["H100"], Machine.gpu("H100")
CONFIG = ModelConfig(
    vocab_size=32_000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=8
)
WORK = Work(rows=64, length=4096, micro_tokens=16_384)


def computing(rows: int) -> float:
    """Return the seconds of one micro-batch on one device."""
    return step_time(CONFIG, [4096] * rows, MACHINE, "bf16", update=False).total / REACHED


def test_one_device_computes_its_micro_batches_and_the_update() -> None:
    one = estimate(CONFIG, WORK, Layout(), SHEET)
    assert one.compute == pytest.approx(16 * computing(4)) and one.transfers == one.bubble == 0
    assert one.seconds == pytest.approx(16 * computing(4) + optimizer_bytes(CONFIG) / MACHINE.bandwidth)
    assert one.tokens_per_second == pytest.approx(64 * 4096 / one.seconds)


@pytest.mark.parametrize("copies", [2, 8, 32])
def test_copies_share_the_rows_and_add_their_gradients(copies: int) -> None:
    """A ring moves 2 (n - 1) / n of the fp32 gradients; between machines, the 8 network cards of a machine share the traffic."""
    one = estimate(CONFIG, WORK, Layout(data=copies), SHEET)
    own = 64 // copies
    assert one.compute == pytest.approx(-(-own // 4) * computing(min(4, own)))
    speed = SHEET.within if copies <= NODE else min(SHEET.within, NODE * SHEET.between)
    assert one.transfers == pytest.approx(2 * (copies - 1) / copies * 4 * parameters(CONFIG).total / speed)


def test_experts_are_cut_and_their_rows_exchanged() -> None:
    """Of 8 experts, each of 4 ranks has 2; 3/4 of a token's 2 rows go to another rank and back, in forward and backward, in each layer."""
    moe = ModelConfig(**CONFIG.model_dump(exclude={"model_type"}) | {"moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 2048}})
    one, four = (estimate(moe, WORK, layout, SHEET) for layout in (Layout(), Layout(expert=4)))
    experts = 16 * 8 * 3 * 2048 * 2048
    rest = parameters(moe).total - experts
    rows = 4 * 2 * 2 * 16_384 * 2048 * 3 / 4 * 16
    assert four.compute == pytest.approx(one.compute / 4)
    assert four.transfers == pytest.approx(4 * rows / SHEET.within + 2 * 3 / 4 * 4 * rest / SHEET.within)
    assert one.bytes - four.bytes == pytest.approx(20 * experts * 3 / 4)


def test_a_pipeline_waits_for_its_first_and_last_micro_batch() -> None:
    """Each of S stages is idle for S - 1 of the micro-batches, of which a step has 16."""
    one = estimate(CONFIG, WORK, Layout(pipeline=4), SHEET)
    assert one.compute == pytest.approx(16 * computing(4) / 4) and one.bubble == pytest.approx(3 / 16 * one.compute)


def seconds_of_schedule(ranks: int, groups: int, micro: int) -> float:
    """Return the time of a step, from running its schedule; a pass through a rank's layers takes 1 forward and 2 backward."""
    plans = [schedule(rank, ranks, ranks * groups, micro) for rank in range(ranks)]
    ends: dict[tuple[int, int, bool], float] = {}
    clocks = [0.0] * ranks
    while any(plans):
        for rank, plan in enumerate(plans):
            for number, stage, backward in plan[:1]:
                needs = [(number, stage, False), (number, stage + 1, True)] if backward else [(number, stage - 1, False)]
                needs = [one for one in needs if 0 <= one[1] < ranks * groups]
                if all(one in ends for one in needs):
                    clocks[rank] = max([clocks[rank], *(ends[one] for one in needs)]) + (2 if backward else 1) / groups
                    ends[number, stage, backward] = clocks[rank]
                    plan.pop(0)
    return max(clocks)


@pytest.mark.parametrize("ranks, groups, micro", [(2, 1, 5), (4, 1, 2), (4, 2, 8), (4, 4, 16), (4, 2, 2), (4, 2, 7), (8, 2, 32), (8, 2, 64)])
def test_the_bubble_is_that_of_the_schedule(ranks: int, groups: int, micro: int) -> None:
    """A model of 16 layers, so that all stages have equally many."""
    work = Work(rows=micro, length=4096, micro_tokens=4096)
    one = estimate(CONFIG, work, Layout(pipeline=ranks, virtual_stages=groups), SHEET)
    passes = one.compute / micro
    assert one.compute + one.bubble == pytest.approx(seconds_of_schedule(ranks, groups, micro) / 3 * passes)


def test_the_rank_with_the_most_layers_sets_the_pace() -> None:
    """Of 16 layers, with 3 stages in total each has up to 6; with 3 x 4 stages, four of which have two layers, a rank has at most 8."""
    one, three, twelve = (
        estimate(CONFIG, WORK, layout, SHEET).compute for layout in (Layout(), Layout(pipeline=3), Layout(pipeline=3, virtual_stages=4))
    )
    assert three == pytest.approx(one * 6 / 16) and twelve == pytest.approx(one * 8 / 16)


def test_the_search_gives_a_pipeline_the_stages_that_shorten_its_bubble() -> None:
    found = {one.layout.axes: one for one in best_layouts(CONFIG, Work(rows=8, length=4096, micro_tokens=4096), 8, SHEET, most=100)}
    pipeline = found[frozenset(["pipeline"])]
    assert pipeline.layout == Layout(pipeline=8, virtual_stages=2)  # 16 layers: one per stage
    assert pipeline.bubble < estimate(CONFIG, pipeline.work, Layout(pipeline=8), SHEET).bubble


def test_a_layer_that_is_computed_twice_takes_a_third_more() -> None:
    plain, twice = (estimate(CONFIG, Work(64, 4096, 16_384, checkpointing=on), Layout(), SHEET) for on in (False, True))
    assert twice.compute == pytest.approx(4 / 3 * plain.compute) and twice.bytes < plain.bytes


def test_the_state_is_cut_and_gathered_weights_are_counted_between_steps() -> None:
    """A rank has an eighth of the weights in fp32, not in bf16, of gradients and of two moments. Between steps it also has whole weights in fp32: a bucket and
    the largest weight or, where questions are asked, all."""
    tiny = Work(rows=64, length=64, micro_tokens=64)
    one, cut = (estimate(CONFIG, tiny, Layout(shard=size), SHEET) for size in (1, 8))
    element, layer = 2, (parameters(CONFIG).layers + parameters(CONFIG).norms) / 16
    gathered = element * (4 * layer + 2 * (parameters(CONFIG).embedding + parameters(CONFIG).head))
    assert one.bytes - (cut.bytes - gathered) == pytest.approx(state_bytes(CONFIG, "bf16") - state_bytes(CONFIG) / 8, rel=1e-6)
    resting, count = (4 + 8) / 8, parameters(CONFIG).total
    asking = estimate(CONFIG, replace(tiny, whole=True), Layout(shard=8), SHEET)
    assert asking.bytes == pytest.approx((resting + 4) * count)
    many = estimate(CONFIG, replace(tiny, precision="fp32"), Layout(tensor=64), SHEET)
    assert many.bytes == pytest.approx((4 + 8) / 64 * count + 4 * (BUCKET + parameters(CONFIG).embedding), rel=1e-3)
    frozen = replace(tiny, precision="fp32", moments=-4, whole=True)  # of adapters' base: no gradients, but the pieces stay beside the whole
    assert estimate(CONFIG, frozen, Layout(tensor=64), SHEET).bytes == pytest.approx((4 / 64 + 4) * count, rel=1e-2)
    large = Work(rows=64, length=4096, micro_tokens=32_768)
    assert estimate(CONFIG, large, Layout(shard=8), SHEET).bytes == estimate(CONFIG, replace(large, whole=True), Layout(shard=8), SHEET).bytes


def test_a_sharded_stage_gathers_its_weights_once_per_step_and_keeps_them() -> None:
    """In bf16, a stage's state is 20 bytes per parameter; halved, 16 / 2, besides the gathered weights of 2 bytes and gradients of 4."""
    one, cut = (estimate(CONFIG, WORK, Layout(pipeline=4, shard=size), SHEET) for size in (1, 2))
    counts = parameters(CONFIG)
    assert cut.transfers - one.transfers == pytest.approx((2 + 4) * counts.total / 4 / 2 / SHEET.within)
    assert one.bytes - cut.bytes == pytest.approx((20 - 16 / 2 - 6) * ((counts.layers + counts.norms) / 4 + max(counts.embedding, counts.head)))


@pytest.mark.parametrize("devices", [2, 6, 8, 16, 128])
def test_all_proved_layouts_of_so_many_devices_are_listed(devices: int) -> None:
    """Compared with all products of five sizes, tried one by one."""
    def products(left: int, axes: int) -> list[tuple[int, ...]]:
        return [()] if axes == 0 and left == 1 else [
            (size, *rest) for size in range(1, left + 1) if axes and left % size == 0 for rest in products(left // size, axes - 1)
        ]  # fmt: skip

    expected = {sizes for sizes in products(devices, len(AXES)) if frozenset(a for a, n in zip(AXES, sizes, strict=True) if n > 1) in PROVED}
    expected = {sizes for sizes in expected if sizes[AXES.index("tensor")] <= 64}
    assert {tuple(getattr(one, axis) for axis in AXES) for one in layouts(devices)} == expected


def test_the_fastest_layouts_fit_the_memory_the_model_and_the_rows() -> None:
    ranked = best_layouts(CONFIG, WORK, 8, SHEET)
    assert len(ranked) == 3 and [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    assert all(one.fits and one.bytes <= 0.9 * SHEET.memory and math.prod(getattr(one.layout, a) for a in AXES) == 8 for one in ranked)
    assert len({one.layout.axes for one in ranked}) == 3
    few = best_layouts(CONFIG, Work(rows=2, length=4096, micro_tokens=4096), 8, SHEET)
    assert few and all(one.layout.readers <= 2 for one in few)


def test_the_search_leaves_out_what_gpus_refuse() -> None:
    """Proved on GPUs: all axes except `context`. With NF4 only data-parallel copies are left."""
    for one in (ranked := best_layouts(CONFIG, WORK, 8, SHEET, most=100)):
        assert "context" not in one.layout.axes and one.work.precision == "bf16" and one.layout.refusal("cuda", CONFIG) is None
    assert len(ranked) > 4
    assert [one.layout for one in best_layouts(CONFIG, WORK, 8, SHEET, nf4=True)] == [Layout(data=8)]
    fp32 = step_time(CONFIG, [4096], Machine.gpu("H100", "fp32"), "fp32", update=False).matrices
    assert fp32 == pytest.approx(989 / 67 * step_time(CONFIG, [4096], MACHINE, "bf16").matrices)


def test_where_nothing_fits_the_least_memory_is_given() -> None:
    large = ModelConfig(
        vocab_size=128_256, hidden_size=16_384, intermediate_size=53_248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    (only,) = best_layouts(large, Work(rows=2048, length=8192, micro_tokens=8192), 16, SHEET)
    assert not only.fits and only.bytes > 12 / 16 * parameters(large).total
