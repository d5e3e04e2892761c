"""Training stages: both engines on the same artifacts, LoRA, resumption, packing."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch

from puna.models.forest import Forest
from puna.models.formats.checkpoint import load
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.training import losses
from puna.models.training.parallel import mesh
from puna.models.training.parallel.layout import Layout
from puna.models.training.settings import TrainingSettings
from puna.models.training.trainer import TIMED
from puna.stages import plugins
from puna.stages.align.average import AverageConfig, average
from puna.stages.align.dpo import DpoConfig, dpo
from puna.stages.align.reference_logprobs import ReferenceLogprobsConfig, reference_logprobs
from puna.stages.align.reward_model import RewardModelConfig, pairs, report, reward_model
from puna.stages.align.sft import SftConfig, embedding_noise, sft
from puna.stages.contract import StageRun, execute, identify
from puna.stages.conversations import answering, asking, content_of, dump, message_of, messages_of
from puna.stages.training import train as training
from puna.stages.training import trl_engine
from puna.stages.training.rankings import Ranked, pairs_of
from puna.stages.training.train import Example, render
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

Tiny = Callable[..., Artifact]
STEPS = {
    "epochs": 1.0,
    "batch_size": 8,
    "schedule": {"learning_rate": 1e-3, "warmup_steps": 0.0, "shape": "constant"},
    "optimizer": {"weight_decay": 0.01},
}


def instructions(store: Store, count: int = 24) -> Artifact:
    rows = [
        {"id": f"{i:02d}", "prompt_id": f"{i:02d}", "task": "t", "split": "train", "tools": None,
         "messages": dump([{"role": "user", "content": f"say {i} + {i % 3}"}, {"role": "assistant", "content": str(i + i % 3)}]),
         "source": "gold", "score": None}
        for i in range(count)
    ]  # fmt: skip
    return store.import_table("instructions", pa.Table.from_pylist(rows, schema=table_schema("instructions").schema))


def preferences(store: Store, count: int = 24, edited: bool = False, split: str = "train") -> Artifact:
    rows = [
        {"id": f"{i:02d}{split}", "prompt_id": f"{split}{i // 2:02d}", "task": "t", "split": split,
         "messages": asking(f"say {i // 2} + 1{'.' * (split == 'heldout')}"),
         "tools": None, "chosen": answering(str(i // 2 + 1)), "rejected": answering(f"no {i % 4}"),
         "edited": answering(f"{i // 2 + 1} !") if edited else None, "others": None, "level": "better", "margin": 0.5, "chosen_model": "a", "rejected_model": "b"}
        for i in range(count)
    ]  # fmt: skip
    return store.import_table("preferences", pa.Table.from_pylist(rows, schema=table_schema("preferences").schema))


def log(artifact: Artifact) -> list[dict[str, Any]]:
    return artifact.read("training_log").to_pylist()


def answer_logprob(model: Artifact, row: dict[str, Any], side: str) -> float:
    """Return the summed log-probability of one side of a pair, without format tokens, in fp64."""
    tokenizer, policy = Tokenizer.load(model.path()), load(model.path()).double()
    example = render(tokenizer, row, [[[json.loads(row[side])]]])
    ids = [*example.prompt, *example.answers[0]]
    logprobs = policy.logits(policy.hidden(Forest.pack([ids]))).log_softmax(-1).detach()
    start = len(example.prompt)
    return sum(float(logprobs[start + i - 1, ids[start + i]]) for i, counts in enumerate(example.masks[0]) if counts)


def sft_loss_by_hand(model: Artifact, rows: list[dict[str, Any]]) -> float:
    """Return the mean cross-entropy of the answer tokens, each dialogue alone, in fp64."""
    tokenizer, policy = Tokenizer.load(model.path()), load(model.path()).double()
    total, count = 0.0, 0
    for row in rows:
        prompt, answer, _ = tokenizer.render_pair(messages_of(row)[:-1], content_of(messages_of(row)[-1]))
        ids = [*prompt, *answer]
        logits = policy.logits(policy.hidden(Forest.pack([ids])))
        logprobs = logits.log_softmax(-1)
        total -= sum(float(logprobs[i - 1, ids[i]].detach()) for i in range(len(prompt), len(ids)))
        count += len(answer)
    return total / count


def test_sft_engines_agree_with_the_definition(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model, data = tiny_model(store), instructions(store)
    found = {}
    for engine in ("puna", "trl"):
        config = SftConfig(engine=engine, training={**STEPS, "batch_size": 24, "epochs": 3.0})
        found[engine] = execute(sft, config, {"model": model, "instructions": [data]}, store)
    expected = sft_loss_by_hand(model, data.read().to_pylist())
    logs = {engine: log(artifact) for engine, artifact in found.items()}
    for engine, rows in logs.items():
        assert len(rows) == 3 and rows[0]["loss"] == pytest.approx(expected, rel=1e-4), engine
    # The first step is the same on the same batch; afterwards the losses stay close.
    assert [r["loss"] for r in logs["trl"]] == pytest.approx([r["loss"] for r in logs["puna"]], rel=2e-3)
    assert logs["trl"][0]["gradient_norm"] == pytest.approx(logs["puna"][0]["gradient_norm"], rel=1e-3)
    for artifact in found.values():
        assert json.loads(artifact.path("config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_noise_on_embeddings_is_bounded_and_only_in_training(tmp_path: Path, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path)
    model = load(tiny_model(store).path())
    forest = Forest.pack([[1, 2, 3], [4, 5, 6, 7]])
    clean = model.model.embed_tokens(forest.tokens).detach()
    with embedding_noise(model, 8.0, 4.0):
        noise = [model.model.embed_tokens(forest.tokens).detach() - clean for _ in range(40)]
        with torch.no_grad():
            assert torch.equal(model.model.embed_tokens(forest.tokens), clean)
    drawn, bound = torch.stack(noise), 8 / math.sqrt(4 * 32)
    assert torch.equal(model.model.embed_tokens(forest.tokens), clean) and drawn.abs().max() <= bound * 1.001
    assert drawn.mean().abs() < 0.03 * bound and drawn.var().item() == pytest.approx(bound**2 / 3, rel=0.05)
    found = {}
    given = {"model": tiny_model(store), "instructions": [instructions(store)]}
    for alpha in (0.0, 5.0):
        config = SftConfig(neftune_alpha=alpha, training={**STEPS, "batch_size": 24, "epochs": 2.0})
        found[alpha] = [log(execute(sft, config, given, Store.open(tmp_path / str(k)))) for k in range(2)]
        assert [row["loss"] for row in found[alpha][0]] == [row["loss"] for row in found[alpha][1]]
    assert found[5.0][0][0]["loss"] != found[0.0][0][0]["loss"]
    monkeypatch.setattr(mesh, "layout_of", lambda layout: Layout(data=2))  # as if two processes trained
    with pytest.raises(PunaError, match="is proved only without neftune_alpha"):
        execute(sft, SftConfig(neftune_alpha=5.0, training=STEPS), given, store)
    with pytest.raises(ValueError, match="neftune_alpha needs engine puna"):
        SftConfig(neftune_alpha=5.0, engine="trl")


def test_reward_engines_agree_on_pairs(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model = tiny_model(store)
    given = {"model": model, "preferences": [preferences(store), preferences(store, split="heldout")]}
    logs, artifacts = {}, {}
    # 24 pairs of 12 prompts, two for each: one step takes all of them in either engine.
    for engine, batch in (("puna", 12), ("trl", 24)):
        config = RewardModelConfig(engine=engine, training={**STEPS, "batch_size": batch, "epochs": 4.0})
        artifacts[engine] = execute(reward_model, config, given, store)
        logs[engine] = log(artifacts[engine])
    assert [r["loss"] for r in logs["trl"]] == pytest.approx([r["loss"] for r in logs["puna"]], rel=2e-3)
    for artifact in artifacts.values():
        assert artifact.manifest.metrics["heldout_pairs"] == 24
        assert artifact.manifest.metrics["heldout_accuracy"] == artifact.manifest.metrics["train_accuracy"]
        assert load(artifact.path()).head == "scalar"
    # Reward models can be averaged like policies.
    both = execute(average, AverageConfig(weights=(1.0, 3.0)), {"models": list(artifacts.values())}, store)
    weights = [load(artifact.path()).score.weight for artifact in (*artifacts.values(), both)]
    assert torch.allclose(weights[2], (weights[0] + 3 * weights[1]) / 4, atol=1e-7)


def test_dpo_engines_agree_without_what_trl_cannot_do(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = {"model": tiny_model(store), "preferences": [preferences(store)]}
    logs = {}
    for engine, batch in (("puna", 12), ("trl", 24)):
        fit = {**STEPS, "batch_size": batch, "epochs": 4.0}
        robust = {"loss": "robust", "loss_parameters": {"label_smoothing": 0.3}}
        config = DpoConfig(engine=engine, mask_format=False, nll_normalization="tokens", training=fit, **robust)
        logs[engine] = log(execute(dpo, config, given, store))
    assert [r["loss"] for r in logs["trl"]] == pytest.approx([r["loss"] for r in logs["puna"]], rel=2e-3)
    first = logs["puna"][0]
    # At the reference, the preference term is log 2 for any pair.
    assert first["loss"] == pytest.approx(math.log(2) + 0.2 * first["nll"], rel=1e-4)


def test_trl_is_refused_on_several_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device would take a whole batch, so that a step had several batches."""
    store = Store.open(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with store.work("0" * 64) as work, pytest.raises(PunaError, match="engine trl needs one device, since others would enlarge the batch"):
        trl_engine.arguments(TrainingSettings(), 8, StageRun("sft", "model", SftConfig(), work))


def test_trl_is_refused_where_its_loss_would_be_another() -> None:
    """TRL has one mask for both terms of DPO: with format tokens masked, its likelihood term differs from Puna's."""
    with pytest.raises(ValueError, match="set mask_format false or nll_weight 0"):
        DpoConfig(engine="trl", nll_normalization="tokens")
    with pytest.raises(ValueError, match="nll_normalization must be tokens"):
        DpoConfig(engine="trl", mask_format=False)
    with pytest.raises(ValueError, match="optimizer.embedding_scale 1.0: training.optimizer.embedding_scale cannot be 32.0"):
        SftConfig(engine="trl", training={"optimizer": {"embedding_scale": 32.0}})
    with pytest.raises(ValueError, match="compute.deterministic False: training.compute.deterministic cannot be True"):
        SftConfig(engine="trl", training={"compute": {"deterministic": True}})
    assert DpoConfig(engine="trl", nll_weight=0).mask_format and DpoConfig(engine="trl", mask_format=False, nll_normalization="tokens").nll_weight


@pytest.mark.parametrize("engine", ["puna", "trl"])
def test_lora_trains_few_weights_and_merges_into_a_plain_checkpoint(tmp_path: Path, tiny_model: Tiny, engine: str) -> None:
    store = Store.open(tmp_path)
    model, data = tiny_model(store), instructions(store)
    config = SftConfig(engine=engine, method="lora", lora={"rank": 4, "targets": ("q_proj", "v_proj")}, training=STEPS)
    made = execute(sft, config, {"model": model, "instructions": [data]}, store)
    before, after = load(model.path()).state_dict(), load(made.path()).state_dict()
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{i}.self_attn.{p}.weight" for i in (0, 1) for p in ("q_proj", "v_proj")}
    for name in changed:
        assert int(torch.linalg.matrix_rank(after[name] - before[name])) <= 4
    if engine == "puna":
        # rank * (in + out), q: 32 -> 32, v: 32 -> 16 (two key-value heads of width 8), two layers
        assert made.manifest.metrics["trainable_parameters"] == 2 * 4 * (64 + 48)
        first = sft_loss_by_hand(model, data.read().to_pylist())
        assert sft_loss_by_hand(made, data.read().to_pylist()) < first


@pytest.mark.parametrize("trained", ["dpo", "reward_model"])
def test_trl_trains_adapters_of_policies_and_reward_models(tmp_path: Path, tiny_model: Tiny, trained: str) -> None:
    """Both engines start with the same loss, which for DPO shows that the reference is the starting policy."""
    store = Store.open(tmp_path)
    model = tiny_model(store)
    given = {"model": model, "preferences": [preferences(store)]}
    fit = {"method": "lora", "lora": {"rank": 2, "targets": ("v_proj",)}}
    found: dict[str, Artifact] = {}
    for name, engine, batch in (("puna", "puna", 12), ("trl", "trl", 24), *([("again", "trl", 24)] if trained == "dpo" else [])):
        config = {**fit, "engine": engine, "training": {**STEPS, "batch_size": batch, "epochs": 2.0}}
        torch.manual_seed(len(found))  # earlier random draws have no effect
        place = Store.open(tmp_path / name)
        if trained == "dpo":
            found[name] = execute(dpo, DpoConfig(mask_format=False, nll_normalization="tokens", **config), given, place)
        else:
            found[name] = execute(reward_model, RewardModelConfig(**config), given, place)
    logs = {name: [row["loss"] for row in log(artifact)] for name, artifact in found.items()}
    assert logs["trl"][0] == pytest.approx(logs["puna"][0], rel=1e-4) and logs["trl"][-1] < logs["trl"][0]
    assert len({found[name].data_digest for name in found if name != "puna"}) == 1
    head = "lm" if trained == "dpo" else "scalar"
    before, after = load(model.path(), head).state_dict(), load(found["trl"].path()).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{i}.self_attn.v_proj.weight" for i in (0, 1)} | ({"score.weight"} if head == "scalar" else set())
    name = "model.layers.0.self_attn.v_proj.weight"
    assert int(torch.linalg.matrix_rank(after[name] - before[name])) <= 2


def test_order_of_the_inputs_and_row_sizes_do_not_matter(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model, one = tiny_model(store), instructions(store, 9)
    other = instructions(store, 24)
    weights = []
    for number, (sets, micro_batch_tokens) in enumerate((([one, other], 4096), ([other, one], 4096), ([one, other], 64))):
        place = Store.open(tmp_path / str(number))
        config = SftConfig(training={**STEPS, "compute": {"micro_batch_tokens": micro_batch_tokens}})
        weights.append(load(execute(sft, config, {"model": model, "instructions": sets}, place).path()).state_dict())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])
        torch.testing.assert_close(value, weights[2][name], atol=1e-4, rtol=1e-3)


