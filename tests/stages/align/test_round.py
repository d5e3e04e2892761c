"""Sampling, rejection sampling and PPO on a tiny model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError

from puna.models.formats.checkpoint import load
from puna.models.memory import planner
from puna.models.serving import ServingSettings
from puna.models.tokens.tokenizer import Tokenizer
from puna.stages.align import sample as module
from puna.stages.align.preferences import PreferencesConfig, preferences
from puna.stages.align.reinforcement import PpoConfig, ppo
from puna.stages.align.rejection_sample import RejectionSampleConfig, rejection_sample
from puna.stages.align.reward_model import RewardModelConfig, reward_model
from puna.stages.align.sample import SampleConfig, sample
from puna.stages.align.sft import sft
from puna.stages.contract import Facts, InputFacts, StageRun, execute, parse, stage
from puna.stages.conversations import answering, asking, messages_of, prompt_ids
from puna.stages.prompts.prompts import PromptsConfig, prompts
from puna.stages.training.settings import SftConfig
from puna.stages.verifiers.registry import from_text
from puna.stages.verifiers.scoring import question_of
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

from .conftest import TinyConfig, tiny

Tiny = Callable[..., Artifact]

ANY_MODEL = (InputFacts("model", None, None),)


def score(prompt: dict[str, Any], text: str) -> float | None:
    """Return the score of the prompt's own verifier."""
    return from_text(prompt["verifier"]).score(question_of(prompt), text).value


@stage(kind="model", version="1")
def tiny_again(config: TinyConfig, run: StageRun) -> None:
    """Write the models of `tiny` under other keys."""
    tiny.function(config, run)


def other_tiny(store: Store, seed: int = 0) -> Artifact:
    return execute(tiny_again, TinyConfig(seed=seed), {}, store)


def asked(store: Store, train: int = 6, heldout: int = 2) -> Artifact:
    task = {"task": "chain_sum", "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    config = parse(PromptsConfig, {"tasks": [task], "train": train, "heldout": heldout, "draws": 2000}, "")
    return execute(prompts, config, {}, store)


def scorer(store: Store, model: Artifact) -> Artifact:
    """Return a reward model trained on a few preferences."""
    rows = [
        {"id": f"{i}", "prompt_id": f"{i}", "task": "t", "split": "train", "messages": asking(f"say {i}"), "tools": None,
         "chosen": answering("1"), "rejected": answering("no no"), "edited": None, "others": None, "level": "better", "margin": 0.5, "chosen_model": "a", "rejected_model": "b"}
        for i in range(8)
    ]  # fmt: skip
    given = store.import_table("preferences", pa.Table.from_pylist(rows, schema=table_schema("preferences").schema))
    config = RewardModelConfig(training={"epochs": 16.0, "batch_size": 8, "schedule": {"learning_rate": 3e-3}})
    return execute(reward_model, config, {"model": model, "preferences": [given]}, store)


def test_answers_carry_models_gold_and_logprobs(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    models, questions = [tiny_model(store, 0), tiny_model(store, 1)], asked(store)
    config = SampleConfig(answers=3, max_tokens=5, temperature=0.7)
    made = execute(sample, config, {"models": models, "prompts": questions}, store)
    rows = made.read().to_pylist()
    train = {r["id"]: r for r in questions.read().to_pylist() if r["split"] == "train"}
    assert len(rows) == 6 * 2 * 3 and {r["prompt_id"] for r in rows} == set(train)
    assert {r["model"] for r in rows} == {m.data_digest for m in models} and {r["sample"] for r in rows} == {0, 1, 2}
    tokenizer = Tokenizer.load(models[0].path())
    policies = {m.data_digest: load(m.path()) for m in models}
    for row in rows[::5]:
        prompt = train[row["prompt_id"]]
        assert row["gold"] == score(prompt, row["text"])
        assert row["finished"] == (row["tokens"][-1] in tokenizer.stop_ids)
        assert len(row["tokens"]) <= 5
        from puna.models.forest import Forest

        ids = [*tokenizer.chat(messages_of(prompt), True), *row["tokens"]]
        with torch.no_grad():
            policy = policies[row["model"]]
            logprobs = (policy.logits(policy.hidden(Forest.pack([ids]))) / 0.7).log_softmax(-1)
        start = len(ids) - len(row["tokens"])
        expected = [float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))]
        assert row["logprobs"] == pytest.approx(expected, abs=1e-4)


