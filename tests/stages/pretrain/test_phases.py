"""Phases end after a number of tokens, may read their own tokens, and pass the optimizer on; training can start from any model."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from puna.flows.engine.trace import flow_named, load, trace
from puna.models.formats.checkpoint import load as load_model
from puna.models.tokens.tokenizer import Tokenizer
from puna.stages.contract import Facts, InputFacts, execute
from puna.stages.pretrain.pretrain import MOMENTS as FILE
from puna.stages.pretrain.pretrain import PretrainConfig, needs, pretrain
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.stages.training.phase import SHAPE, Phase
from puna.stages.training.token_rows import Reader
from puna.storage import PunaError

from .conftest import sentences

SHAPE = SHAPE.replace(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
FLAT = {"learning_rate": 3e-3, "warmup_steps": 0, "shape": "constant"}


def config(*phases: Phase, **changes) -> PretrainConfig:
    return PretrainConfig(**{"model": SHAPE, "phases": phases, "validate_every": 50, "validation_share": 0.1} | changes)


def phase(name: str, steps: int, **changes) -> Phase:
    return Phase(**{"name": name, "steps": steps, "rows_per_step": 2, "schedule": FLAT} | changes)


@pytest.fixture
def docs(documents):
    return documents([sentences(i, 30 + 7 * (i % 11)) for i in range(60)])


@pytest.fixture
def given(store, docs):
    vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=290), {"documents": docs}, store)
    return {"tokens": rows(store, docs, vocabulary, 32), "tokenizer": vocabulary}


def rows(store, docs, vocabulary, length: int):
    return execute(tokenize, TokenizeConfig(sequence_length=length), {"documents": docs, "tokenizer": vocabulary}, store)


def weights(artifact) -> str:
    return artifact.manifest.files["model.safetensors"].sha256


@pytest.mark.parametrize("name, first, whole", [("405b", 14.8e12, 15.6e12), ("8b", 14.8e12, 15.6e12), ("1b", 8.2e12, 9e12)])
def test_llama_recipes_have_the_phases_of_the_report(name: str, first: float, whole: float) -> None:
    """252 million tokens in steps of 4 Mi, then steps of 8 Mi up to 2.87 trillion tokens: the first steps that begin after these totals. Six
    steps of the context to 128K over 800 billion tokens; the last 40 million tokens at a rate that falls to 0."""
    config = PretrainConfig(**load(f"llama3-{name}", flow="pretrain").values["pretrain"])
    initial, *longer, anneal = config.phases
    small, middle, large = (2**22, 2**23, 2**24)
    one = -(-252_000_000 // small)
    two = one + -(-(2_870_000_000_000 - one * small) // middle)
    growth = initial.growth(8192)
    assert growth.values == (512, 1024, 2048) and growth.starts == (1, one + 1, two + 1)
    read, rates = 0, list[float]()
    for phase in config.phases:
        row = 8192 * phase.join_rows
        counted = phase.with_steps(row, read)
        training = counted.train_config(config.optimizer, config.compute)
        rates += [training.rate(1), training.rate(counted.steps)]
        read += row * phase.growth(row, read).before(counted.steps + 1)
        if phase is initial:
            assert 0 <= read - first < large
            # Cosine from the peak to a hundredth of it; the run stops before its end, in proportion to the tokens of the whole run.
            end = 1_200_000 if name != "1b" else 771_000
            done = (counted.steps - 8000) / (end + 1 - 8000)
            expected = training.rate(8000) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
            assert training.rate(counted.steps) == pytest.approx(expected)
    assert [phase.join_rows for phase in longer] == [2, 4, 6, 8, 12, 16] and all(phase.accept for phase in longer)
    assert abs(read - whole) < large and anneal.with_steps(131_072, 0).steps * anneal.rows_per_step * 131_072 == pytest.approx(40e6, rel=0.02)
    # Each phase goes on at the rate at which the one before ended, to the third digit, or below it.
    after = rates[2:-1:2]
    assert after == sorted(after, reverse=True) and after[0] == pytest.approx(rates[1], rel=5e-3) and anneal.schedule.anneal_steps == anneal.steps


def test_a_ramp_counts_from_the_beginning_of_the_run() -> None:
    """A ramp's entry that earlier phases have passed applies from the first step on; the next entry waits for its tokens."""
    grown = phase("late", 9, ramp=({"after_tokens": 100, "rows": 3}, {"after_tokens": 200, "rows": 5}))
    assert grown.growth(10, 110).values == (3, 5) and grown.growth(10, 110).starts == (1, 4)
    assert grown.replace(steps=0, until=300).with_steps(10, 110).steps == 3 + 2
    with pytest.raises(PunaError, match="phase late: the run reads 400 tokens before it"):
        grown.replace(steps=0, until=300).with_steps(10, 400)
    with pytest.raises(PunaError, match="phase late has 1 steps: .*warmup_steps must lie in"):
        Phase(name="late", until=5, rows_per_step=1, schedule={"warmup_steps": 3}).with_steps(10)


