"""Annealing distinguishes a data set that helps from one that does not."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from puna.stages.contract import execute
from puna.stages.experiments import anneal_experiment as module
from puna.stages.experiments.anneal_experiment import AnnealExperimentConfig, anneal_experiment
from puna.stages.pretrain.mix import MixConfig, mix
from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.training.phase import SHAPE, Phase
from puna.stages.training.pools import Amount, Group, Pools
from puna.stages.training.proxy_runs import Proxy
from puna.stages.training.token_rows import Packed, pack
from puna.stages.training.vocabulary import tokenizer_of
from puna.storage import PunaError

SETTINGS = AnnealExperimentConfig(
    phase=Phase(name="anneal", steps=16, rows_per_step=4, schedule={"learning_rate": 2e-2, "warmup_steps": 2, "shape": "linear"}),
    heldout_tokens=400,
    validation_share=0.1,
)


@pytest.fixture
def given(store, corpus):
    """Return a model of one category's text, and candidates of another category."""
    both = corpus([("high", 60)] * 40 + [("low", 60)] * 12)
    texts = both["documents"].read()
    old = store.import_table("documents", texts.slice(0, 40))
    new = store.import_table("documents", texts.slice(40))
    tokens = execute(tokenize, TokenizeConfig(sequence_length=32), {"documents": old, "tokenizer": both["tokenizer"]}, store)
    shape = SHAPE.replace(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    config = PretrainConfig(
        model=shape, phases=(Phase(steps=30, rows_per_step=4, schedule={"learning_rate": 2e-2, "warmup_steps": 3}),), validation_share=0.1
    )
    model = execute(pretrain, config, {"tokens": tokens, "tokenizer": both["tokenizer"]}, store)
    return {"model": model, "tokens": tokens, "documents": new}


def test_gains_are_paired_differences_over_both_controls(store, given) -> None:
    made = execute(anneal_experiment, SETTINGS, given, store)
    found = {(row["task"], row["metric"]): row for row in made.read().to_pylist()}
    # The model can learn text like the candidates' only from them.
    assert found["candidate", "gain"]["low"] > 0.2
    trials = made.read("trials").to_pylist()
    assert [t["name"] for t in trials] == ["default"] * 3 + ["candidate"] * 3 + ["candidate shuffled"] * 3
    own, default = (np.array([json.loads(t["parameters"])["losses"][text] for t in trials]).reshape(3, 3) for text in ("set 0", "default"))
    assert found["candidate", "gain"]["value"] == pytest.approx((own[0] - own[1]).mean())
    assert found["candidate", "gain_over_shuffled"]["value"] == pytest.approx((own[2] - own[1]).mean())
    assert found["candidate/default", "gain"]["value"] == pytest.approx((default[0] - default[1]).mean())
    assert len(set(own[0])) == 3  # other rows
    said = "accepted" if found["candidate", "accepted"]["value"] else "refused: its gain over its own words shuffled"
    assert made.manifest.metrics["verdict_candidate"].startswith(said)


def planted(own: float, shuffled: float, default: float, noise: float, shuffled_default: float = 0.0) -> dict:
    """Return the losses of three pairs: 3 nats without the set, reduced by these amounts with it or with its words shuffled; every second
    pair differs by `noise`."""
    losses = {}
    for repeat in range(3):
        off = noise * (repeat % 2)
        losses[-1, "default", repeat] = {"set 0": 3.0 + off, "default": 3.0}
        losses[0, "set", repeat] = {"set 0": 3.0 - own, "default": 3.0 - default}
        losses[0, "shuffled", repeat] = {"set 0": 3.0 - shuffled, "default": 3.0 - shuffled_default}
    return losses


@pytest.mark.parametrize(
    ("losses", "refusal"),
    [
        (planted(0.2, 0.05, -0.05, 0.0), ""),
        (planted(0.2, 0.05, -0.05, 0.3), "its gain over the default mix may be as low as"),
        (planted(0.019, -0.1, 0.0, 0.0), "its gain over the default mix may be as low as 0.019"),
        (planted(0.2, 0.19, 0.0, 0.0), "its gain over its own words shuffled may be as low as 0.010"),
        (planted(0.2, 0.05, -0.3, 0.0), "the loss on default text may rise by 0.300 more than with its words shuffled"),
        # The cost of fewer default tokens is not charged to the set.
        (planted(0.2, 0.05, -0.3, 0.0, -0.25), ""),
    ],
)
def test_a_verdict_needs_both_controls_and_the_default_text(losses: dict, refusal: str) -> None:
    """The three gains .2, .5 and .2 have mean .3 and standard error .1; Student's interval is 4.30 standard errors."""
    verdict = module._verdict(0, "books", 1.0, losses, SETTINGS)
    assert verdict == module._verdict(0, "default", 1.0, losses, SETTINGS)._replace(name="books")  # a set may have any name
    assert verdict.refusal.startswith(refusal) and bool(verdict.refusal) == bool(refusal)
    low = module._verdict(0, "books", 1.0, planted(0.2, 0.05, 0.0, 0.3), SETTINGS).gains[module.OWN]
    assert low.low == pytest.approx(0.3 - 4.302653 * 0.1)


def test_copies_count_once(store, corpus, given) -> None:
    """Twelve documents with two different texts are too few to fill their share: they are refused, because they would be read too often,
    without a run."""
    texts = given["documents"].read()
    copied = texts.set_column(texts.schema.get_field_index("text"), "text", pa.array((texts["text"].to_pylist()[:2]) * 6))
    made = execute(anneal_experiment, SETTINGS.replace(max_repeats=2), {**given, "documents": store.import_table("documents", copied)}, store)
    assert made.manifest.metrics["verdict_candidate"].startswith("refused: its different documents would be read")
    assert "trials" not in made.tables and made.manifest.metrics["accepted_sets"] == 0
    often = SETTINGS.replace(max_repeats=1000)
    made = execute(anneal_experiment, often, {**given, "documents": store.import_table("documents", copied)}, store)
    assert made.manifest.metrics["verdict_candidate"] == "refused: 12% of its documents are different, less than least_different"


def test_the_verdict_is_the_mix_to_anneal_on(store, corpus) -> None:
    """With a mixture, its categories are the sets; an accepted set gets the measured share in addition to its own, and all shares add up to
    1."""
    both = corpus([("high", 60)] * 40 + [("low", 60)] * 12)
    mixture = execute(mix, MixConfig(max_share=1.0), {"documents": both["documents"], "split": both["split"]}, store)
    tokens = execute(
        tokenize, TokenizeConfig(sequence_length=32), {"documents": both["documents"], "mixture": mixture, "tokenizer": both["tokenizer"]}, store
    )
    shape = SHAPE.replace(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    config = SETTINGS.replace(model=shape, base=SETTINGS.phase.replace(schedule={"shape": "constant"}), sets=("low",), least_gain=0.0)
    given = {"tokens": tokens, "tokenizer": both["tokenizer"], "documents": both["documents"], "mixture": mixture}
    made = execute(anneal_experiment, config, given, store)
    assert {(row["task"], row["metric"]) for row in made.read().to_pylist()} >= {
        (task, metric) for task in ("low", "low/default") for metric in ("gain", "gain_over_shuffled")
    }  # fmt: skip
    natural = dict(zip(mixture.read()["category"].to_pylist(), mixture.read()["weight"].to_pylist(), strict=True))
    taken = made.manifest.metrics["accepted_sets"] * config.share
    weights = {row["category"]: row["weight"] for row in made.read("weights").to_pylist()}
    assert weights == {"high": pytest.approx((1 - taken) * natural["high"]), "low": pytest.approx((1 - taken) * natural["low"] + taken)}
    best = execute(mix, MixConfig(max_repeats=100), {"documents": both["documents"], "split": both["split"], "weights": made}, store)
    assert best.manifest.metrics["weight_low"] == pytest.approx(weights["low"], abs=1e-5)
    size = {name: Amount(1, count, np.zeros(1)) for name, count in (("low", 300), ("high", 500), ("code", 100))}
    groups = [Group("low", {"low": size.pop("low")}, None), Group("other", size, None)]
    found = module._weights(mixture, groups, {"high", "code"}, 0.3)
    assert [row["weight"] for row in found] == [pytest.approx(0.7 * natural["high"] + 0.3 * 500 / 600), pytest.approx(0.7 * natural["low"])]
    with pytest.raises(PunaError, match="'books' is not among the data sets high, low"):
        execute(anneal_experiment, config.replace(sets=("books",)), given, store)


@pytest.fixture
def three(store, corpus, monkeypatch: pytest.MonkeyPatch):
    """Return default tokens of three categories, one of them with a single document; nothing is trained."""
    monkeypatch.setattr(module, "train_proxy", lambda model, *_: Proxy(model, 1, 1.0, 1.0))
    both = corpus([("high", 60)] * 40 + [("low", 60)] * 12 + [("code", 60)])
    tokens = execute(tokenize, TokenizeConfig(sequence_length=32), {"documents": both["documents"], "tokenizer": both["tokenizer"]}, store)
    return {"tokens": tokens, "tokenizer": both["tokenizer"], "documents": both["documents"], "mixture": both["split"]}


def test_a_set_of_one_document_is_refused_alone(store, three) -> None:
    made = execute(anneal_experiment, SETTINGS.replace(sets=("low",)), three, store)
    assert {row["category"] for row in made.read("weights").to_pylist()} == {"code", "high", "low"}
    assert [name for name in made.manifest.metrics if name.startswith("verdict")] == ["verdict_low"]
    verdicts = execute(anneal_experiment, SETTINGS, three, store).manifest.metrics
    assert verdicts["verdict_code"] == "refused: it has only one document, but needs one to train on and one to measure the loss on"
    assert all(verdicts[f"verdict_{name}"].startswith("refused: its gain over the default") for name in ("high", "low"))
    alone = execute(anneal_experiment, SETTINGS.replace(sets=("code",)), three, store)
    assert alone.manifest.metrics["accepted_sets"] == 0 and "trials" not in alone.tables


def test_the_base_model_reads_no_held_out_document_of_a_set(store, three, monkeypatch: pytest.MonkeyPatch) -> None:
    original, read, pools = module.Reader, [], []

    def spying(packed, excluded, *rest):
        read.append({packed.ids[owner] for owner in packed.owners[~excluded]})
        return original(packed, excluded, *rest)

    def pool(rows):
        pools.append(build(rows))
        return pools[-1]

    build = Pools.read
    monkeypatch.setattr(module, "Reader", spying)
    monkeypatch.setattr(Pools, "read", staticmethod(pool))
    execute(anneal_experiment, SETTINGS, three, store)
    held = set().union(*pools[0].heldout_ids)
    assert len(held) >= 2 and not any(held & ids for ids in read) and read[0] == read[1]


def test_shuffled_text_has_the_same_words_in_another_order(given, store) -> None:
    packed, vocabulary = Packed.read(given["tokens"]), tokenizer_of(given["model"])
    other = module.shuffle_words(packed, vocabulary, 3, 32)
    texts = [[vocabulary.decode(d.tolist(), skip_special_tokens=True) for d in module._documents(each)] for each in (packed, other)]
    assert other.ids == packed.ids and [sorted(t.split()) for t in texts[0]] == [sorted(t.split()) for t in texts[1]]
    assert sum(a != b for a, b in zip(*texts, strict=True)) > 0.9 * len(packed.ids)


@pytest.mark.parametrize(("begin", "end"), [(1, 2), (2, 2)])
def test_copies_of_held_out_documents_are_found(begin: int, end: int) -> None:
    """Some tokenizers, such as Qwen's, have one token that begins and ends documents."""

    def packed(*documents: list[int]) -> Packed:
        ids = [[begin, *document, end] for document in documents]
        return Packed.read(pa.table(pack(pa.array(ids, pa.list_(pa.int32())), [f"{i}" for i in range(len(ids))], 8)))

    held = packed([5, 6, 7, 8, 9, 5], [6, 7, 8, 6, 6, 6])
    training = packed([9, 9, 9, 9, 9, 9], [6, 7, 8, 6, 6, 6], [5, 6, 7, 8, 9, 5], [9, 9, 9, 9, 9, 9], [7, 7, 7, 7, 7, 7])
    pools = Pools((training,), ([held.piece(i) for i in range(2)],), (frozenset("ab"),))
    copies, tokens, share = module._different(pools, 0)
    assert copies.tolist() == [False, True, True, True, False] and (tokens, share) == (16, 0.4)


def test_words_are_shuffled_in_scripts_without_spaces(given) -> None:
    """The control keeps the letters and their script's lack of spaces, but not their order."""
    vocabulary = tokenizer_of(given["model"])
    texts = ["市议会将于下周修理河上的旧桥", "ที่ดินของเขาอยู่ใกล้แม่น้ำ", "この橋を来週 修理する"]
    ids = [[vocabulary.begin, *vocabulary.encode(text), *vocabulary.end] for text in texts]
    packed = Packed.read(pa.table(pack(pa.array(ids, pa.list_(pa.int32())), ["a", "b", "c"], 512)))
    other = module.shuffle_words(packed, vocabulary, 3, 512)
    mixed = [vocabulary.decode(document.tolist(), skip_special_tokens=True) for document in module._documents(other)]
    assert [sorted(text.replace(" ", "")) for text in mixed] == [sorted(text.replace(" ", "")) for text in texts]
    assert all(" " not in text and text != before for text, before in zip(mixed, texts, strict=True))


def test_trials_are_not_repeated_after_a_crash(store, given, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = module._anneal, []

    def crashing(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(module, "_anneal", crashing)
    with pytest.raises(KeyboardInterrupt):
        execute(anneal_experiment, SETTINGS, given, store)
    execute(anneal_experiment, SETTINGS, given, store)
    assert len(calls) == 10


def test_what_is_held_out_on_one_side_is_not_read_on_the_other(store, given, corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidates are already among the default documents: losses are measured only on documents that no arm reads."""
    both = {**given, "documents": corpus([("high", 60)] * 40)["documents"]}
    original, read, measured = module.Reader, [], []

    def spying(packed, excluded, *rest):
        read.append({packed.ids[owner] for owner in packed.owners[~excluded]})
        return original(packed, excluded, *rest)

    def measuring(model, pieces, size):
        measured.append([tuple(piece) for piece in pieces])
        return 1.0

    monkeypatch.setattr(module, "Reader", spying)
    monkeypatch.setattr(module, "mean_loss", measuring)
    execute(anneal_experiment, SETTINGS.replace(phase=SETTINGS.phase.replace(steps=3)), both, store)
    packed = module.Packed.read(given["tokens"])
    owners: dict[tuple[int, ...], set[str]] = {}
    for index, owner in enumerate(packed.owners):
        owners.setdefault(tuple(packed.piece(index)), set()).add(packed.ids[owner])
    aside = set().union(*(owners[piece] for piece in measured[1]))
    assert aside and not any(aside & ids for ids in read)
    # The default arm reads one source, the others two; no arm reads the candidates' held-out documents.
    default, own = read[0], read[4]
    assert len(default) < len(packed.ids) - len(aside) and default >= own and read[3] == default
