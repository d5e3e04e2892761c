"""The mixture experiment: pools, shares, its results recomputed, and a case with a known answer."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from puna.stages.contract import execute
from puna.stages.experiments import mix_experiment as module
from puna.stages.experiments.mix_experiment import MixExperimentConfig, mix_experiment
from puna.stages.training import mixing_laws
from puna.stages.training.phase import SHAPE, Phase
from puna.stages.training.pools import Mixed, PoolRows, Pools
from puna.stages.training.token_rows import Packed, Reader
from puna.stages.training.vocabulary import tokenizer_of
from puna.storage import Artifact, PunaError

from .conftest import text

SETTINGS = MixExperimentConfig(
    categories=3,
    trials=6,
    model=SHAPE.replace(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1),
    phase=Phase(name="proxy", steps=15, rows_per_step=4, schedule={"learning_rate": 3e-2, "warmup_steps": 2}),
    sequence_length=32,
    heldout_tokens=300,
)
ROWS = [("high", 60)] * 12 + [("low", 60)] * 8 + [("code", 60)] * 6


def results(made) -> dict[tuple[str, str], float]:
    return {(row["task"], row["metric"]): row["value"] for row in made.read().to_pylist()}


def tokens_of(given: dict[str, Artifact], rows: list[tuple[str, int]]) -> Counter[str]:
    """Return each category's tokens, with BOS and EOS."""
    vocabulary, tokens = tokenizer_of(given["tokenizer"]), Counter[str]()
    for i, (category, words) in enumerate(rows):
        tokens[category] += len(vocabulary.encode_batch([text(category, i, words)])[0]) + 1 + len(vocabulary.end)
    return tokens


def test_results_follow_from_the_trials(store, corpus) -> None:
    given = corpus(ROWS)
    made = execute(mix_experiment, SETTINGS, given, store)
    trials = made.read("trials").to_pylist()
    again = [f"{name}, seed {seed}" for seed in (2, 3) for name in ("natural", "optimum")]
    assert [trial["name"] for trial in trials] == ["natural", *(f"design {i}" for i in range(1, 6)), "optimum", *again]
    trials, repeated = trials[:7], trials[7:]
    names = ["code", "high", "low"]
    details = [json.loads(trial["parameters"]) for trial in trials]
    shares = np.array([[d["shares"][n] for n in names] for d in details])
    losses = np.array([[d["losses"][n] for n in names] for d in details])
    fitted = [mixing_laws.fit_surrogate(shares[:-1], losses[:-1, i]) for i in range(3)]
    best, natural = shares[-1], shares[0]

    def value(mixture: np.ndarray) -> float:
        return float(np.mean([one(mixture) for one in fitted]) + 0.01 * mixing_laws.divergence(mixture[None], natural)[0])

    # No mixture within the bounds is better: every category has between .05 and .7 of the tokens.
    assert best.min() >= 0.05 - 1e-9 and best.max() <= 0.7 + 1e-9
    others = np.random.default_rng(0).dirichlet(np.ones(3), 2000)
    inside = others[(others.min(1) >= 0.05) & (others.max(1) <= 0.7)]
    assert value(best) <= min(map(value, inside)) + 1e-4
    found = results(made)
    # The recommended shares are used if their gain over the three seeds exceeds Student's interval, 4.303 standard errors.
    gains = [trials[0]["loss"] - trials[-1]["loss"], *(a["loss"] - b["loss"] for a, b in zip(repeated[::2], repeated[1::2], strict=True))]
    low = np.mean(gains) - 4.302653 * np.std(gains, ddof=1) / np.sqrt(3)
    assert found["target", "gain"] == pytest.approx(np.mean(gains)) and len(set(gains)) == 3
    (bounds,) = [(row["low"], row["n"]) for row in made.read().to_pylist() if row["metric"] == "gain"]
    assert bounds == (pytest.approx(low), 3)
    assert made.manifest.metrics["mixture_used"] == ("recommended" if low > 0 else "natural")
    weights = {row["category"]: row["weight"] for row in made.read("weights").to_pylist()}
    used = best if low > 0 else shares[0]
    assert [weights[n] for n in names] == pytest.approx(used, abs=1e-9) and sum(weights.values()) == pytest.approx(1)
    assert found["target", "loss"] == pytest.approx(losses[-1].mean()) == made.manifest.metrics["optimum_loss"]
    assert found["target", "natural_loss"] == pytest.approx(losses[0].mean())
    assert found["high", "left_out_error"] == pytest.approx(np.abs(fitted[1].left_out).mean())
    # About half of the corpus's words are of the first category.
    sizes = tokens_of(given, ROWS)
    assert [found[n, "natural_weight"] for n in names] == pytest.approx([sizes[n] / sum(sizes.values()) for n in names])
    # The loss of a category falls with its share: the design's corners show it.
    for i in range(3):
        most, least = shares[:-1, i].argmax(), shares[:-1, i].argmin()
        assert losses[most, i] < losses[least, i]
    assert all(trial["tokens"] <= 15 * 4 * 32 and trial["flops"] > 0 for trial in trials)


