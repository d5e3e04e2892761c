"""Layouts, objectives and features of a model compared with one process: gradients, log numbers, weights after two steps."""

from __future__ import annotations

import json

import pytest

from puna.models.config import ModelConfig
from puna.models.training.parallel.layout import AXES, UNPROVED, Layout
from puna.models.training.parallel.mesh import buckets
from tests.benchmarks import parallel, results

from .cases import MODELS, PLAIN
from .conftest import Run
from .rows import BF16, EQUAL, INTERLEAVED, ROWS, SETS, Row, covering, unproved


@pytest.mark.parametrize("row", covering(ROWS), ids=str)
def test_two_steps_are_those_of_one_process(ranks: Run, row: Row):
    """These rows cover each axis with each feature; tests/benchmarks/parallel.py compares all rows."""
    result, *_ = ranks("compare", Layout(**row.layout).processes, **row.arguments)
    assert row.is_equal(result), result


def test_all_rows_were_compared_by_the_benchmark():
    (line,) = (line for line in results.FIGURES.read_text(encoding="utf-8").splitlines() if '"rows_tried"' in line)
    measured = json.loads(line.strip().rstrip(","))["measured"]
    assert measured["rows_proved"] == measured["rows_tried"] == len(ROWS)
    assert measured["table"] == parallel.table(), "run tests/benchmarks/parallel.py --part equality, and take its figures"


@pytest.mark.parametrize("axes", SETS, ids=lambda axes: " ".join(sorted(axes)))
def test_a_row_proves_what_a_layout_does_not_refuse(axes: frozenset[str]):
    """A new objective, parameter of one, preference loss, optimizer or field of a model is named here until a row has it, or an error refuses
    it. Adapters, the precision and the recomputation of layers count as such features, too."""
    assert not unproved(axes)


@pytest.mark.parametrize("name, axis", [(name, axis) for name, axes in UNPROVED.items() for axis in AXES if axis in axes])
def test_settings_that_no_row_has_are_refused_by_name(name: str, axis: str):
    layout = Layout(**{axis: 2})
    remedy = {
        "nf4": "set lora.quantization to none, or change the layout", "dora": "set lora.dora to false, or change the layout",
        "dropout": "set lora.dropout to 0, or use one process", "neftune_alpha": "set neftune_alpha to 0, or use one process",
    }[name]  # fmt: skip
    assert layout.refusal("cpu", **{name: 1}) == f"the layout {layout} is proved only without {name}: {remedy}"
    assert layout.refusal("cpu", **{name: 0}) is None


@pytest.mark.parametrize("objective", ["pretrain", "ppo"])
def test_ranks_with_unequal_vocabularies_compute_the_same_rows_together(ranks: Run, objective: str):
    """Of 37 tokens one rank has 19, the other 18: a chunk of the second could hold five rows, of the first only four."""
    for result in ranks("in_small_chunks", 2, chunk_bytes=4 * 18 * 5, layout={"tensor": 2}, objective=objective):
        assert max(result.values()) <= EQUAL, result


@pytest.mark.parametrize("layout", [{"data": 2}, {"shard": 2, "tensor": 2}, {"pipeline": 2}], ids=str)
def test_tensors_that_fit_no_bucket_together_are_the_same(ranks: Run, layout: dict[str, int]):
    """The model's smallest tensor has 32 elements, the largest 1,536."""
    for result in ranks("in_small_buckets", Layout(**layout).processes, elements=1100, layout=layout, objective="sft"):
        assert max(result.values()) <= EQUAL, result


def test_a_bucket_ends_with_the_item_that_fills_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("puna.models.training.parallel.mesh.BUCKET", 4)
    assert list(buckets([1, 2, 1, 9, 0, 3], lambda item: item)) == [[1, 2, 1], [9], [0, 3]]
    assert list(buckets([4, 4], lambda item: item)) == [[4], [4]] and list(buckets([], len)) == []


@pytest.mark.parametrize("groups", [1, 2])
def test_a_rank_keeps_as_many_passes_as_its_schedule_says_and_computes_layers_twice_if_told(ranks: Run, groups: int):
    given = {"layout": {"pipeline": 2, "virtual_stages": groups}, "layers": 4, "micro": 7, "activation_checkpointing": groups == 2}
    assert ranks("passes", 2, **given) == [[2 * groups, groups * 2 * 7], [2 * groups - 1, groups * 2 * 7]]


