"""Imported models in every alignment stage: ChatML as in Qwen, and Llama 3, with files as transformers writes them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import load, load_with_tokenizer, save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.align.average import AverageConfig, average
from puna.stages.align.data_quality import DataQualityConfig, data_quality
from puna.stages.align.dpo import DpoConfig, dpo
from puna.stages.align.preferences import PreferencesConfig, preferences
from puna.stages.align.reinforcement import PpoConfig, ppo
from puna.stages.align.rejection_sample import RejectionSampleConfig, rejection_sample
from puna.stages.align.reward_model import RewardModelConfig, reward_model
from puna.stages.align.sample import SampleConfig, sample
from puna.stages.align.sft import SftConfig, sft
from puna.stages.contract import External, execute
from puna.stages.conversations import asking, dump
from puna.stages.evaluation.evaluate import EvaluateConfig, evaluate
from puna.stages.io.export import export_model
from puna.stages.io.import_model import ImportModelConfig, import_model
from puna.stages.verifiers.registry import to_text
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema
from tests.models.dialogues import families, made

transformers = pytest.importorskip("transformers")
FAMILIES: dict[str, dict[str, Any]] = {"qwen2_5": {"model_type": "qwen2", "qkv_bias": True, "tie_word_embeddings": True}, "llama3": {"model_type": "llama"}}
GENERATION = {"qwen2_5": {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}, "llama3": {"do_sample": True, "temperature": 0.6, "top_p": 0.9}}
FIT: dict[str, Any] = {"batch_size": 8, "schedule": {"learning_rate": 1e-2, "warmup_steps": 0.0, "shape": "constant"}}
STRICT = "{%- for m in messages %}{%- if loop.index0 and m.role == 'user' and messages[loop.index0 - 1].role == 'user' %}{{ raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}"
SAID = ("Lima", "yes", "no")


def checkpoint(name: str, folder: Path) -> Path:
    """Write a model with random weights as transformers saves it: with embedding rows that belong to no token, and a generation_config."""
    if name not in families():
        pytest.skip("the template comes with TRL, which is not installed")
    tokenizer = made(name)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, **FAMILIES[name],
    )  # fmt: skip
    save(Transformer(config, seed=0), folder / "own", tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "own", dtype=torch.float32)
    theirs.generation_config = transformers.GenerationConfig(eos_token_id=list(tokenizer.stop_ids), **GENERATION[name])
    theirs.save_pretrained(folder / "theirs")
    transformers.AutoTokenizer.from_pretrained(folder / "own").save_pretrained(folder / "theirs")
    return folder / "theirs"


def table(store: Store, name: str, rows: list[dict[str, Any]]) -> Artifact:
    schema = table_schema(name).schema
    return store.import_table(name, pa.Table.from_pylist([{**dict.fromkeys(schema.names), **row} for row in rows], schema=schema))


@dataclass
class World:
    """An imported model of the family `name`, the same model finetuned to give short answers, prompts, and preferences between its
    answers."""

    name: str
    store: Store
    model: Artifact
    instructions: Artifact
    policy: Artifact
    prompts: Artifact
    answers: Artifact
    preferences: Artifact


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp(request.param)
    store = Store.open(folder / "store")
    (external,) = External.resolve(f"model={checkpoint(request.param, folder)}")
    model = execute(import_model, ImportModelConfig(), {"model": external}, store)
    about = {"task": "say", "source": "s"}
    told = [
        {**about, "id": f"{i:02d}", "prompt_id": f"{i:02d}", "split": "train",
         "messages": dump([{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": SAID[i % 3]}])}
        for i in range(24)
    ]  # fmt: skip
    instructions = table(store, "instructions", told)
    policy = execute(sft, SftConfig(training={**FIT, "epochs": 10.0}), {"model": model, "instructions": [instructions]}, store)
    asked = [
        {**about, "id": f"{i:02d}", "split": "heldout" if i > 20 else "train", "messages": asking(f"What is {i}?"), "reference": SAID[i % 3],
         "verifier": to_text("exact")}
        for i in range(24)
    ]  # fmt: skip
    prompts = table(store, "prompts", asked)
    answers = execute(sample, SampleConfig(answers=6, max_tokens=6), {"models": [policy], "prompts": prompts}, store)
    # One answer is better for every prompt, so that a few steps learn it on any machine.
    liked = table(store, "prompts", [{**row, "reference": SAID[1]} for row in asked])
    made_ = execute(preferences, PreferencesConfig(heldout_fraction=0.2), {"answers": answers, "prompts": liked}, store)
    return World(request.param, store, model, instructions, policy, prompts, answers, made_)


def test_answers_end_by_the_models_own_token(world: World) -> None:
    tokenizer = Tokenizer.load(world.model.path())
    rows = world.answers.read().to_pylist()
    ended = [row for row in rows if row["finished"]]
    assert len(ended) > 0.8 * len(rows) and all(row["tokens"][-1] in tokenizer.stop_ids for row in ended)
    assert sum(row["text"] in SAID for row in ended) > 0.5 * len(rows)
    assert world.preferences.rows() > 5


def test_pages_and_answers_are_evaluated(world: World) -> None:
    pages = [{"id": f"{i}", "source": "s", "text": " ".join(f"fox {j + i} jumps over {j * i}," for j in range(30))} for i in range(6)]
    documents = table(world.store, "documents", [{**page, "url": "", "language": "en", "fetched_at": 0} for page in pages])
    config = EvaluateConfig(pages={"questions": 4, "options": 2, "prompt_words": 5, "option_words": 3, "continuations": 1})
    prompts = table(world.store, "prompts", [{**row, "split": "heldout"} for row in world.prompts.read().to_pylist()])
    made_ = execute(evaluate, config, {"model": world.policy, "documents": documents, "prompts": prompts}, world.store)
    found = {(row["task"], row["metric"]): row["value"] for row in made_.read().to_pylist()}
    # Whatever the model answers, one of three answers is right.
    assert found["all", "finished"] == 1 and 0.25 < found["all", "accuracy"] <= 1
    assert math.isfinite(found["pages", "document_bits_per_byte"]) and found["choice", "accuracy"] >= 0


def test_trl_learns_the_same_tokens(world: World) -> None:
    given = {"model": world.model, "instructions": [world.instructions]}
    losses = []
    for engine in ("puna", "trl"):
        made_ = execute(sft, SftConfig(engine=engine, training={**FIT, "batch_size": 24}), given, world.store)
        losses.append(made_.read("training_log")["loss"].to_pylist())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(("engine", "method"), [("puna", "full"), ("puna", "lora"), ("trl", "lora")])
def test_preferences_train_reward_models_and_policies(world: World, engine: str, method: str) -> None:
    given = {"model": world.policy, "preferences": [world.preferences]}
    lora = {"lora": {"rank": 2}} if method == "lora" else {}
    training = {**FIT, "batch_size": 16, "epochs": 16.0, "schedule": {"learning_rate": 2e-3}}
    fit = {"engine": engine, "method": method, **lora, "training": training}
    for stage, config in ((reward_model, RewardModelConfig(**fit)), (dpo, DpoConfig(nll_weight=0, **fit))):
        log = execute(stage, config, given, world.store).read("training_log")["loss"].to_pylist()
        assert log[-1] < log[0] == pytest.approx(math.log(2), rel=1e-5), stage.name  # the rewards are equal, and the policy is the reference


def test_the_round_goes_on(world: World, tmp_path: Path) -> None:
    store = world.store
    rewards = execute(reward_model, RewardModelConfig(training=FIT), {"model": world.policy, "preferences": [world.preferences]}, store)
    given = {"answers": world.answers, "reward_model": rewards, "prompts": world.prompts}
    picked = execute(rejection_sample, RejectionSampleConfig(), given, store)
    kept = execute(data_quality, DataQualityConfig(semantic={"clusters": 1, "max_similarity": 1.0}), {"instructions": picked, "model": world.policy}, store)
    assert 0 < kept.rows() <= picked.rows()
    few = {"rollouts": 1, "prompts": 4, "answers": 2, "max_tokens": 4}
    rl = execute(ppo, PpoConfig(reward="product", **few), {"policy": world.policy, "reward_model": rewards, "prompts": world.prompts}, store)
    assert 0 <= rl.manifest.metrics["first_score"] <= 1
    mean = execute(average, AverageConfig(), {"models": [world.policy, rl]}, store)
    export_model(mean, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = words.apply_chat_template([{"role": "user", "content": "What is 3?"}], add_generation_prompt=True, return_dict=False)
    said = theirs.generate(torch.tensor([asked]), attention_mask=torch.ones(1, len(asked)), max_new_tokens=6, do_sample=False)[0]
    assert words.decode(said[len(asked) :], skip_special_tokens=True).strip() in SAID
    assert load(mean.path()).config.vocab_size == Tokenizer.load(mean.path()).vocab_size + 3


def test_the_models_own_way_of_sampling_stays_and_is_the_default(world: World, tmp_path: Path) -> None:
    own = GENERATION[world.name]
    assert all(f"{name}={value}" in world.model.manifest.metrics["sampling"] for name, value in own.items())
    metrics, digest = world.answers.manifest.metrics, world.policy.data_digest[:12]
    assert {name: metrics[f"{name}_{digest}"] for name in own if name != "do_sample"} == {k: v for k, v in own.items() if k != "do_sample"}
    said = execute(sample, SampleConfig(answers=1, max_tokens=2, temperature=0), {"models": [world.policy], "prompts": world.prompts}, world.store)
    assert said.manifest.metrics[f"temperature_{digest}"] == 0 and said.manifest.metrics[f"top_p_{digest}"] == own["top_p"]
    export_model(world.policy, tmp_path / "out")
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert {name: getattr(theirs, name) for name in own} == own
    assert theirs.eos_token_id == list(Tokenizer.load(world.policy.path()).stop_ids)
    if world.name == "qwen2_5":  # GGUF has names for these, and 32 bits
        (file,) = export_model(world.policy, tmp_path / "gguf", "gguf")
        assert load_with_tokenizer(file)[1].generation == own


@pytest.mark.parametrize(("given", "message"), [({"top_k": 2.5}, "top_k is 2.5"), ({"top_p": 0}, "top_p is 0, not a number from 1e-09 to 1"), ({"temperature": "hot"}, "temperature is 'hot', not a number from 0 to 10")])
def test_a_wrong_way_of_sampling_is_named_at_the_import(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = checkpoint("llama3", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **given}))
    (external,) = External.resolve(f"model={folder}")
    with pytest.raises(PunaError, match=f"import_model: .*generation_config.json: {message}"):
        execute(import_model, ImportModelConfig(), {"model": external}, Store.open(tmp_path / "store"))


def test_a_prompt_that_the_template_refuses_stops_nothing(world: World, tmp_path: Path) -> None:
    """Mistral's and Llama 2's templates require alternating roles; here, such a template is used with the same tokens."""
    store = world.store
    save(load(world.policy.path()), tmp_path / "strict", Tokenizer.load(world.policy.path()).with_template(STRICT + Tokenizer.load(world.policy.path()).template.source))
    (external,) = External.resolve(f"model={tmp_path / 'strict'}")
    strict = execute(import_model, ImportModelConfig(), {"model": external}, store)
    rows = world.prompts.read().to_pylist()[-5:]
    twice = dump([{"role": "user", "content": "Say"}, {"role": "user", "content": "yes"}])
    prompts = table(store, "prompts", [*({**row, "split": "heldout"} for row in rows), {**rows[0], "id": "twice", "messages": twice, "split": "heldout"}])
    wanted = "row twice: turn 1: the chat template refuses it: roles must alternate"
    runs = (
        (sample, SampleConfig(answers=1, max_tokens=2, split="heldout"), {"models": [strict, world.policy], "prompts": prompts}),
        (evaluate, EvaluateConfig(), {"model": strict, "prompts": prompts}),
    )
    for stage, config, given in runs:
        made_ = execute(stage, config, given, store)
        (dropped,) = made_.read("dropped").to_pylist()
        assert (dropped["id"], dropped["rule"], dropped["detail"]) == ("twice", "chat_template", wanted)
        assert made_.manifest.metrics["dropped_chat_template"] == 1
        with pytest.raises(PunaError, match=rf"{stage.name}: {wanted} \(bad_rows=drop leaves such rows out\)"):
            execute(stage, config.replace(bad_rows="refuse"), given, store)
        with pytest.raises(PunaError, match=rf"{stage.name}: none of the 1 .*prompts can be used \(1 chat_template\). The first: {wanted}"):
            execute(stage, config, {**given, "prompts": table(store, "prompts", [{**rows[0], "id": "twice", "messages": twice, "split": "heldout"}])}, store)