def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_STEPS", 2)
    stores = [Store.open(tmp_path / name) for name in ("whole", "killed")]
    config = SftConfig(training={**STEPS, "epochs": 2.0})
    model, data = tiny_model(stores[0]), instructions(stores[0])
    whole = execute(sft, config, {"model": model, "instructions": [data]}, stores[0])

    class Killer:
        def progress(self, stage: str, done: float, total: float, note: str) -> None:
            if done == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(sft, config, {"model": model, "instructions": [data]}, stores[1], listener=Killer())
    steps = []

    class Recorder:
        def progress(self, stage: str, done: float, total: float, note: str) -> None:
            steps.append(done)

    again = execute(sft, config, {"model": model, "instructions": [data]}, stores[1], listener=Recorder())
    assert steps == [5, 6]
    assert again.data_digest == whole.data_digest
    assert len(log(again)) == 6


@pytest.mark.parametrize(("stage", "method", "stops"), [("sft", "full", (2, 3)), ("reward_model", "lora", (3,)), ("dpo", "lora", (5, 6))])
def test_a_stopped_training_of_trl_saves_its_step_and_ends_with_the_same_bits(
    stage: str, method: str, stops: tuple[int, ...], tmp_path: Path, tiny_model: Tiny
) -> None:
    """Stopped within a pass of three steps, at its end, and after the last step; adapters with dropout, which draws in every step."""
    stores = [Store.open(tmp_path / name) for name in ("whole", "stopped")]
    model = tiny_model(stores[0])
    given = {"model": model, "instructions": [instructions(stores[0])]} if stage == "sft" else {"model": model, "preferences": [preferences(stores[0])]}
    schedule = {"learning_rate": 1e-2, "warmup_steps": 2.0, "shape": "cosine"}
    lora = {"lora": {"rank": 2, "dropout": 0.5}} if method == "lora" else {}
    settings = {"method": method, **lora, "engine": "trl", "training": {**STEPS, "schedule": schedule, "epochs": 2.0}}
    what, config = {
        "sft": (sft, SftConfig), "reward_model": (reward_model, RewardModelConfig), "dpo": (dpo, DpoConfig)
    }[stage]  # fmt: skip
    more = {"mask_format": False, "nll_normalization": "tokens"} if stage == "dpo" else {}
    whole = execute(what, config(**settings, **more), given, stores[0])
    steps: list[float] = []

    class Watcher:
        """A callback that sends the signal of Ctrl-C in the middle of some steps."""

        def __init__(self, stop: int | None) -> None:
            self.stop = stop

        def progress(self, stage: str, done: float, total: float, note: str) -> None:
            if note.startswith("loss"):
                steps.append(done)
                if done == self.stop:
                    os.kill(os.getpid(), signal.SIGINT)

    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            execute(what, config(**settings, **more), given, stores[1], listener=Watcher(stop))
    again = execute(what, config(**settings, **more), given, stores[1], listener=Watcher(None))
    assert steps == [1, 2, 3, 4, 5, 6]
    assert again.data_digest == whole.data_digest
    rows = [[{name: value for name, value in row.items() if name not in TIMED} for row in log(one)] for one in (again, whole)]
    assert rows[0] == rows[1] and [row["step"] for row in rows[0]] == steps
    assert not [path for path in stores[1].root.rglob("*") if path.suffix in (".pt", ".pth", ".bin", ".pkl")]