@pytest.mark.parametrize("layout", [{"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"shard": 2, "pipeline": 2}], ids=str)
def test_a_rank_that_trains_pieces_holds_no_whole_weights_from_then_on(ranks: Run, layout: dict[str, int]):
    for before, *later in ranks("whole_bytes", Layout(**layout).processes, layout=layout):
        assert before == 1 and max(later) < 0.1


@pytest.mark.parametrize("fault, layout, variant", [
    ("the loss is averaged by rank", {"data": 2}, "plain"),
    ("the logarithm of the ranks is in the loss", {"tensor": 2}, "plain"),
    ("tokens are counted by every tensor rank", {"tensor": 2}, "plain"),
    ("the norm of gradients is one rank's", {"expert": 2}, "moe"),
    ("experts' gradients count by rank", {"expert": 2}, "moe"),
    ("a stage forgets earlier micro-batches", {"pipeline": 2}, "plain"),
], ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "")  # fmt: skip
def test_the_comparison_sees_faults_that_other_trainers_had(ranks: Run, fault: str, layout: dict[str, int], variant: str):
    """In order: torchtitan 2206, Megatron-LM 7452, TRL 7100, NeMo Automodel 3816 and DeepSpeed 8475, Megatron-LM 5656, Automodel 3530.

    The tests above compare the same layouts and objectives without the fault, and find at most `EQUAL`."""
    for result in ranks("faulty", 2, fault=fault, layout=layout, objective="pretrain", variant=variant):
        assert max(result["gradients"], result["rows"]) > 1000 * EQUAL, result


@pytest.mark.parametrize("fault, layout, variant", [
    ("gradients are summed in bf16", {"data": 2}, "plain"),
    ("FSDP2 sums gradients in bf16", {"shard": 2}, "plain"), ("norms see one rank's rows", {"tensor": 2}, "rich"),
    ("norms see one rank's rows", {"context": 2}, "rich"), ("the loss is averaged by rank", {"expert": 2}, "moe"),
    ("the logarithm of the ranks is in the loss", {"tensor": 2}, "plain"), ("experts' gradients count by rank", {"expert": 2}, "moe"),
], ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "")  # fmt: skip
def test_the_comparison_in_bf16_sees_faults(ranks: Run, fault: str, layout: dict[str, int], variant: str):
    row = Row(layout, "pretrain", variant, BF16)
    for result in ranks("faulty", 2, fault=fault, layout=layout, objective="pretrain", variant=variant, **BF16):
        assert not row.is_equal_in_bf16(result), result


@pytest.mark.parametrize("given, problem", [
    ({"layout": {"tensor": 2}, "variant": "moe"}, "a model with experts"), ({"layout": {"tensor": 2}, "variant": "dora"}, "only without dora"),
    ({"layout": {"data": 2}, "variant": "dropout"}, "only without dropout"),
    ({"layout": {"tensor": 4}}, "num_key_value_heads is 2"),
    ({"layout": {"pipeline": 2}, "variant": "moe"}, "a model with experts"), ({"layout": {"shard": 2}, "variant": "nf4"}, "only without nf4"),
    ({"layout": {"expert": 2}}, "has no experts"),
    ({"layout": INTERLEAVED, "size": (3, 2)}, "the model has 3 layers only; set pipeline x virtual_stages to that or less"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_no_test_proves_is_refused_by_name(ranks: Run, given: dict[str, object], problem: str):
    for message in ranks("refusal", Layout(**given["layout"]).processes, **{"objective": "sft"} | given):
        assert problem in message


def test_experts_are_dealt_evenly():
    moe = ModelConfig(**PLAIN | MODELS["moe"])
    assert Layout(expert=4).misfit(moe) is None
    assert "has 4 experts, which it must divide" in (Layout(expert=3).misfit(moe) or "")


def test_only_a_pipeline_has_virtual_stages():
    with pytest.raises(ValueError, match="layout.virtual_stages = 2: only a pipeline has stages; set layout.pipeline, too"):
        Layout(data=2, virtual_stages=2)
