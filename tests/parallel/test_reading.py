"""Training stages in eight processes that hold parts of their models: the log equals one process's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from safetensors import safe_open

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.training.trainer import TIMED
from puna.models.transformer import Transformer
from puna.stages.align import distill, dpo, reinforcement
from puna.stages.contract import External, execute
from puna.stages.contract.declaration import REGISTRY
from puna.stages.conversations import answering, asking
from puna.stages.io.import_model import ImportModelConfig, import_model
from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.storage import Artifact, Store
from puna.storage.schemas import table_schema
from tests.stages.evaluation.conftest import TEXTS, model, store  # noqa: F401 (fixtures)

from .conftest import Run

STAGES = (dpo, distill, reinforcement)  # these modules declare the stages
TRAINING: dict[str, Any] = {"steps": 2, "batch_size": 4, "schedule": {"learning_rate": 1e-3, "warmup_steps": 0}, "optimizer": {"epsilon": 1e-3}}
CONFIGS: dict[str, dict[str, Any]] = {
    "dpo": {"training": TRAINING}, "distill": {"answers": 2, "max_tokens": 4, "training": TRAINING},
    "grpo": {"rollouts": 2, "prompts": 6, "answers": 2, "max_tokens": 6, "reward": "verifier", "kl_coefficient": 0.0, "optimizer": {"epsilon": 1e-3}},
}  # fmt: skip
CONFIGS["ppo"] = CONFIGS["grpo"]


def imported(opened: Store, kind: str, rows: list[dict[str, Any]]) -> Artifact:
    schema = table_schema(kind).schema
    return opened.import_table(kind, pa.Table.from_pylist([{**dict.fromkeys(schema.names), **row} for row in rows], schema=schema))


def inputs(opened: Store, name: str, first: Artifact, other: Artifact) -> dict[str, list[Artifact]]:
    task = {"task": "t", "reference": "r", "verifier": json.dumps({"name": "regex", "pattern": "[a-m]"})}
    own = [{"id": f"{n:02}", **task, "split": "train" if n % 4 else "heldout", "messages": asking(f"what is {n}?")} for n in range(16)]
    if name in ("grpo", "ppo"):
        return {"policy": [first], "prompts": [imported(opened, "prompts", own)]}
    if name == "distill":
        return {"student": [first], "teacher": [other], "prompts": [imported(opened, "prompts", own)]}
    pair = {"chosen": answering("cat 1"), "rejected": answering("no"), "level": "better"}
    return {"model": [first], "preferences": [imported(opened, "preferences", [{"id": row["id"], "task": "t", "split": row["split"], "messages": row["messages"], **pair, "prompt_id": row["id"]} for row in own])]}


def sent(given: dict[str, list[Artifact]]) -> dict[str, list[Any]]:
    return {key: [(one.kind, one.key) for one in some] for key, some in given.items()}


@pytest.mark.parametrize("name, more", [
    ("dpo", {"training": {"compute": {"layout": {"shard": 4, "tensor": 2}}}}), ("distill", {"training": {"compute": {"layout": {"data": 2, "shard": 2, "tensor": 2}}}}),
    ("grpo", {"generate": 4, "generate_tensor": 2}), ("grpo", {"compute": {"layout": {"data": 4, "pipeline": 2}}}),
    ("distill", {"training": {"compute": {"layout": {"data": 2, "pipeline": 2, "tensor": 2}}}}),
    ("dpo", {"training": {"compute": {"layout": {"shard": 4, "pipeline": 2, "virtual_stages": 2}}}}),
    ("dpo", {"training": {"compute": {"layout": {"data": 4, "shard": 2}, "precision": "bf16"}}}),
    ("dpo", {"loss": "kto", "training": {"compute": {"layout": {"data": 4, "pipeline": 2}, "precision": "bf16"}}}),
    ("dpo", {"method": "lora", "lora": {"rank": 4, "loraplus_ratio": 8.0}, "training": {"compute": {"layout": {"shard": 4, "tensor": 2}}}}),
    ("grpo", {"method": "lora", "lora": {"rank": 4, "keep": True}, "compute": {"layout": {"data": 4, "pipeline": 2}}}),
], ids=["dpo", "distill", "grpo", "grpo by stages", "distill by stages", "dpo by interleaved stages", "dpo by shards in bf16", "kto by stages in bf16", "adapters of dpo", "adapters of grpo by stages"])  # fmt: skip
def test_stages_whose_ranks_have_parts_write_the_log_of_one_process(
    ranks: Run, name: str, more: dict[str, Any], tmp_path: Path, store: Store, model: Callable[..., Artifact]  # noqa: F811
) -> None:
    given, stage = inputs(store, name, model(3, groups=2, layers=4), model(4, groups=2, layers=4)), REGISTRY[name]
    config = CONFIGS[name] | {key: more[key] for key in ("method", "lora", "loss") if key in more}
    if precision := more.get("training", {}).get("compute", {}).get("precision"):
        config = config | {"training": config["training"] | {"compute": {"precision": precision}}}
    other = shutil.copytree(store.root, tmp_path / "other")
    single = {key: some if next(spec for spec in stage.inputs if spec.name == key).many else some[0] for key, some in given.items()}
    one = execute(stage, stage.config(**config), single, store)
    own = config | {key: config.get(key, {}) | value if isinstance(value, dict) else value for key, value in more.items()}
    assert ranks("stage", 8, store=str(other), name=name, config=own, inputs=sent(given)) == [one.key] + 7 * [None]
    shared = Store.open(other).find("model", one.key)
    assert shared is not None
    # Before the first step all margins of dpo are 0, up to rounding.
    logs = [[{k: v for k, v in row.items() if k not in (*TIMED, "accuracy")} for row in made.read("training_log").to_pylist()] for made in (shared, one)]
    assert len(logs[1]) == 2
    for own, expected in zip(*logs, strict=True):
        assert own == pytest.approx(expected, rel=1e-4, abs=1e-5)
    metrics = [{k: v for k, v in made.manifest.metrics.items() if k.startswith(("heldout", "reference"))} for made in (shared, one)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-5)
    assert set(shared.manifest.files) == set(one.manifest.files)


def tokenized(opened: Store, length: int) -> tuple[Artifact, Artifact]:
    """Return a tokenizer, and documents tokenized in rows of `length` tokens."""
    documents = imported(opened, "documents", [
        {"id": f"{n:032x}", "url": f"https://x.org/{n}", "source": "web", "fetched_at": datetime(2026, 1, 1, tzinfo=UTC), "text": " ".join(TEXTS[n : n + 5])} for n in range(60)
    ])  # fmt: skip
    vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=280), {"documents": documents}, opened)
    return vocabulary, execute(tokenize, TokenizeConfig(sequence_length=length), {"documents": documents, "tokenizer": vocabulary}, opened)


PHASES: list[dict[str, Any]] = [
    {"name": "initial", "steps": 4, "rows_per_step": 6, "ramp": [{"after_tokens": 500, "rows": 8}], "schedule": {"learning_rate": 3e-3, "warmup_steps": 2, "ema": 0.8}},
    {"name": "long", "steps": 2, "rows_per_step": 6, "join_rows": 4, "rope_theta": 20000.0, "accept": {"attempts": 2, "needle": 0.0, "short_loss": 9.0}, "schedule": {"learning_rate": 3e-3, "warmup_steps": 0, "shape": "constant"}},
    {"name": "anneal", "steps": 3, "rows_per_step": 6, "join_rows": 4, "schedule": {"learning_rate": 2e-3, "warmup_steps": 0, "shape": "constant", "anneal_steps": 3, "average": 2}},
]  # fmt: skip


@pytest.mark.parametrize("layout, optimizer", [
    ({"shard": 4, "context": 2}, {"embedding_scale": 3.0, "max_grad_norm": None}),
    ({"shard": 2, "pipeline": 2, "virtual_stages": 2, "tensor": 2}, {"name": "muon", "state_in": "file"}),
], ids=str)  # fmt: skip
def test_pretraining_in_phases_and_further_is_that_of_one_process(
    ranks: Run, layout: dict[str, int], optimizer: dict[str, Any], tmp_path: Path, store: Store  # noqa: F811
) -> None:
    """A ramp, a moving average, a longer context that is accepted, an average of checkpoints; then training goes on with the moments kept."""
    vocabulary, tokens = tokenized(store, 64)
    config: dict[str, Any] = {
        "phases": PHASES, "optimizer": {"epsilon": 1e-3, **optimizer}, "validate_every": 2, "checkpoint_every": 2, "validation_share": 0.1, "needle": {"trials": 1},
        "model": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4},
    }  # fmt: skip
    further = {name: value for name, value in config.items() if name != "model"} | {"phases": [PHASES[2] | {"name": "further"}]}
    compute = {"micro_batch_tokens": 512}
    given: dict[str, Any] = {"tokens": tokens, "tokenizer": vocabulary}
    first = execute(pretrain, PretrainConfig(**config, compute=compute), given, store)
    second = execute(pretrain, PretrainConfig(**further, compute=compute), given | {"model": first}, store)
    sending = sent({name: [one] for name, one in given.items()})
    for own, expected, more in ((config, first, {}), (further, second, {"model": [(first.kind, first.key)]})):
        other = shutil.copytree(store.root, tmp_path / str(len(own)))
        shutil.rmtree(Store.open(other).find("model", expected.key).path())
        made = ranks("stage", 8, store=str(other), name="pretrain", config=own | {"compute": compute | {"layout": layout}}, inputs=sending | more)
        assert made == [expected.key] + 7 * [None]
        shared = Store.open(other).find("model", expected.key)
        assert shared is not None and set(shared.manifest.files) == set(expected.manifest.files)
        logs = [[{k: v for k, v in row.items() if k not in TIMED and v is not None} for row in one.read("training_log").to_pylist()] for one in (shared, expected)]
        assert len(logs[0]) == len(logs[1]) == sum(phase["steps"] for phase in own["phases"])
        for row, alone in zip(*logs, strict=True):
            assert row == pytest.approx(alone, rel=1e-4, abs=1e-5)
        named = ("averaging", "accept", "attempts", "short_loss", "needle", "final", "optimizer_state", "epochs")
        metrics = [{k: v for k, v in one.manifest.metrics.items() if k.startswith(named)} for one in (shared, expected)]
        assert (metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-5) and ("optimizer_state_given", 1) in {*metrics[0].items()}) or own is config


@pytest.mark.parametrize("layout, share, more", [({"shard": 8}, 1 / 8, 0.45), ({"shard": 2, "pipeline": 2, "tensor": 2}, 1 / 8, 0.35)], ids=str)
def test_no_rank_has_memory_for_the_whole_model_in_pretraining(
    ranks: Run, layout: dict[str, int], share: float, more: float, tmp_path: Path, store: Store  # noqa: F811
) -> None:
    """From the initial weights to the artifact, outside of steps, a rank has its share of the weights, of their average, and one weight
    more; under `shard`, also the weights outside layers and of two of the eight layers, or of its stage, while they compute. Moments are in
    files."""
    vocabulary, tokens = tokenized(store, 32)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    config: dict[str, Any] = {
        "phases": [
            {"name": name, "steps": steps, "rows_per_step": 8, "schedule": {"learning_rate": 3e-3, "warmup_steps": 0, "shape": "constant", "ema": ema}}
            for name, steps, ema in (("initial", 2, 0.8), ("second", 1, 0.0))
        ],
        "model": shape,
        "optimizer": {"epsilon": 1e-3, "state_in": "file"}, "validate_every": 2, "validation_share": 0.05, "validation_tokens": 100,
    }  # fmt: skip
    given, compute = {"tokens": tokens, "tokenizer": vocabulary}, {"micro_batch_tokens": 32}
    other = shutil.copytree(store.root, tmp_path / "other")
    one = execute(pretrain, PretrainConfig(**config, compute=compute), given, store)
    peaks = ranks("stage_memory", 8, bucket=1 << 15, store=str(other), name="pretrain", config=config | {"compute": compute | {"layout": layout}}, inputs=sent({name: [some] for name, some in given.items()}))
    made = Store.open(other).find("model", one.key)
    assert made is not None
    with safe_open(made.path("model.safetensors"), "pt") as own, safe_open(one.path("model.safetensors"), "pt") as expected:
        assert own.keys() == expected.keys() and own.metadata() == expected.metadata()
        for name in expected.keys():  # noqa: SIM118
            np.testing.assert_allclose(own.get_tensor(name), expected.get_tensor(name), rtol=1e-5, atol=1e-5, err_msg=name)
    bytes_ = one.path("model.safetensors").stat().st_size
    assert all(peak / bytes_ < 2 * share + more for peak in peaks), [round(peak / bytes_, 3) for peak in peaks]


def test_only_the_first_rank_asks_the_verifiers(ranks: Run, store: Store, model: Callable[..., Artifact]) -> None:  # noqa: F811
    given, config = inputs(store, "grpo", model(3), model(3)), CONFIGS["grpo"] | {"rollouts": 1}
    assert ranks("verified", 8, store=str(store.root), name="grpo", config=config, inputs=sent(given)) == [12, *7 * [0]]


def test_all_ranks_learn_from_the_same_answers(ranks: Run, store: Store, model: Callable[..., Artifact]) -> None:  # noqa: F811
    """Each rank would sample different answers."""
    config, given = CONFIGS["distill"], sent(inputs(store, "distill", model(3), model(4)))
    first, *others = ranks("learned", 8, store=str(store.root), name="distill", config=config, inputs=given)
    assert first and all(own == first for own in others)


def test_all_ranks_decide_about_a_phase_and_an_average_as_the_first_one(ranks: Run, tmp_path: Path) -> None:
    """Other ranks, which see another loss and accuracy, would accept what rank 0 refuses."""
    assert ranks("decided", 8, folder=str(tmp_path)) == 8 * [{"accepted": False, "kept": False}]


@pytest.mark.parametrize("name, models, by", [("dpo", 1, "training"), ("grpo", 1, ""), ("ppo", 2, ""), ("distill", 1, "training")])
def test_each_rank_looks_at_its_part_of_the_models(ranks: Run, name: str, models: int, by: str, tmp_path: Path) -> None:
    """About an eighth of each model is touched, plus neighbouring pages read by other ranks, which the system maps along; a model loaded
    whole is not mapped, nor is a teacher whose pieces are read."""
    opened = Store.open(tmp_path / "store")
    shape = ModelConfig(vocab_size=300, hidden_size=512, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
    network = Transformer(shape, seed=0)
    save(network, tmp_path / "model", Tokenizer.train([*TEXTS, "cat no"], 300))
    large = execute(import_model, ImportModelConfig(), {"model": External.resolve(f"model={tmp_path / 'model'}")[0]}, opened)
    config, compute = CONFIGS[name], {"layout": {"shard": 8}}
    config = config | ({by: config[by] | {"compute": compute}} if by else {"compute": compute})
    looked = ranks("stage_reads", 8, store=str(opened.root), name=name, config=config, inputs=sent(inputs(opened, name, large, large)))
    bytes_ = models * sum(p.nbytes for p in network.parameters())
    assert all(0.08 < own / bytes_ < 0.45 for own in looked), [round(own / bytes_, 3) for own in looked]
