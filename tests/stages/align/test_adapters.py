"""Adapters that a stage keeps, and adapters made elsewhere, merged into a model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from puna.models.forest import Forest
from puna.models.formats.checkpoint import load
from puna.stages.align.reward_model import RewardModelConfig, reward_model
from puna.stages.align.sft import SftConfig, sft
from puna.stages.contract import External, StageConfig, execute
from puna.stages.io.export import export_model
from puna.stages.io.merge import merge
from puna.storage import Artifact, PunaError, Store

from .test_engines import STEPS, instructions, preferences

Tiny = Callable[..., Artifact]


def trained(store: Store, start: Artifact, head: str = "lm", engine: str = "puna", **lora: object) -> Artifact:
    settings = {"method": "lora", "engine": engine, "lora": {"rank": 2, **lora}, "training": {**STEPS, "epochs": 4.0}}
    if head == "scalar":
        return execute(reward_model, RewardModelConfig(**settings), {"model": start, "preferences": [preferences(store, 6)]}, store)
    return execute(sft, SftConfig(**settings), {"model": start, "instructions": [instructions(store)]}, store)


def merged(store: Store, start: Artifact, folder: Path) -> Artifact:
    return execute(merge, StageConfig(), {"model": start, "adapter": External.resolve(f"adapter={folder}")[0]}, store)


@pytest.mark.parametrize(
    "lora", [{}, {"rslora": True, "alpha": 5.0}, {"dora": True}, {"targets": ["q_proj", "down_proj"]}, {"engine": "trl"}]
)
def test_kept_adapters_make_the_trained_model_of_the_one_before(tmp_path: Path, tiny_model: Tiny, lora: dict) -> None:
    store = Store.open(tmp_path / "store")
    start = tiny_model(store)
    made = trained(store, start, **lora)
    export_model(made, tmp_path / "adapter", "adapter")
    again = merged(store, start, tmp_path / "adapter")
    expected, found = load(made.path()).state_dict(), load(again.path()).state_dict()
    assert not torch.equal(load(start.path()).state_dict()["model.layers.0.self_attn.q_proj.weight"], expected["model.layers.0.self_attn.q_proj.weight"])
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)


def test_transformers_and_peft_read_kept_adapters(tmp_path: Path, tiny_model: Tiny) -> None:
    """For a language model, and for a reward model, whose adapter includes the head."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    store = Store.open(tmp_path / "store")
    start = tiny_model(store)
    export_model(start, tmp_path / "base")
    ids = torch.tensor([[5, 9, 2, 11, 3]])
    for head, kind in (("lm", AutoModelForCausalLM), ("scalar", AutoModelForSequenceClassification)):
        made = trained(store, start, head)
        export_model(made, tmp_path / head, "adapter")
        options = {} if head == "lm" else {"num_labels": 1, "pad_token_id": 0}
        theirs = PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base", dtype=torch.float32, **options), str(tmp_path / head))
        ours = load(made.path())
        with torch.no_grad():
            hidden = ours.hidden(Forest.pack(ids.tolist()))
            found = ours.logits(hidden) if head == "lm" else ours.scalar(hidden)[-1]
            expected = theirs(ids).logits[0]
        assert head == "lm" or ours.score.weight.abs().max() > 0
        torch.testing.assert_close(found.view(expected.shape), expected, atol=1e-5, rtol=1e-4)


def test_adapters_of_peft_are_merged(tmp_path: Path, tiny_model: Tiny) -> None:
    """Adapters made with PEFT on transformers' model, of a kind that Puna does not train; the embeddings are trained in full."""
    from peft import LoHaConfig, LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    store = Store.open(tmp_path / "store")
    start = tiny_model(store)
    export_model(start, tmp_path / "base")
    ids = torch.tensor([[5, 9, 2, 11, 3]])
    for name, settings in (
        ("loha", LoHaConfig(r=3, target_modules=["q_proj", "up_proj"], init_weights=False, task_type="CAUSAL_LM")),
        ("lora", LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")),
    ):
        torch.manual_seed(0)
        theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32), settings)
        theirs.save_pretrained(str(tmp_path / name))
        ours = load(merged(store, start, tmp_path / name).path())
        with torch.no_grad():
            torch.testing.assert_close(ours.logits(ours.hidden(Forest.pack(ids.tolist()))), theirs(ids).logits[0], atol=1e-4, rtol=1e-4)


def test_adapters_that_do_not_fit_are_refused_by_name(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path / "store")
    start = tiny_model(store)
    export_model(trained(store, start), folder := tmp_path / "adapter", "adapter")
    with pytest.raises(PunaError, match="has no adapters: train it with method=lora"):
        export_model(start, tmp_path / "none", "adapter")
    assert not (tmp_path / "none").exists()
    with pytest.raises(PunaError, match="has no adapters"):
        export_model(trained(store, start, initialization="pissa"), tmp_path / "none", "adapter")
    import json

    from safetensors.torch import load_file, save_file

    for name, change, message in (
        ("short", lambda state: {k: v for k, v in state.items() if "layers.1" not in k}, "there is no .*layers.1"),
        ("long", lambda state: state | {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.zeros(2, 32)}, "no place for .*layers.7"),
        ("wide", lambda state: {k: torch.zeros(9, 9) for k in state}, "size mismatch"),
    ):
        shutil.copytree(folder, other := tmp_path / name)
        save_file(change(load_file(other / "adapter_model.safetensors")), other / "adapter_model.safetensors")
        with pytest.raises(PunaError, match=f"(?s)does not fit model/.*{message}"):
            merged(store, start, other)
    shutil.copytree(folder, other := tmp_path / "prompt")
    settings = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    (other / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(PunaError, match="PROMPT_TUNING"):
        merged(store, start, other)
    (other / "adapter_model.safetensors").rename(other / "adapter_model.bin")
    with pytest.raises(PunaError, match="has no adapter_model.safetensors; .* is a pickle"):
        merged(store, start, other)