def test_a_category_may_be_called_other(store, corpus) -> None:
    """The group of all small categories then has another name."""
    given = corpus([*ROWS, *[("code", 60)] * 4])
    rows = given["split"].read()
    names = ["late" if i >= len(ROWS) else {"low": "other"}.get(name, name) for i, name in enumerate(rows["category"].to_pylist())]
    given["split"] = store.import_table("mixture", rows.set_column(rows.column_names.index("category"), "category", pa.array(names)))
    made = execute(mix_experiment, SETTINGS, given, store)
    assert {task for task, _ in results(made)} == {"high", "other", "others", "target"}
    weights = {row["category"]: row["weight"] for row in made.read("weights").to_pylist()}
    assert set(weights) == {"high", "other", "code", "late"} and sum(weights.values()) == pytest.approx(1)


def test_each_repeat_reads_the_rows_in_its_own_order(store, corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval over the seeds includes the noise of the order; the two mixtures of a pair read each category's rows in the same
    order."""
    original, made = Pools.mix, list[Mixed]()
    monkeypatch.setattr(Pools, "mix", lambda self, *arguments: made.append(original(self, *arguments)) or made[-1])
    execute(mix_experiment, SETTINGS, corpus(ROWS), store)
    orders = [[reader.pieces(step) for reader in mixed.readers for step in range(1, 9)] for mixed in made]
    first, second, third = orders[0], orders[7], orders[9]
    assert orders == [first] * 7 + [second] * 2 + [third] * 2 and first != second != third != first


def test_trials_are_not_repeated_after_a_crash(store, corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    given = corpus(ROWS)
    original, calls = module.train_proxy, []

    def crashing(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(module, "train_proxy", crashing)
    with pytest.raises(KeyboardInterrupt):
        execute(mix_experiment, SETTINGS, given, store)
    made = execute(mix_experiment, SETTINGS, given, store)
    assert len(calls) == 12
    whole = execute(mix_experiment, SETTINGS.model_copy(update={"seed": 0}), given, store)
    assert whole.data_digest == made.data_digest


def test_same_result_for_any_parts_and_workers(tmp_path: Path, corpus) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from puna.storage import Store

    found = set()
    for index, (rows, executor) in enumerate([(5, None), (1000, ThreadPoolExecutor(1))]):
        home = Store.open(tmp_path / str(index))
        made = execute(mix_experiment, SETTINGS, corpus(ROWS, home), home, part_rows=rows, executor=executor)
        found.add((made.path("evaluation.parquet").read_bytes(), made.path("weights.parquet").read_bytes(), made.data_digest))
    assert len(found) == 1


def test_small_categories_are_weighed_together(store, corpus) -> None:
    rows = [*ROWS, *[("high", 10)] * 0]
    settings = MixExperimentConfig(**(SETTINGS.model_dump() | {"categories": 2}))
    given = corpus(rows)
    made = execute(mix_experiment, settings, given, store)
    weights = {row["category"]: row["weight"] for row in made.read("weights").to_pylist()}
    assert set(weights) == {"code", "high", "low"} and sum(weights.values()) == pytest.approx(1)
    sizes = tokens_of(given, rows)
    assert weights["code"] / weights["low"] == pytest.approx(sizes["code"] / sizes["low"])
    assert ("other", "weight") in results(made)


def test_one_category_gets_everything(store, corpus) -> None:
    made = execute(mix_experiment, SETTINGS, corpus([("high", 60)] * 8), store)
    assert made.read("weights").to_pylist() == [{"category": "high", "weight": 1.0}] and "trials" not in made.tables


def test_shares_are_met_at_every_moment(tmp_path: Path) -> None:
    class Rows:
        def __init__(self, name: str) -> None:
            self.name = name

        def pieces(self, step: int) -> list[tuple[int, int]]:
            return [(step, step + 1)]

    shares = np.array([0.5, 0.3, 0.2])
    mixed = Mixed([Rows("a"), Rows("b"), Rows("c")], shares, 4)  # type: ignore[list-item]
    seen: Counter[int] = Counter()
    order: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step in range(1, 100):
        for group, start, _ in mixed._spans(step):
            seen[group] += 1
            order[group].append(start)
            total = sum(seen.values())
            assert all(abs(seen[g] - shares[g] * total) < 1 for g in range(3))
    # The k-th row read from a group is its k-th row, whatever the shares.
    assert all(rows == list(range(1, len(rows) + 1)) for rows in order.values())
    assert mixed._spans(7) == Mixed(mixed.readers, shares, 4)._spans(7)


@pytest.mark.parametrize("size", [1, 7, 12, 1000])
def test_micro_batches_hold_the_steps_documents_in_order(size: int) -> None:
    lengths = [5, 3, 4, 4, 8, 2, 6]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    packed = Packed(np.arange(starts[-1], dtype=np.int32), starts, np.array([0, 2, 4, 5, 7]), np.arange(7), tuple("abcdefg"))
    readers = [Reader(packed, np.zeros(7, dtype=bool), 1, seed, begin=0) for seed in (0, 1)]
    mixed = Mixed(readers, np.array([0.5, 0.5]), 3)
    for step in (1, 2):
        batches = mixed.batches(step, size)
        assert [int(n) + 1 for batch in batches for n in batch.lengths] == mixed.lengths(step)
        assert [int(t) for batch in batches for t in batch.forest.tokens] == [t for g, a, b in mixed._spans(step) for t in packed.tokens[a:b].tolist()]
        assert all(len(batch) <= size or batch.answers == 1 for batch in batches)
        assert size < 1000 or len(batches) == 1


def test_held_out_pages_are_not_read(store, corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    given = corpus(ROWS)
    seen: list[Pools] = []
    original = Pools.read

    def spy(rows: PoolRows) -> Pools:
        seen.append(original(rows))
        return seen[-1]

    monkeypatch.setattr(Pools, "read", staticmethod(spy))
    execute(mix_experiment, SETTINGS, given, store)
    pools = seen[0]
    for number, category in enumerate(("code", "high", "low")):
        own = {f"{i:032x}" for i, (name, _) in enumerate(ROWS) if name == category}
        measured, trained = pools.heldout_ids[number], set(pools.training[number].ids)
        assert measured and trained and not measured & trained and measured | trained <= own
        assert sum(map(len, pools.heldout[number])) <= SETTINGS.heldout_tokens + SETTINGS.sequence_length


def test_the_held_out_split_is_left_alone(store, corpus) -> None:
    """Without its held-out documents, an experiment gives the same result."""
    import pyarrow as pa

    given = corpus(ROWS)
    documents, rows = given["documents"].read(), given["split"].read()
    out = set(documents["id"].to_pylist()[1::5])
    sides = pa.array(["heldout" if i in out else "train" for i in rows["id"].to_pylist()])
    split = store.import_table("mixture", rows.set_column(rows.schema.get_field_index("split"), "split", sides))
    made = execute(mix_experiment, SETTINGS, {**given, "split": split}, store)
    kept = store.import_table("documents", documents.filter(pa.array([i not in out for i in documents["id"].to_pylist()])))
    fewer = store.import_table("mixture", rows.filter(pa.array([i not in out for i in rows["id"].to_pylist()])))
    without = execute(mix_experiment, SETTINGS, {**given, "documents": kept, "split": fewer}, store)
    assert made.read().equals(without.read()) and made.key != without.key
    assert not made.read().equals(execute(mix_experiment, SETTINGS, given, store).read())


def test_wrong_settings_are_refused(store, corpus) -> None:
    for wrong, message in (
        ({"trials": 4, "categories": 4}, "use at least 6"),
        ({"min_share": 0.3, "categories": 4}, "no mixture of 4"),
        ({"max_share": 0.2, "categories": 4}, "no mixture of 4"),
        ({"phase": Phase(join_rows=2)}, "join_rows must be 1"),
        ({"target": {"a": 1.0}, "trials": 1}, "greater than or equal to 4"),
    ):
        with pytest.raises(ValidationError, match=message):
            MixExperimentConfig(**wrong)
    given = corpus(ROWS)
    odd = SETTINGS.model_copy(update={"target": {"sea": 1.0}})
    with pytest.raises(PunaError, match="'sea' is not among the categories code, high, low"):
        execute(mix_experiment, odd, given, store)
    with pytest.raises(PunaError, match="category 'code' has only one document"):
        execute(mix_experiment, SETTINGS, corpus([("high", 60)] * 5 + [("low", 50)] * 5 + [("code", 40)]), store)


def test_target_weights() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    groups = [Named("a"), Named("b"), Named("c")]
    assert module._target({}, groups) == pytest.approx([1 / 3] * 3)  # type: ignore[arg-type]
    assert module._target({"a": 3.0, "c": 0.0}, groups) == pytest.approx([0.75, 0.25, 0.0])  # type: ignore[arg-type]
    for wrong in ({"a": -1.0}, dict.fromkeys("abc", 0.0)):
        with pytest.raises(PunaError, match="must not be negative, and not all 0"):
            module._target(wrong, groups)  # type: ignore[arg-type]


def test_bounds_that_leave_no_mixture_are_refused_before_the_trials(store, corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four categories could share the text at 0.4 each; the documents have only two."""
    monkeypatch.setattr(module, "_run_mixtures", lambda *_: pytest.fail("a trial was run"))
    given = corpus([("high", 30)] * 6 + [("low", 30)] * 6)
    with pytest.raises(PunaError, match=r"has 2 categories, whose shares of at most max_share=0.4 do not add up to 1; raise max_share to 0.5 at least"):
        execute(mix_experiment, MixExperimentConfig(categories=4, trials=6, max_share=0.4), given, store)