def test_edits_rank_before_chosen_before_rejected(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    tokenizer = Tokenizer.load(tiny_model(store).path())
    row = {"id": "p", "messages": asking("q"), "tools": None}
    said = [[[{"role": "assistant", "content": text}] for text in group] for group in (("edit", "good", "bad"), ("good", "bad"))]
    example = render(tokenizer, row, said)
    assert example.groups == [[[0], [1], [2]], [[3], [4]]] and len(example.answers) == 5
    assert pairs_of(example, "best_rest") == [(0, 1), (0, 2), (3, 4)]
    assert pairs_of(example, "best_worst") == [(0, 2), (3, 4)]
    assert tokenizer.decode(example.answers[2], skip_special_tokens=True) == "bad"
    assert all(mask[-1] is False and all(mask[:-1]) for mask in example.masks)
    given = {"model": tiny_model(store), "preferences": [preferences(store, 40, edited=True)]}
    made = execute(reward_model, RewardModelConfig(training={**STEPS, "epochs": 15.0}), given, store)
    assert made.manifest.metrics["train_accuracy"] > 0.9 and made.manifest.metrics["train_edit_accuracy"] > 0.9


def test_accuracy_is_told_by_level_and_by_length() -> None:
    """Four pairs of two prompts: numbers that grow with length are right if the chosen answer is the longer one."""
    said = {"a": [[1] * 8, [2] * 2, [3] * 4, [4] * 4], "b": [[5] * 3, [6] * 9]}
    levels = {"a": ["better", "significantly_better"], "b": ["better"]}
    found = [
        Ranked(Example([0], answers, [[True] * len(one) for one in answers], [[[k], [k + 1]] for k in range(0, len(answers), 2)]),
               [{"edited": None, "level": level} for level in levels[name]])
        for name, answers in said.items()
    ]  # fmt: skip
    ordered, edits = pairs(found, [[float(len(one)) for one in answers] for answers in said.values()])
    assert [(pair.right, pair.longer, round(pair.difference, 2)) for pair in ordered] == [(1, 1, 0.75), (0.5, 0.5, 0), (0, 0, -0.67)]
    metrics: dict[str, float] = {}
    figures: dict[str, Any] = {}
    run = SimpleNamespace(metric=metrics.__setitem__, figure=figures.__setitem__)
    report(ordered, edits, "heldout", run)
    # Margins of 6 on two pairs, right on one and wrong on the other; on the tie, claimed and actual accuracy are one half.
    sure = 1 / (1 + math.exp(-6))
    assert metrics.pop("heldout_calibration_error") == pytest.approx((2 * sure - 1) / 3)
    assert metrics == {"heldout_accuracy": 0.5, "heldout_longer_accuracy": 0.5, "heldout_accuracy_better": 0.5, "heldout_accuracy_significantly_better": 0.5}
    assert figures["length"].series["accuracy"] == [("half or less (1)", 0.0), ("about as long (1)", 0.5), ("twice or more (1)", 1.0)]
    edited = [Ranked(Example([0], [[1], [2], [3]], [[True]] * 3, [[[0], [1], [2]]]), [{"edited": "x", "level": None}])]
    assert pairs(edited, [[3.0, 1.0, 2.0]]) == ([(None, 0.0, 0.5, 0.0, -1.0)], [1.0])


def test_dpo_prefers_the_chosen_and_keeps_its_likelihood(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    heldout = preferences(store, 6, split="heldout")
    given = {"model": tiny_model(store), "preferences": [preferences(store), heldout]}
    made = execute(dpo, DpoConfig(training={**STEPS, "epochs": 20.0}), given, store)
    metrics = made.manifest.metrics
    # Policy and reference are the same model at first.
    assert metrics["first_margin"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["final_accuracy"] == 1.0 and metrics["final_chosen_logprob"] > metrics["first_chosen_logprob"]
    # Held-out margins by hand: each answer alone, in fp64, without its format tokens.
    margins = []
    for row in heldout.read().to_pylist():
        ratios = [answer_logprob(made, row, side) - answer_logprob(given["model"], row, side) for side in ("chosen", "rejected")]
        margins.append(0.1 * (ratios[0] - ratios[1]))
    assert metrics["heldout_pairs"] == 6 and metrics["heldout_margin"] == pytest.approx(sum(margins) / 6, rel=1e-3)
    assert metrics["heldout_accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 6)


def test_a_policy_in_bf16_begins_where_its_reference_is(tmp_path: Path, tiny_model: Tiny) -> None:
    """fp32 log-probabilities differ from these by 1e-2 nats."""
    store = Store.open(tmp_path)
    given = {"model": tiny_model(store), "preferences": [preferences(store)]}
    config = DpoConfig(training={**STEPS, "compute": {"precision": "bf16"}}, beta=1.0)
    metrics = execute(dpo, config, given, store).manifest.metrics
    assert metrics["first_margin"] == pytest.approx(0.0, abs=1e-5)


def test_a_killed_run_keeps_its_reference(tmp_path: Path, tiny_model: Tiny, killed_and_resumed: Callable[..., tuple[Artifact, Artifact]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The run keeps its initial precision on a machine that is busy when the second process starts."""
    monkeypatch.setattr(training, "CHECKPOINT_STEPS", 1)
    stores = [Store.open(tmp_path / name) for name in ("whole", "killed")]
    given = {"model": tiny_model(stores[0]), "preferences": [preferences(stores[0]), preferences(stores[0], 6, split="heldout")]}
    config = DpoConfig(training={**STEPS, "compute": {"precision": "fastest"}}, beta=1.0)
    whole, made = killed_and_resumed(dpo, config, given, stores, lambda done, note: done >= 2 and note.startswith("loss"))
    assert made.data_digest == whole.data_digest and made.manifest.metrics["heldout_margin"] == whole.manifest.metrics["heldout_margin"]


def test_kept_reference_logprobs_are_read_and_not_computed_again(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model, pairs = tiny_model(store), preferences(store, 24, edited=True)
    kept = execute(reference_logprobs, ReferenceLogprobsConfig(micro_batch_tokens=128), {"model": model, "preferences": pairs}, store)
    assert kept.read().equals(pairs.read())
    rows = pairs.read().to_pylist()
    # 12 prompts: for each a chosen answer, its edit and two rejected ones, identified by their tokens.
    expected = {answer_logprob(model, row, side) for row in rows for side in ("chosen", "rejected", "edited")}
    assert kept.rows("scores") == 12 * 4 == len(expected)
    assert sorted(kept.read("scores")["value"].to_pylist()) == pytest.approx(sorted(expected), abs=1e-3)
    losses_of, computed = {}, {}
    for name, given, config in (
        ("none", pairs, DpoConfig(training=STEPS)),
        ("kept", kept, DpoConfig(training=STEPS)),
        ("ipo", kept, DpoConfig(training=STEPS, loss="ipo", beta=0.3)),
        ("other tokens", kept, DpoConfig(training=STEPS, mask_format=False)),
        ("other model", kept, DpoConfig(training=STEPS)),
        ("other precision", kept, DpoConfig(training={**STEPS, "compute": {"precision": "bf16"}})),
    ):
        made = execute(dpo, config, {"model": tiny_model(store, 1) if name == "other model" else model, "preferences": [given]}, store)
        losses_of[name], computed[name] = [row["loss"] for row in log(made)], made.manifest.metrics["reference_answers"]
    # Each preference is a separate pair among its prompt's answers: 2 x 3 of them.
    assert computed == {"none": 72, "kept": 0, "ipo": 0, "other tokens": 72, "other model": 72, "other precision": 72}
    assert losses_of["kept"] == pytest.approx(losses_of["none"], rel=1e-5)


def test_no_more_is_computed_than_training_visits_and_all_of_it_is_told(tmp_path: Path, tiny_model: Tiny) -> None:
    """60 prompts, a quarter epoch in steps of 5: the reference reads 15 prompts, the reward model is measured on 32 and the 3 held-out
    ones."""
    store = Store.open(tmp_path)
    given = {"model": tiny_model(store), "preferences": [preferences(store, 120), preferences(store, 6, split="heldout")]}
    told: list[tuple[str, float, float]] = []

    class Listener:
        def progress(self, stage: str, done: float, total: float, note: str) -> None:
            told.append((note.partition(" 0.")[0], done, total))

    fit = {**STEPS, "epochs": 0.25, "batch_size": 5, "compute": {"micro_batch_tokens": 128}}
    execute(dpo, DpoConfig(training=fit), given, store, listener=Listener())
    reference = [row[1:] for row in told if row[0] == "reference"]
    assert len(reference) > 2 and reference[-1] == (15, 15)
    assert [row[1:] for row in told if row[0].startswith("loss")] == [(1, 3), (2, 3), (3, 3)]
    made = execute(reward_model, RewardModelConfig(training=fit), given, store, listener=Listener())
    assert ("train accuracy", 32, 32) in told and ("heldout accuracy", 3, 3) in told
    assert (made.manifest.metrics["train_pairs"], made.manifest.metrics["heldout_pairs"]) == (120, 6)


def test_average_is_the_mean_and_refuses_models_of_two_kinds(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    models = [tiny_model(store, seed) for seed in (0, 1)]
    made = execute(average, AverageConfig(weights=(3, 1)), {"models": models}, store)
    one, two, mean = (load(a.path()).state_dict() for a in (*models, made))
    for name, value in mean.items():
        torch.testing.assert_close(value, 0.75 * one[name] + 0.25 * two[name])
    assert Tokenizer.load(made.path()).vocab_size == Tokenizer.load(models[0].path()).vocab_size
    with pytest.raises(PunaError, match="3 weights are given for 2 models"):
        execute(average, AverageConfig(weights=(1, 1, 1)), {"models": models}, store)
    scorer = execute(reward_model, RewardModelConfig(training=STEPS), {"model": models[0], "preferences": [preferences(store, 8)]}, store)
    with pytest.raises(PunaError, match="average: "):
        execute(average, AverageConfig(), {"models": [models[0], scorer]}, store)


def test_what_cannot_be_trained_is_named(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model = tiny_model(store)
    with pytest.raises(PunaError, match=r"24 too_long.*row 00: the conversation has \d+ tokens, but training.compute.micro_batch_tokens=16"):
        config = SftConfig(training={**STEPS, "compute": {"micro_batch_tokens": 16}})
        execute(sft, config, {"model": model, "instructions": [instructions(store)]}, store)
    with pytest.raises(PunaError, match="no training preference has one of the levels significantly_better"):
        config = DpoConfig(levels=("significantly_better",))
        execute(dpo, config, {"model": model, "preferences": [preferences(store)]}, store)


def test_an_example_counts_its_tokens_once() -> None:
    assert len(Example([1, 2, 3], [[4], [5, 6]], [[True], [True, True]], [[[0], [1]]])) == 6


def test_the_reward_models_nll_term_is_that_of_the_best_answers_under_the_policys_head(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model, data = tiny_model(store), preferences(store, 12, edited=True)
    steps = {**STEPS, "batch_size": 6}  # all six prompts in the first and only step, at which rewards are still equal
    config = RewardModelConfig(nll_weight=0.5, training=steps)
    made = execute(reward_model, config, {"model": model, "preferences": [data]}, store)
    tokenizer, policy = Tokenizer.load(model.path()), load(model.path()).double()
    means = []
    for row in data.read().to_pylist():
        prompt, answer, _ = tokenizer.render_pair(messages_of(row), content_of(message_of(row, "edited")))
        logprobs = policy.logits(policy.hidden(Forest.pack([[*prompt, *answer]]))).log_softmax(-1).detach()
        means.append(-sum(float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(answer)) / len(answer))
    (row,) = log(made)
    assert row["nll"] == pytest.approx(sum(means) / len(means), rel=1e-4)
    assert row["loss"] == pytest.approx(math.log(2) + 0.5 * row["nll"], rel=1e-5)


def test_trl_has_no_nll_term_for_reward_models() -> None:
    with pytest.raises(ValueError, match="nll_weight must be 0 with engine trl, not 0.5"):
        RewardModelConfig(engine="trl", nll_weight=0.5)


@pytest.mark.parametrize("kind", [SftConfig, RewardModelConfig, DpoConfig])
def test_settings_that_trl_has_not_are_refused(kind: type) -> None:
    other = {"nll_normalization": "tokens", "mask_format": False} if kind is DpoConfig else {}
    kind(engine="trl", **other)
    with pytest.raises(ValueError, match="training.optimizer.name cannot be muon"):
        kind(engine="trl", training={"optimizer": {"name": "muon"}}, **other)


def test_trl_takes_the_likelihood_over_tokens_only() -> None:
    with pytest.raises(ValueError, match="nll_normalization must be tokens with engine trl"):
        DpoConfig(engine="trl", mask_format=False)
    DpoConfig(engine="trl", nll_weight=0)


def test_trl_refuses_adapters_that_it_would_train_otherwise() -> None:
    tokens = {"nll_normalization": "tokens"}
    for config, given in ((SftConfig, {}), (DpoConfig, tokens), (RewardModelConfig, {})):
        with pytest.raises(ValueError, match="loraplus_ratio must be 1"):
            config(engine="trl", method="lora", lora={"loraplus_ratio": 4.0}, **given)
    pissa = {"method": "lora", "lora": {"initialization": "pissa"}, **tokens}
    with pytest.raises(ValueError, match="TRL's reference is the policy without its adapters"):
        DpoConfig(engine="trl", **pissa)
    DpoConfig(**pissa)
    RewardModelConfig(engine="trl", method="lora", lora={"initialization": "pissa"})


def test_trl_refuses_a_loss_that_it_would_train_otherwise() -> None:
    for loss in ("simpo", "orpo", "kto"):
        with pytest.raises(ValueError, match=f"DPOTrainer has no loss {loss}, only sigmoid, ipo, hinge, robust, sigmoid_norm, apo_zero, apo_down: set"):
            DpoConfig(engine="trl", loss=loss, nll_normalization="tokens")
    with pytest.raises(ValueError, match="TRL's loss sigmoid has no parameters"):
        DpoConfig(engine="trl", loss_parameters={"label_smoothing": 0.1}, mask_format=False, nll_normalization="tokens")
    with pytest.raises(ValueError, match="loss robust: label_smoothing: .*less than 0.5"):
        DpoConfig(loss="robust", loss_parameters={"label_smoothing": 0.5})
    with pytest.raises(ValueError, match="no preference loss sigmiod; did you mean sigmoid"):
        DpoConfig(loss="sigmiod")
    for wrong, message in (({"schedule": {"ema": 0.9}}, "training.schedule.ema cannot be 0.9"), ({"compute": {"deterministic": True}}, "compute.deterministic")):
        with pytest.raises(ValueError, match=message):
            DpoConfig(engine="trl", nll_normalization="tokens", training=wrong)


@pytest.mark.parametrize("loss", ["ipo", "hinge", "simpo", "orpo", "apo_zero", "apo_down"])
def test_every_loss_prefers_the_better_answer(tmp_path: Path, tiny_model: Tiny, loss: str) -> None:
    store = Store.open(tmp_path)
    given = {"model": tiny_model(store), "preferences": [preferences(store, 6)]}
    metrics = execute(dpo, DpoConfig(loss=loss, training={**STEPS, "epochs": 8.0}), given, store).manifest.metrics
    assert metrics["final_margin"] > metrics["first_margin"]


def test_the_loss_of_the_page_trains_and_its_code_counts_in_the_key(tmp_path: Path, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "extend.md").read_text(encoding="utf-8")
    blocks = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    (code,) = [block for block in blocks if "@preference_loss" in block]
    monkeypatch.setitem(losses.LOSSES, "squared_hinge", losses.LOSSES["hinge"])  # removed after the test
    monkeypatch.setattr(plugins, "_modules", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    store = Store.open(tmp_path / "store")
    given = {"model": tiny_model(store), "preferences": [preferences(store, 6)]}

    def config(module: str, text: str) -> DpoConfig:
        losses.LOSSES.pop("squared_hinge", None)
        (tmp_path / f"{module}.py").write_text(text)
        plugins.add(str(tmp_path / f"{module}.py"))
        return DpoConfig(loss="squared_hinge", beta=0.5, nll_weight=0, training=STEPS)

    first = config("loss_of_the_page", code)
    here = identify(dpo, first, given).code
    row = log(execute(dpo, first, given, store))[0]
    assert row["loss"] == pytest.approx(1.0, abs=1e-5)  # before the first step, margins are 0 up to rounding
    hashes = {}
    for module, text in (("loss_with_a_comment", code + "\n# a comment\n"), ("loss_doubled", code.replace(".square()", ".square() * 2"))):
        found = identify(dpo, config(module, text), given).code
        (hashes[module],) = [value for name, value in found.items() if name.startswith(module) and "squared_hinge" in name]
    assert hashes["loss_with_a_comment"] == next(v for k, v in here.items() if "squared_hinge" in k) != hashes["loss_doubled"]


@pytest.mark.parametrize("lora", [{"rslora": True, "loraplus_ratio": 4.0}, {"dora": True}, {"initialization": "pissa"}])
@pytest.mark.parametrize("trained", ["dpo", "reward_model"])
def test_adapters_of_each_kind_train_and_merge(tmp_path: Path, tiny_model: Tiny, lora: dict, trained: str) -> None:
    store = Store.open(tmp_path)
    start = tiny_model(store)
    given = {"model": start, "preferences": [preferences(store, 6)]}
    config = {"method": "lora", "lora": {"rank": 2, **lora}, "training": {**STEPS, "epochs": 4.0}}
    made = execute(*((dpo, DpoConfig(**config)) if trained == "dpo" else (reward_model, RewardModelConfig(**config))), given, store)
    before, after = load(start.path()), load(made.path())
    assert torch.equal(before.model.embed_tokens.weight, after.model.embed_tokens.weight)
    name = "layers.0.self_attn.q_proj.weight"
    assert not torch.equal(before.model.get_parameter(name), after.model.get_parameter(name))
    assert after.head == ("lm" if trained == "dpo" else "scalar") and (trained == "dpo" or after.score.weight.abs().max() > 0)


def test_what_is_not_trained_computes_in_bf16_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Tiny) -> None:
    given, asked = tiny_model(Store.open(tmp_path)), []

    def recorded(path: Path, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        asked.append((str(device), dtype))
        return load(path, dtype=dtype)

    monkeypatch.setattr("puna.models.formats.checkpoint.load", recorded)
    for place in ("cuda", "cpu"):
        monkeypatch.setattr(training, "device", lambda place=place: torch.device(place))
        for frozen in (True, False):
            training.load_model(given, "lm", frozen=frozen)
    single = torch.float32
    assert asked == [("cuda", torch.bfloat16), ("cuda", single), ("cpu", single), ("cpu", single)]
