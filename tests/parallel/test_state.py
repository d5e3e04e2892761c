"""A training state written under one layout and read under another; a killed rank."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from puna.models.training.loop import fingerprint
from puna.models.training.parallel.base import whole as whole_model
from puna.models.training.parallel.boxes import load
from puna.models.training.parallel.layout import Layout
from puna.models.training.parallel.parallel import parallel
from puna.models.training.state import load_state, read_each

from .cases import network
from .conftest import Run

LAYOUTS = [{}, {"data": 2}, {"shard": 2}, {"tensor": 2}, {"shard": 2, "tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "virtual_stages": 2},
           {"shard": 2, "pipeline": 2, "virtual_stages": 2, "tensor": 2}]  # fmt: skip


def size(layout: dict[str, int]) -> int:
    return Layout(**layout).processes


def test_every_layout_reads_the_same_bits(ranks: Run, tmp_path: Path):
    """States of each layout after three steps: weights, moments and averages equal bit for bit what one process reads. A state is read by
    its own layout and by two others; tests/benchmarks/parallel.py lets every layout read every state."""
    layouts = [layout for layout in LAYOUTS if layout != {"pipeline": 2}]  # with one stage per process, where other layouts have two
    for number, writer in enumerate(layouts):
        folder = tmp_path / str(number)
        ranks("trained", size(writer), layout=writer, folder=str(folder), steps=3)
        readers = [{}, *((layouts * 2)[number : number + 3])]
        digests = {
            answer["digest"] for reader in readers for answer in ranks("restored", size(reader), layout=reader, folder=str(folder))
        }
        assert len(digests) == 1, (writer, digests)


def test_experts_are_read_by_every_layout(ranks: Run, tmp_path: Path):
    layouts = [{}, {"expert": 2}, {"shard": 2}, {"shard": 2, "expert": 2}]
    for number, writer in enumerate(layouts):
        given = {"folder": str(tmp_path / str(number)), "variant": "moe"}
        ranks("trained", size(writer), layout=writer, steps=3, **given)
        assert len({answer["digest"] for reader in layouts for answer in ranks("restored", size(reader), layout=reader, **given)}) == 1, writer


@pytest.mark.parametrize("optimizer, variant", [("muon", "plain"), ("galore", "plain"), ("galore", "moe")])
def test_the_state_of_whole_matrices_is_read_by_every_layout(ranks: Run, optimizer: str, variant: str, tmp_path: Path):
    """A training run continues under three layouts. Owners write a matrix's state once; the state of a stack of experts is split like its
    weights."""
    given = {"variant": variant, "optimizer": optimizer}
    layouts = [{"expert": 2}, {}, {"shard": 2, "expert": 2}] if variant == "moe" else [{"shard": 2, "pipeline": 2}, {}, {"pipeline": 2, "tensor": 2}]
    losses = ranks.alone("trained", steps=4, **given)["losses"]
    given["folder"] = str(tmp_path / "parts")
    for steps, writer, next_one in zip((2, 3, 4), layouts, (*layouts[1:], {}), strict=True):
        result = ranks("trained", size(writer), layout=writer, steps=steps, **given)
        assert len({one["digest"] for layout in (writer, next_one) for one in ranks("restored", size(layout), layout=layout, **given)}) == 1
    assert result[0]["losses"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_go_on_in_every_layout(ranks: Run, precision: str, tmp_path: Path):
    """The frozen weights must be those of the beginning, whichever pieces of them a rank has, in which precision."""
    given = {"variant": "lora", "precision": precision}
    losses = ranks.alone("trained", steps=4, **given)["losses"]
    given["folder"] = str(tmp_path / "parts")
    for steps, layout in enumerate([{"shard": 2}, {"pipeline": 2, "tensor": 2}, {"context": 2}, {"shard": 2, "pipeline": 2}], 1):
        result = ranks("trained", size(layout), layout=layout, steps=steps, **given)
    assert result[0]["losses"] == pytest.approx(losses, rel=1e-5 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("layout", [{}, {"shard": 2}], ids=str)
def test_the_tensors_of_a_prefix_are_read_alone(ranks: Run, tmp_path: Path, layout: dict[str, int]):
    ranks("trained", size(layout), layout=layout, folder=str(tmp_path), steps=3)
    whole, (empty, tensors) = load_state(tmp_path), read_each(tmp_path, "weight.")
    weights = dict(tensors)
    assert whole is not None and weights.keys() == empty.keys() == {name for name in whole[0] if name.startswith("weight.")}
    assert all(torch.equal(tensor, whole[0][name]) and tensor.shape == empty[name].shape for name, tensor in weights.items())
    file = next(tmp_path.glob("step-*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ValueError, match="the saved training state is damaged"):
            read_each(folder, "weight.")


@pytest.mark.parametrize("layout", [{"shard": 2}, {"pipeline": 2}], ids=str)
def test_a_rank_reads_little_more_than_its_pieces(ranks: Run, tmp_path: Path, layout: dict[str, int]):
    assert max(ranks("read_ratio", 2, layout=layout, folder=str(tmp_path))) <= 1.2


def test_moments_of_whole_weights_are_taken_by_every_layout(ranks: Run, tmp_path: Path):
    ranks("trained", 1, layout={}, folder=str(tmp_path), steps=3)
    one = ranks("restored", 1, layout={}, folder=str(tmp_path))[0]["digest"]
    for layout in LAYOUTS:
        answers = ranks("restored", size(layout), layout=layout, folder=str(tmp_path), adopt=True)
        assert {answer["digest"] for answer in answers} == {one}, layout


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_reference_is_the_same_in_every_layout(ranks: Run, layout: dict[str, int], precision: str):
    """A run that resumes under another layout compares the reference with the one in its saved state."""
    (one,) = ranks("printed", 1, layout={}, precision=precision)
    assert ranks("printed", size(layout), layout=layout, precision=precision) == [one] * size(layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_new_tokens_begin_without_moments_in_every_layout(ranks: Run, layout: dict[str, int]):
    """Of 37 tokens, 18 are new, so the old moments have the same number of rows as a rank's half of all."""
    assert ranks("grown", size(layout), layout=layout, lacking=18) == [[]] * size(layout)