def test_the_optimizer_goes_on_in_the_next_phase(store, given) -> None:
    """Two phases at a constant rate with kept moments make the updates of one phase: Adam's step count continues."""
    kept = execute(pretrain, config(phase("a", 4), phase("b", 3)), given, store)
    fresh = execute(pretrain, config(phase("a", 4), phase("b", 3, optimizer="fresh")), given, store)
    assert weights(kept) != weights(fresh)
    counts = [{int(v) for k, v in load_file(made.path(FILE)).items() if k.startswith("state.step.")} for made in (kept, fresh)]
    assert counts == [{7}, {3}]


def test_a_training_goes_on_from_a_model_as_if_it_had_not_ended(store, given) -> None:
    """The second phase alone, started from the first one's artifact, continues with other rows; at a learning rate of nearly 0 the weights
    stay."""
    first = execute(pretrain, config(phase("a", 4)), given, store)
    still = phase("b", 2, schedule=FLAT | {"learning_rate": 1e-12})
    on = execute(pretrain, config(still), {**given, "model": first}, store)
    for (name, a), (_, b) in zip(load_model(first.path()).named_parameters(), load_model(on.path()).named_parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=0, msg=name)
    assert {int(v) for k, v in load_file(on.path(FILE)).items() if k.startswith("state.step.")} == {6}
    assert on.manifest.metrics["optimizer_state_given"] == 1
    with pytest.raises(PunaError, match="phase b: the saved training state does not fit: .*; or set its optimizer to fresh"):
        execute(pretrain, config(still, optimizer={"name": "muon"}), {**given, "model": first}, store)
    # Both are refused before the run; with fresh moments any model is accepted.
    muon = execute(pretrain, config(phase("a", 1), optimizer={"name": "muon"}), given, store)
    for model, optimizer, message in ((first, "muon", "are not Muon's"), (muon, "adamw", "are Muon's: set optimizer.name to muon, or phases.0.optimizer")):
        facts = Facts({"model": (InputFacts("model", model=model),)}, 10**12)
        (line,) = needs(PretrainConfig(phases=(still,), optimizer={"name": optimizer}), facts)
        assert model.id in line and message in line
        assert needs(PretrainConfig(phases=(phase("b", 2, optimizer="fresh"),), optimizer={"name": optimizer}), facts) == []
        assert needs(PretrainConfig(phases=(still,), optimizer={"name": {"muon": "adamw", "adamw": "muon"}[optimizer]}), facts) == []


