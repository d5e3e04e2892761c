"""Needs of stages for models and for the machine are checked before the first stage runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from puna.flows.engine import preflight
from puna.flows.engine.preflight import check, check_stage
from puna.flows.engine.trace import flow_named, load
from puna.models.parameters import parameters
from puna.stages.align.dpo import DpoConfig, dpo
from puna.stages.align.reinforcement import PpoConfig, ppo
from puna.stages.contract import Facts, Value, execute
from puna.stages.contract.declaration import InputFacts
from puna.stages.contract.external import External
from puna.stages.io.import_model import ImportModelConfig, import_model
from puna.stages.pretrain.pretrain import PretrainConfig
from puna.stages.pretrain.pretrain import needs as pretrain_needs
from puna.stages.training.phase import SHAPE
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema
from tests.flows.test_journey import random_model


def imported(name: str, folder: Path, store: Store, left_out: Sequence[str] = ()) -> Artifact:
    """Return a random model, imported; lines of its tokenizer's configuration that contain a word of `left_out` are removed."""
    random_model(name, folder)
    file = folder / "tokenizer_config.json"
    kept = [line for line in file.read_text().splitlines() if not any(word in line for word in left_out)]
    file.write_text("\n".join(kept))
    return execute(import_model, ImportModelConfig(), {"model": External.resolve(str(folder))[0]}, store)


def rows(kind: str, store: Store) -> Artifact:
    """Return an empty artifact."""
    return store.import_table(kind, pa.Table.from_pylist([], schema=table_schema(kind).schema))