@pytest.mark.parametrize("layout", [{axis: 2} for axis in ("data", "shard", "tensor", "pipeline")] + LAYOUTS[-1:], ids=str)
def test_a_training_that_goes_on_ends_with_the_same_bits(ranks: Run, tmp_path: Path, layout: dict[str, int]):
    whole = ranks("trained", size(layout), layout=layout, folder=str(tmp_path / "whole"), steps=4)
    ranks("trained", size(layout), layout=layout, folder=str(tmp_path / "parts"), steps=2)
    assert ranks("trained", size(layout), layout=layout, folder=str(tmp_path / "parts"), steps=4) == whole


@pytest.mark.parametrize("first, second", itertools.pairwise([{"tensor": 2}, LAYOUTS[-1], {"data": 2}, {"shard": 2}]), ids=str)
def test_a_training_goes_on_in_another_layout(ranks: Run, tmp_path: Path, first: dict[str, int], second: dict[str, int]):
    ranks("trained", size(first), layout=first, folder=str(tmp_path), steps=3)
    losses = ranks("trained", size(second), layout=second, folder=str(tmp_path), steps=4)[0]["losses"]
    one = ranks.alone("trained", steps=4)["losses"]
    assert losses == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("axis", ["data", "shard", "tensor", "pipeline", "context", "expert"])
def test_moments_in_files_skipped_spikes_and_averages_are_those_of_one_process(ranks: Run, tmp_path: Path, axis: str):
    variant = "moe" if axis == "expert" else "plain"
    ranks("trained", 1, layout={}, folder=str(tmp_path), steps=2, variant=variant, optimizer="muon")
    given = {"folder": str(tmp_path), "variant": variant}
    (one,), all_ = ranks("looped", 1, layout={}, **given), ranks("looped", 2, layout={axis: 2}, **given)
    assert one["skipped"] and all(own == all_[0] for own in all_)
    assert all_[0]["skipped"] == one["skipped"] and all_[0]["losses"] == pytest.approx(one["losses"], rel=1e-5)
    for name, sums in one["sums"].items():
        assert all_[0]["sums"][name] == pytest.approx(sums, rel=1e-4, abs=1e-4), name