def test_a_model_brings_its_tokenizer(store, docs, given) -> None:
    first = execute(pretrain, config(phase("a", 1)), given, store)
    own = execute(tokenizer, TokenizerConfig(vocab_size=300), {"documents": docs, "model": first}, store)
    assert own.manifest.files["tokenizer.json"].sha256 == first.manifest.files["tokenizer.json"].sha256
    assert own.manifest.metrics["vocab_size"] == 290
    execute(pretrain, config(phase("b", 1)), {"tokens": rows(store, docs, own, 32), "tokenizer": own, "model": first}, store)
    other = execute(tokenizer, TokenizerConfig(vocab_size=280), {"documents": docs}, store)
    with pytest.raises(PunaError, match="have different tokenizers: tokenize with the model's own"):
        execute(pretrain, config(phase("b", 1)), {"tokens": rows(store, docs, other, 32), "tokenizer": other, "model": first}, store)


def test_an_input_models_vocabulary_grows(store, docs, documents, given) -> None:
    """Embeddings and moments of new tokens join the model's own, which hardly change at a rate of nearly 0; the moments continue."""
    first = execute(pretrain, config(phase("a", 4)), given, store)
    chemistry = documents([f"glucose and glucagon {n} make glucagon of glucose " * 4 for n in range(60)])
    own = execute(tokenizer, TokenizerConfig(new_tokens=12), {"documents": chemistry, "model": first}, store)
    assert own.manifest.metrics["vocab_size"] == 302
    on = {"tokens": rows(store, chemistry, own, 32), "tokenizer": own, "model": first}
    grown = execute(pretrain, config(phase("b", 2, schedule=FLAT | {"learning_rate": 1e-12})), on, store)
    old, new = (dict(load_model(made.path()).named_parameters()) for made in (first, grown))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in new:
            torch.testing.assert_close(new[name][:290], old[name], atol=1e-8, rtol=0)
            assert new[name].shape[0] == 302 and grown.manifest.metrics["optimizer_state_given"] == 1
    assert {int(v) for k, v in load_file(grown.path(FILE)).items() if k.startswith("state.step.")} == {6}
    assert Tokenizer.load(grown.path()).encode(" glucose") == [own_id := Tokenizer.load(own.path()).id_of("Ġglucose")] and own_id >= 290
    with pytest.raises(PunaError, match="the sample of .* bytes gives only .* tokens, not 2290"):
        execute(tokenizer, TokenizerConfig(new_tokens=2000), {"documents": chemistry, "model": first}, store)


def test_settings_that_an_input_model_overrides_are_refused() -> None:
    facts = Facts({"model": (InputFacts("model"),)}, None)
    (shape,) = needs(config(phase("a", 1)), facts)
    (size,) = tokenizer.needs(TokenizerConfig(vocab_size=300), facts)
    (alone,) = tokenizer.needs(TokenizerConfig(new_tokens=9), Facts({}, None))
    assert "leave it out" in shape and "leave vocab_size out" in size and "no model is given" in alone
    assert needs(PretrainConfig(), facts) == tokenizer.needs(TokenizerConfig(), facts) == []
    assert needs(config(phase("a", 1)), Facts({}, None)) == tokenizer.needs(TokenizerConfig(vocab_size=300), Facts({}, None)) == []


def test_tokens_that_are_missing_or_not_read_are_reported_before_anything_runs() -> None:
    """Otherwise the run would only end at `pretrain`, after days of tokenizing."""
    phases = config(phase("a", 2, ramp=[{"after_tokens": 1, "rows": 2, "tokens": "fresh"}]), phase("b", 2, tokens="best"))
    given = {name: (InputFacts("tokens"),) for name in ("tokens", "fresh", "long", "best")}
    lines = needs(phases, Facts({name: given[name] for name in ("tokens", "long")}, None))
    assert [line.partition(":")[0] for line in lines] == [
        "phase a reads the tokens fresh, which are not given", "phase b reads the tokens best, which are not given",
        "no phase reads the tokens long",
    ]  # fmt: skip
    assert needs(phases, Facts({name: given[name] for name in ("tokens", "fresh", "best")}, None)) == []


def test_phases_of_one_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="two are called 'a', but metrics are named after phases"):
        config(phase("a", 2), phase("b", 2), phase("a", 2))