def test_answers_and_preferences_follow_from_what_their_keys_hold(tmp_path: Path, tiny_model: Tiny) -> None:
    """The same models under other keys, in another order, give the same answers and preferences byte for byte."""
    store = Store.open(tmp_path)
    questions = asked(store, train=12)
    found = []
    for maker, seeds in ((tiny_model, (0, 1)), (other_tiny, (0, 1)), (tiny_model, (1, 0))):
        models = [maker(store, seed) for seed in seeds]
        answers = execute(sample, SampleConfig(answers=4, max_tokens=3), {"models": models, "prompts": questions}, store)
        table = answers.read()
        done = table.set_column(table.schema.get_field_index("finished"), "finished", pa.array([True] * len(table)))
        given = {"answers": store.import_table("answers", done), "prompts": questions}
        pairs = execute(preferences, PreferencesConfig(noise=2.0), given, store)
        found.append(({m.key for m in models}, answers, pairs))
    (keys, answers, pairs), (other_keys, again, _), (_, turned, turned_pairs) = found
    assert not keys & other_keys and again.key == answers.key != turned.key
    assert answers.data_digest == turned.data_digest and pairs.data_digest == turned_pairs.data_digest and pairs.rows() > 5
    digests = {row["model"] for row in answers.read().to_pylist()}
    assert {row[side] for row in pairs.read().to_pylist() for side in ("chosen_model", "rejected_model")} <= digests and len(digests) == 2
    with pytest.raises(PunaError, match="the same model is given twice"):
        execute(sample, SampleConfig(), {"models": [tiny_model(store), other_tiny(store)], "prompts": questions}, store)