def test_a_rank_that_cannot_write_ends_the_training_on_all_and_leaves_the_state_before(ranks: Run, tmp_path: Path):
    ranks("trained", 2, layout={"shard": 2}, folder=str(tmp_path), steps=2)
    here, there = ranks("unwritten", 2, folder=str(tmp_path))
    assert here["error"] == "rank 1 could not read or write its part of the state: no space left" and there["error"] == "no space left"
    assert here["states"] == there["states"] == ["step-000000001"]


@pytest.mark.parametrize("layout", [{"shard": 2}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("after", [-1, 0, 3])
def test_a_disk_that_is_full_at_rank_0_ends_the_writing_of_weights_on_all(ranks: Run, tmp_path: Path, layout: dict[str, int], after: int):
    here, there = ranks("unsaved", 2, layout=layout, folder=str(tmp_path), after=after)
    assert here == {"error": "no space left", "files": []}
    assert there == {"error": "rank 0 could not write the weights: no space left", "files": []}


def test_whole_weights_are_released_after_an_error():
    model = network("plain")
    held = model.held = Mock()
    with pytest.raises(ValueError, match="an answer failed"), whole_model(model):
        held.release.assert_not_called()
        raise ValueError("an answer failed")
    held.release.assert_called_once_with()


@pytest.mark.parametrize("file_is_there", [True, False])
def test_damage_is_an_error_on_all_ranks(ranks: Run, tmp_path: Path, file_is_there: bool):
    ranks("trained", 2, layout={"shard": 2}, folder=str(tmp_path), steps=3)
    file = next(tmp_path.glob("step-*/rank-1.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    if not file_is_there:
        file.unlink()
    for message in ranks("refused_state", 2, layout={"shard": 2}, folder=str(tmp_path)):
        assert "the saved training state is damaged; remove the folder" in message


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"record": "{}", "checksums": 3}', '{"record": "{}", "checksums": {}}'])
def test_a_damaged_record_is_that_error_too(tmp_path: Path, text: str):
    (tmp_path / "step-000000003").mkdir()
    (tmp_path / "step-000000003" / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"step-000000003: the saved training state is damaged; remove the folder to begin anew"):
        load(tmp_path, {}, {}, SimpleNamespace(gather_texts=lambda text: [text]))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [{"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"shard": 2, "pipeline": 2, "tensor": 2}], ids=str)
def test_ranks_map_weights_and_their_fingerprint_is_that_of_one_process(ranks: Run, layout: dict[str, int], tmp_path: Path):
    """The job compares the fingerprints; tests/benchmarks/parallel.py measures how much a rank reads of a large file."""
    assert all(own["read"] >= 0 for own in ranks("weights_read", size(layout), layout=layout, folder=str(tmp_path)))


def test_a_fingerprint_changes_with_a_bit_a_place_and_a_name():
    alone = parallel(network("plain"), Layout())
    weights = {name: tensor.detach() for name, tensor in alone.parameters.items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    changed = [weights[name].roll(1, 0), weights[name].roll(1, 1), weights[name].neg(), weights[name].clone()]
    changed[-1][3, 5] = torch.nextafter(changed[-1][3, 5], torch.tensor(9.0))
    one, other = "model.norm.weight", "model.layers.0.input_layernorm.weight"
    moved = weights | {one: weights[other], other: weights[one]}
    marks = {fingerprint(alone, one) for one in (weights, moved, *(weights | {name: value} for value in changed))}
    assert len(marks) == 6 and fingerprint(alone, dict(reversed(weights.items()))) in marks


def test_ranks_write_the_tokens_together_and_each_reads_its_own_micro_batches(ranks: Run, tmp_path: Path):
    results = ranks("tokens_read", 8, folder=str(tmp_path))
    assert all(own["same"] and len(set(own["largest"])) == 1 for own in results)
    assert all(4 * own["made"] < own["of"] for own in results) and sum(own["made"] for own in results) >= results[0]["of"]


def test_all_ranks_read_the_checkpoint_that_the_first_one_sees(ranks: Run, tmp_path: Path) -> None:
    """On another machine, the listing of a shared folder may be outdated."""
    assert ranks("listed", 2, folder=str(tmp_path)) == [3, 3]
    assert ranks("listed", 2, folder=str(tmp_path), unread=True) == ["rank 1 could not read or write its part of the state: no box", "no box"]


def test_all_ranks_compute_in_the_precision_that_the_first_one_measured(ranks: Run) -> None:
    assert ranks("precision", 2) == ["bf16", "bf16"]