def test_files_that_are_sampled_together_count_once() -> None:
    """Each file input stands for the same inspection of all files."""
    look = lambda seconds: (("some text", "another"), 0.5)  # noqa: E731
    both = preflight._together([InputFacts("external", look=look), InputFacts("external", look=look)])
    assert both is not None and both(1.0) == look(1.0)
    assert preflight._together([InputFacts("external", look=look), InputFacts("external")]) is None


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with 100 kB of free memory and no accelerator."""
    import psutil

    monkeypatch.setattr(preflight, "ACCELERATORS", ())
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))


def test_a_model_without_a_chat_template_is_told_before_the_first_step(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    bare = imported("llama3", tmp_path / "bare", store, ["chat_template"])
    given: dict[str, Value] = {"model": bare, "preferences": [rows("preferences", store)]}
    with pytest.raises(PunaError, match=rf"^dpo: {bare.id} has no chat template, which is needed to render conversations; import the model"):
        check_stage(dpo, DpoConfig(), given, store)
    align = flow_named("align")
    with pytest.raises(PunaError) as error:
        check(align, load("smollm2-135m", flow="align"), align.by_kind([bare]), store)
    # What is made from it lacks it too.
    told = str(error.value).splitlines()
    assert {line.partition(":")[0] for line in told} >= {"sample_1", "sft_1", "grpo_1"}
    assert all("has no chat template" in line for line in told)
    check(align, load("smollm2-135m", flow="align"), align.by_kind([imported("llama3", tmp_path / "whole", store)]), store)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [((), True), (("reward_model.head_only=true",), False), (("dpo={}",), False), (("dpo={}", "preferences=null"), False), (("rounds=0",), False)],
)
def test_preferences_that_nothing_would_learn_from_are_refused(tmp_path: Path, changes: tuple[str, ...], refused: bool) -> None:
    store = Store.open(tmp_path / "store")
    align, given = flow_named("align"), [imported("llama3", tmp_path / "own", store), rows("preferences", store)]
    with pytest.raises(PunaError, match=r"trains no reward model, so no step would learn") if refused else contextlib.nullcontext():
        check(align, load("smollm2-135m", changes, flow="align"), align.by_kind(given), store)


def test_memory_that_is_not_there_is_told_with_a_way_out(tmp_path: Path, small: None) -> None:
    store = Store.open(tmp_path / "store")
    model = imported("llama3", tmp_path / "own", store)
    given: dict[str, Value] = {"model": model, "preferences": [rows("preferences", store)]}
    with pytest.raises(PunaError, match=r"dpo: 0\.00 billion parameters need at least 0\.\d GB \(16 bytes each\), .* train adapters \(method=lora\), or"):
        check_stage(dpo, DpoConfig(), given, store)
    with pytest.raises(PunaError, match=r"\(4 bytes each\).* free; use a smaller model"):
        check_stage(dpo, DpoConfig(method="lora"), given, store)
    galore = DpoConfig.model_validate({"training": {"optimizer": {"name": "galore"}}})
    with pytest.raises(PunaError, match=r"\(8 bytes each\)"):
        check_stage(dpo, galore, given, store)
    # On a cluster the memory is that of another machine.
    check_stage(dpo, DpoConfig(), given, store, "dask://there:1")
    # The 8B model without embedding and output layer: 8.03 - 2 * 128,256 * 4,096 / 1e9.
    pretrain, types = flow_named("pretrain"), store.import_table("signals", pa.table({"id": ["a"], "domain": ["x"]}))
    with pytest.raises(PunaError, match=r"pretrain: 6\.98 billion parameters need at least 111\.7 GB"):
        check(pretrain, load("llama3-8b", flow="pretrain"), pretrain.by_kind([rows("documents", store), types]), store)


REFUSED: list[tuple[int, dict[str, object], dict[str, object], str]] = [
    (1, {"tensor": 2}, {}, r"training\.compute\.layout = tensor 2 needs 2 processes, or a multiple of that; 1 run: start with --processes 2"),
    (7, {"tensor": 7}, {}, r"training\.compute\.layout: layout\.tensor = 7: num_attention_heads is \d+, which it must divide"),
    (64, {"pipeline": 64}, {}, r"layout\.pipeline = 64: the model has \d+ layers only"),
    (2, {"shard": 2}, {"method": "lora", "lora": {"quantization": "nf4"}}, "shard 2 is proved only without nf4"),
    (2, {"tensor": 2}, {"method": "lora", "lora": {"dora": True}}, "tensor 2 is proved only without dora"),
    (2, {}, {"method": "lora", "lora": {"dropout": 0.1}}, "data 2 is proved only without dropout"),
]


@pytest.mark.parametrize(("count", "layout", "more", "problem"), REFUSED, ids=lambda value: str(value)[:30])
def test_a_layout_that_a_training_refuses_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, layout: dict[str, object], more: dict[str, Any], problem: str
) -> None:
    store = Store.open(tmp_path / "store")
    given: dict[str, Value] = {"model": imported("llama3", tmp_path / "own", store), "preferences": [rows("preferences", store)]}
    compute = {**more.get("training", {}).get("compute", {}), "layout": layout}
    monkeypatch.setenv("WORLD_SIZE", str(count))
    with pytest.raises(PunaError, match=rf"^dpo: .*{problem}" if problem.startswith("training") else rf"^dpo: training\.compute\.layout: .*{problem}"):
        check_stage(dpo, DpoConfig.model_validate({**more, "training": {"compute": compute}}), given, store)


def test_a_flow_s_pretraining_is_refused_before_its_data_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, flow = Store.open(tmp_path / "store"), flow_named("pretrain")
    types = store.import_table("signals", pa.table({"id": ["a"], "domain": ["x"]}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for change, problem in (("layout={tensor: 2}", None), ("layout={tensor: 4}", "needs 4 processes"), ("layout={expert: 2}", "has no experts")):
        changes = [f"pretrain.compute.{change}", "pretrain.z_loss=0.1"]
        with pytest.raises(PunaError, match=problem) if problem else contextlib.nullcontext():
            check(flow, load("demo", changes, flow="pretrain"), flow.by_kind([rows("documents", store), types]), store)


def test_memory_is_counted_by_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW: 16 bytes per parameter. Each of 8 sharding machines has an eighth and gathers a few layers; if it answers questions, it also
    has 4 bytes per parameter for whole weights, in place of gradients. 4 copies on this machine take 64."""
    deep = SHAPE.replace(hidden_size=2048, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=8)
    count = parameters(deep.complete(1, 2048)).total

    def lacking(local: int, world: int, layout: dict[str, int], bytes_each: float, tasks: bool = False) -> list[str]:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        compute = {"layout": layout, "precision": "fp32"}
        config = PretrainConfig.model_validate({"model": deep, "compute": compute, "optimizer": {"name": "adamw"}, "phases": [{"accept": {}}]})
        return pretrain_needs(config, Facts({"tasks": (InputFacts("external"),)} if tasks else {}, int(bytes_each * count)))

    assert lacking(1, 1, {}, 15) and not lacking(1, 1, {}, 17)
    assert not lacking(1, 8, {"shard": 8}, 3.5) and lacking(1, 8, {"shard": 8}, 2)
    assert not lacking(1, 8, {"shard": 8}, 6, tasks=True) and lacking(1, 8, {"shard": 8}, 5, tasks=True)
    assert not lacking(1, 2, {"pipeline": 2}, 9)
    (line,) = lacking(4, 4, {"data": 4}, 60)
    assert "(16 bytes each in 4 processes of the layout data 4)" in line and not lacking(4, 4, {"data": 4}, 65)
    assert lacking(4, 4, {}, 60) and not lacking(1, 4, {}, 17)  # by default all processes have copies; other machines have their own memory


def test_one_tokenizer_for_policy_and_reward_model(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    policy, reward = imported("llama3", tmp_path / "a", store), imported("qwen2_5", tmp_path / "b", store)
    given: dict[str, Value] = {"policy": policy, "reward_model": reward, "prompts": rows("prompts", store)}
    with pytest.raises(PunaError, match=r"ppo: model/\w+ and model/\w+ have different tokenizers: policy and reward_model must have one"):
        check_stage(ppo, PpoConfig(), given, store)
    check_stage(ppo, PpoConfig(), {**given, "reward_model": policy}, store)