def test_sampling_refuses_one_model_twice_and_an_empty_split(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model = tiny_model(store)
    with pytest.raises(PunaError, match="is given twice as 'models'"):
        execute(sample, SampleConfig(), {"models": [model, model], "prompts": asked(store)}, store)
    with pytest.raises(PunaError, match="has no prompts of the split 'heldout'"):
        execute(sample, SampleConfig(split="heldout"), {"models": [model], "prompts": asked(store, heldout=0)}, store)


def test_a_draft_changes_no_likeliest_answer_and_weights_in_8_bits_do(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = {"models": [tiny_model(store, 0)], "prompts": asked(store)}
    config = SampleConfig(answers=3, max_tokens=6, temperature=0)
    plain, guessed, own, quantized = (
        execute(sample, config.replace(serving=ServingSettings(weights=weights), draft_weights=drafts), given | more, store).read()
        for weights, drafts, more in (("same", "same", {}), ("same", "same", {"draft": tiny_model(store, 1)}), ("same", "int8", {"draft": given["models"][0]}), ("int8", "same", {}))
    )
    assert guessed.drop(["logprobs"]) == own.drop(["logprobs"]) == plain.drop(["logprobs"])
    assert sample.needs is not None
    unmet = sample.needs(config.replace(draft_weights="int8"), Facts({"models": ANY_MODEL}, None))
    assert unmet == ["draft_weights is set, but there is no draft; give one with --input draft=…, or leave draft_weights out"]
    assert quantized["id"] == plain["id"] and quantized["logprobs"] != plain["logprobs"]


def test_layers_on_disk_change_no_answer(tmp_path: Path, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = planner.choose
    monkeypatch.setattr(planner, "choose", lambda shape, *given: dataclasses.replace(chosen(shape, *given), streamed=shape.config.num_hidden_layers))
    store = Store.open(tmp_path)
    model = tiny_model(store, 0)
    given, config = {"models": [model], "prompts": asked(store)}, SampleConfig(answers=3, max_tokens=6)
    whole, limited, read = (
        execute(sample, config.replace(serving=serving), given, store)
        for serving in (ServingSettings(), ServingSettings(memory=0.01), ServingSettings(offload="disk", memory=0.05))
    )
    assert whole.read() == limited.read() == read.read()
    assert "tokens/s expected" in read.manifest.metrics[f"offload_{model.data_digest[:12]}"]
    with pytest.raises(PunaError, match="memory = 1e-06 GB is too little even with all layers offloaded"):
        execute(sample, config.replace(serving=ServingSettings(offload="disk", memory=1e-6)), given, store)


def test_a_window_forgets_and_takes_no_draft(tmp_path: Path, tiny_model: Tiny) -> None:
    store, config = Store.open(tmp_path), SampleConfig(answers=3, max_tokens=90)
    given = {"models": [tiny_model(store, 0)], "prompts": asked(store)}
    serving = ServingSettings(sinks=16, window=16)
    whole, short = (execute(sample, one, given, store).read() for one in (config, config.replace(serving=serving)))
    assert whole["id"] == short["id"] and whole["tokens"] != short["tokens"]
    assert sample.needs is not None
    unmet = sample.needs(config.replace(serving=serving), Facts({"models": ANY_MODEL, "draft": ANY_MODEL}, None))
    assert unmet == ["serving.window: a draft needs the whole context; leave out the draft or the window"]
    for refused, told in (({"sinks": 16}, "only with a window"), ({"engine": "vllm", "window": 64}, "vLLM supports no window"), ({"window": 40}, "multiple of 16")):
        with pytest.raises(ValueError, match=told):
            ServingSettings(**refused)


def test_vllm_must_be_installed_and_takes_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("puna.models.serving.find_spec", lambda name: None)
    facts = Facts({"models": ANY_MODEL, "draft": ANY_MODEL}, None)
    assert sample.needs is not None
    unmet = sample.needs(SampleConfig(serving=ServingSettings(engine="vllm")), facts)
    assert [sentence[: sentence.index(";")] for sentence in unmet] == ["serving.engine: vLLM is not installed", "draft: engine=vllm takes no draft model"]
    assert sample.needs(SampleConfig(), facts) == []


def test_answers_survive_a_crash_stretch_by_stretch(tmp_path: Path, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [Store.open(tmp_path / name) for name in ("whole", "killed")]
    models, questions = [tiny_model(stores[0], 0), tiny_model(stores[0], 1)], asked(stores[0])
    given, config = {"models": models, "prompts": questions}, SampleConfig(answers=3, max_tokens=4)
    whole = execute(sample, config, given, stores[0])
    monkeypatch.setattr(module, "STRETCH", 4)
    original, calls = module._generate, []

    def crashing(*args: Any) -> Any:
        calls.append(len(args[2]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(module, "_generate", crashing)
    with pytest.raises(KeyboardInterrupt):
        execute(sample, config, given, stores[1])
    made = execute(sample, config, given, stores[1])
    # Two models, chunks of 4 and 2 prompts; only the third was computed twice.
    assert calls == [4, 2, 4, 4, 2]
    columns = ["id", "tokens", "finished", "gold"]
    assert made.read(columns=columns).equals(whole.read(columns=columns)) and made.manifest.metrics == whole.manifest.metrics


def answers(store: Store, questions: Artifact, texts: dict[str, list[tuple[str, bool]]]) -> Artifact:
    """Return for each model its (text, finished) answers, the same ones to every prompt."""
    train = [r for r in questions.read().to_pylist() if r["split"] == "train"]
    rows = [
        {"id": f"{p['id'][:8]}{model}{i}", "prompt_id": p["id"], "sample": i, "model": model, "text": text, "tokens": [1],
         "logprobs": [0.0], "finished": finished, "score": None, "gold": score(p, text)}
        for p in train for model, given in texts.items() for i, (text, finished) in enumerate(given)
    ]  # fmt: skip
    return store.import_table("answers", pa.Table.from_pylist(rows, schema=table_schema("answers").schema))


def test_the_best_by_reward_is_picked_and_agreement_counted(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model, questions = tiny_model(store), asked(store)
    rewards = scorer(store, model)
    given = answers(store, questions, {"A": [("1", True), ("no no", True), ("1 ", True)], "B": [("no no", True), ("5 5", False)]})
    inputs = {"answers": given, "reward_model": rewards, "prompts": questions}
    made = execute(rejection_sample, RejectionSampleConfig(), inputs, store)
    assert [messages_of(r)[1:] for r in made.read().to_pylist()] == [[{"role": "assistant", "content": "1"}]] * 6
    scores = made.read("scores").to_pylist()
    by_id: dict[str, dict[str, float]] = {}
    for row in scores:
        by_id.setdefault(row["id"], {})[row["name"]] = row["value"]
    for row in made.read().to_pylist():
        # Two of the four finished answers have the picked text; the unfinished one is no candidate.
        assert by_id[row["id"]] == {"reward": row["score"], "agreement": 0.5}
    assert len(scores) == 6 * (2 + 4)
    first = {r["id"]: r for r in given.read().to_pylist()}
    for name, values in by_id.items():
        if name in first and first[name]["text"] == "no no":
            best = next(r for r in made.read().to_pylist() if r["prompt_id"] == first[name]["prompt_id"])
            assert values["reward"] < best["score"]


def test_answers_need_not_fit_into_one_row(tmp_path: Path, tiny_model: Tiny) -> None:
    """Otherwise prompts with many or long answers would be dropped. Only a prompt that is too long with a single answer is dropped."""
    store = Store.open(tmp_path)
    questions = asked(store)
    texts = [("no " * count, True) for count in (1, 2, 3, 4, 5, 6, 20)]
    inputs = {"answers": answers(store, questions, {"A": texts}), "reward_model": scorer(store, tiny_model(store)), "prompts": questions}
    wide, narrow = (execute(rejection_sample, RejectionSampleConfig(micro_batch_tokens=most), inputs, store) for most in (4096, 128))
    rewards, parts = ({row["id"]: row["value"] for row in made.read("scores").to_pylist() if row["name"] == "reward"} for made in (wide, narrow))
    assert len(rewards) == 6 * (1 + len(texts)) and parts == pytest.approx(rewards, abs=1e-4)
    assert narrow.read()["messages"].equals(wide.read()["messages"]) and narrow.rows("dropped") == 0
    with pytest.raises(PunaError, match="the prompt with its longest answer has 115 tokens"):
        execute(rejection_sample, RejectionSampleConfig(micro_batch_tokens=96), inputs, store)


def test_the_reward_model_ranks_right_answers_alone(tmp_path: Path, tiny_model: Tiny) -> None:
    """Each prompt's right answer among all numbers; without `correct` the two answers with the highest rewards, each text once."""
    store = Store.open(tmp_path)
    questions = asked(store)
    right = {row["id"]: str(row["reference"]) for row in questions.read().to_pylist() if row["split"] == "train"}
    given = answers(store, questions, {"A": [(f"{n} " * (n % 2 + 1), True) for n in range(-9, 19)] + [("3", True), ("no", True)]})
    inputs = {"answers": given, "reward_model": scorer(store, tiny_model(store)), "prompts": questions}

    def picked(**settings: Any) -> tuple[Artifact, dict[str, set[str]]]:
        made, texts = execute(rejection_sample, RejectionSampleConfig(**settings), inputs, store), dict[str, set[str]]()
        for row in made.read().to_pylist():
            texts.setdefault(row["prompt_id"], set()).add(str(messages_of(row)[-1]["content"]))
        return made, texts

    assert all(score(prompt, text) == 1 for prompt in questions.read().to_pylist() for text in picked(correct=True, most=5)[1].get(prompt["id"], ()))
    made, texts = picked(most=2)
    assert set(texts) == set(right) and all(len(some) == 2 for some in texts.values())
    rewards = {row["id"]: row["value"] for row in made.read("scores").to_pylist() if row["name"] == "reward"}
    by_text = {(row["prompt_id"], row["text"].strip()): rewards[row["id"]] for row in given.read().to_pylist()}
    for key, some in texts.items():
        assert {by_text[key, text] for text in some} == set(sorted((v for (prompt, _), v in by_text.items() if prompt == key))[-2:])


def test_answers_learned_together_are_learned_as_apart(tmp_path: Path, tiny_model: Tiny) -> None:
    """One step on all of them gives the same weights up to rounding, with each prompt's tokens once instead of four times."""
    store = Store.open(tmp_path)
    start, questions = tiny_model(store), asked(store)
    given = answers(store, questions, {"A": [("1", True), ("no no", True), ("5 5", True), ("7", True)]})
    data = execute(rejection_sample, RejectionSampleConfig(pick="random", most=4), {"answers": given, "prompts": questions}, store)

    def tuned(together: int) -> Artifact:
        training = {"steps": 1, "batch_size": 24 // together, "schedule": {"learning_rate": 0.01, "warmup_steps": 0}}
        return execute(sft, SftConfig(answers_together=together, training=training), {"model": start, "instructions": [data]}, store)

    apart, joined = tuned(1), tuned(4)
    assert apart.manifest.metrics["trained_answers"] == joined.manifest.metrics["trained_answers"] == 24
    prompts_read = sum(len(prompt_ids(Tokenizer.load(start.path()), row)) for row in questions.read().to_pylist() if row["split"] == "train")
    assert apart.manifest.metrics["trained_tokens"] - joined.manifest.metrics["trained_tokens"] == 3 * prompts_read
    before, one, other = (load(model.path()).state_dict() for model in (start, apart, joined))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=2e-4, rtol=0)
    assert any((one[name] - before[name]).abs().max() > 5e-3 for name in one)


def test_several_reward_models_pick_together(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    questions = asked(store)
    given = answers(store, questions, {"A": [("1", True), ("no no", True)], "B": [("5", True)]})
    members = [scorer(store, tiny_model(store, seed)) for seed in (0, 1)]

    def rewards(some: list[Artifact], ensemble: str = "mean") -> dict[str, float]:
        made = execute(rejection_sample, RejectionSampleConfig(ensemble=ensemble), {"answers": given, "reward_model": some, "prompts": questions}, store)
        texts = {row["id"]: row["text"] for row in given.read().to_pylist()}
        return {row["id"]: row["value"] for row in made.read("scores").to_pylist() if row["id"] in texts}

    first, second = (rewards([one]) for one in members)
    assert len(first) == 18 and first != second
    for how, combined in (("mean", lambda a, b: (a + b) / 2), ("min", min)):
        both = rewards(members, how)
        assert both == pytest.approx({name: combined(first[name], second[name]) for name in first}) and both == rewards(members[::-1], how)


def test_prompts_whose_answers_were_all_cut_off_are_dropped(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model, questions = tiny_model(store), asked(store)
    given = answers(store, questions, {"A": [("1", False)]})
    made = execute(rejection_sample, RejectionSampleConfig(), {"answers": given, "reward_model": scorer(store, model), "prompts": questions}, store)
    assert made.rows() == 0 and made.rows("dropped") == 6


def test_a_dropped_prompt_has_its_own_reason(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model, questions = tiny_model(store), asked(store)
    first, second, third = sorted(r["id"] for r in questions.read().to_pylist() if r["split"] == "train")[:3]
    table = answers(store, questions, {"A": [("no no", True)] * 2, "B": [("1", True)] * 2}).read()
    # To the first prompt nobody finished an answer, to the second only A did, and it was wrong.
    done = [not (r["prompt_id"] == first or (r["prompt_id"] == second and r["model"] == "B")) for r in table.to_pylist()]
    table = table.set_column(table.schema.get_field_index("finished"), "finished", pa.array(done))
    inputs = {"answers": store.import_table("answers", table), "reward_model": scorer(store, model), "prompts": questions}
    made = execute(rejection_sample, RejectionSampleConfig(correct=True), inputs, store)
    dropped = {r["id"]: (r["rule"], r["value"]) for r in made.read("dropped").to_pylist()}
    assert [dropped[key] for key in (first, second, third)] == [("unfinished", 4.0), ("none_right", 2.0), ("none_right", 4.0)]


def test_ppo_raises_the_reward_and_resumes(tmp_path: Path, tiny_model: Tiny) -> None:
    stores = [Store.open(tmp_path / name) for name in ("whole", "killed")]
    model, questions = tiny_model(stores[0]), asked(stores[0])
    given = {"policy": model, "reward_model": scorer(stores[0], model), "prompts": questions}
    config = PpoConfig(rollouts=6, prompts=6, answers=8, max_tokens=4, critic_learning_rate=3e-3, kl_coefficient=0.0, schedule={"learning_rate": 3e-3})
    whole = execute(ppo, config, given, stores[0])
    metrics = whole.manifest.metrics
    assert metrics["final_score"] > metrics["first_score"] and metrics["first_kl"] == pytest.approx(0.0, abs=1e-4)
    assert len(whole.read("training_log").to_pylist()) == 6 and load(whole.path()).head == "lm"

    class Killer:
        def progress(self, stage: str, done: float, total: float, note: str) -> None:
            if done == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(ppo, config, given, stores[1], listener=Killer())
    assert execute(ppo, config, given, stores[1]).data_digest == whole.data_digest


def test_ppo_needs_enough_prompts(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model = tiny_model(store)
    given = {"policy": model, "reward_model": scorer(store, model), "prompts": asked(store)}
    with pytest.raises(PunaError, match="a rollout needs 64 prompts, but prompts/.* has 6 training prompts"):
        execute(ppo, PpoConfig(), given, store)


def test_ppo_refuses_what_cannot_run(tmp_path: Path, tiny_model: Tiny) -> None:
    for wrong, message in (
        ({"minibatches": 9, "prompts": 8}, "minibatches 9 must not exceed prompts 8"),
        ({"schedule": {"warmup_steps": 99}, "rollouts": 2}, "warmup_steps must lie in"),
        ({"answers": 8, "max_tokens": 16, "compute": {"micro_batch_tokens": 128}}, "micro_batch_tokens 128 cannot hold 8 answers of 16 tokens and a prompt"),
    ):
        with pytest.raises(ValidationError, match=message):
            PpoConfig(**wrong)
    store = Store.open(tmp_path)
    model, questions = tiny_model(store), asked(store)
    given = {"policy": model, "reward_model": scorer(store, model), "prompts": questions}
    config = PpoConfig(rollouts=1, prompts=2, answers=4, max_tokens=4, compute={"micro_batch_tokens": 20})
    with pytest.raises(PunaError, match=r"6 too_long.*row [0-9a-f]{32}: the prompt with 4 answers of max_tokens=4 has \d+ tokens, but compute.micro_batch_tokens=20"):
        execute(ppo, config, given, store)