def test_the_flow_makes_tokens_and_mixtures_that_the_recipe_names() -> None:
    flow = flow_named("pretrain")

    def inputs(*changes: str) -> dict[str, dict[str, tuple[str, ...]]]:
        return {step.label: dict(step.inputs) for step in trace(flow, load("continue", list(changes), "pretrain")).steps}

    plain, best = inputs(), inputs("tokenize_best={sequence_length: 64}", "mix_best={seed: 1}", "tokenize_long={}")
    assert not {"mix_best", "tokenize_best", "tokenize_long"} & plain.keys() and plain["tokenizer"]["model"] == ("input model",)
    assert best["tokenize_best"]["mixture"] == ("mix_best",) and best["tokenize_long"]["mixture"] == ("mix",)
    assert best["pretrain"]["best"] == ("tokenize_best",) and best["pretrain"]["long"] == ("tokenize_long",)
    assert best["pretrain"]["model"] == ("input model",) and not best["pretrain"].get("fresh")
    judged = inputs("tokenize_best={}", "mix_best={}", "anneal_experiment={}", "needle={}")
    assert judged["mix_best"]["weights"] == ("anneal_experiment",) and judged["anneal_experiment"]["mixture"] == ("mix",)
    assert judged["needle"]["model"] == ("pretrain",) and judged["mix"]["weights"] == ("input weights",)
    with pytest.raises(PunaError, match="mix_best: no step reads this mixture; add tokenize_best"):
        inputs("mix_best={}")
    for changes, problem in (
        (("mix_best={weights: {a: 1}}", "tokenize_best={}"), "mix_best.weights and anneal_experiment both set the best mixture: leave out"),
        (("tokenize_best={}",), "tokenize_best reads no verdict of anneal_experiment without mix_best: name mix_best"),
    ):
        with pytest.raises(PunaError, match=problem):
            inputs("anneal_experiment={}", *changes)
        assert inputs(*changes)  # without the experiment nothing contradicts
    complaints = trace(flow, load("continue", ["choose_size={flops: 1e9}"], "pretrain")).complaints
    assert complaints == ["choose_size needs law (evaluation), the output of ladder, which the recipe leaves out; keep ladder, or leave out "
                          "choose_size too: --set choose_size=null"]  # fmt: skip


def test_phases_on_the_same_tokens_share_an_epoch(store, given, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second phase continues where the first ended, in the same order; rows of another length start a new order."""
    relays, original = [], Phase.relay
    monkeypatch.setattr(Phase, "relay", lambda self, *arguments: relays.append(original(self, *arguments)) or relays[-1])
    execute(pretrain, config(phase("a", 4), phase("b", 3, rows_per_step=3), phase("c", 2, join_rows=2)), given, store)
    first, second, joined = (relay.at(1) for relay in relays)
    whole = Reader(first.packed, first.excluded, 4 * 2 + 3 * 3, first.seed, first.begin)
    read = [piece for reader, steps in ((first, 4), (second, 3)) for step in range(1, steps + 1) for piece in reader.pieces(step)]
    assert read == whole.pieces(1) and len(read) == len(set(read)) and (joined.first, joined.seed != first.seed) == (0, True)


def test_a_phase_reads_the_tokens_that_it_names(store, docs, given) -> None:
    long = rows(store, docs, given["tokenizer"], 128)
    made = execute(pretrain, config(phase("a", 2), phase("b", 2, tokens="long")), {**given, "long": long}, store)
    counts = [row["tokens"] for row in made.read("training_log").to_pylist()]
    assert all(count <= 64 for count in counts[:2]) and all(128 < count <= 256 for count in counts[2:])
    assert load_model(made.path()).config.max_position_embeddings == 128
    with pytest.raises(PunaError, match="phase b reads the tokens best, which are not given: name tokenize_best"):
        execute(pretrain, config(phase("a", 2), phase("b", 2, tokens="best")), given, store)
    with pytest.raises(PunaError, match="no phase reads the tokens long"):
        execute(pretrain, config(phase("a", 2)), {**given, "long": long}, store)
