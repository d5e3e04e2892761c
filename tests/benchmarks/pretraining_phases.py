"""Phases of pretraining: the value of keeping the optimizer's moments, the cost of a kill, retrieval in a longer context, data sets judged
by annealing.

    OMP_NUM_THREADS=1 PYTHONPATH=.pkg python tests/benchmarks/pretraining_phases.py --json [--part needle --part kept …] [--data FOLDER]

Models of 30 to 100 thousand parameters, fp32, one thread; seconds are of the process and its children. Real text: text_books, gsm8k and
text_misc of `--data` (../shared/data), without which `kept`, `anneal` and `reader` are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from puna.stages.contract import execute
from puna.stages.evaluation.needle import NeedleConfig, NeedleSettings
from puna.stages.evaluation.needle import needle as measured
from puna.stages.experiments.anneal_experiment import AnnealExperimentConfig, anneal_experiment
from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.stages.training.intervals import mean
from puna.stages.training.phase import SHAPE, Phase
from puna.storage import Artifact, PunaError, Store

DATA = Path(os.environ.get("PUNA_DATA", Path(__file__).parents[3] / "shared" / "data"))
MUON = {"name": "muon", "embedding_scale": 32}
LETTERS = "abcdefghijklmnopqrstuvwx"


class Missing(RuntimeError):
    """An error: data that a part needs is missing on this machine."""


def documents(store: Store, texts: list[str]) -> Artifact:
    n = len(texts)
    return store.import_table("documents", pa.table({
        "id": [f"{i:032x}" for i in range(n)], "url": [f"https://x.org/{i}" for i in range(n)],
        "fetched_at": [datetime(2026, 1, 1, tzinfo=UTC)] * n, "source": ["bench"] * n,
        "title": pa.array([None] * n, pa.string()), "text": texts,
    }))  # fmt: skip


def rows(store: Store, docs: Artifact, vocabulary: Artifact, length: int) -> Artifact:
    return execute(tokenize, TokenizeConfig(sequence_length=length), {"documents": docs, "tokenizer": vocabulary}, store)


def shape(width: int, layers: int = 2, heads: int = 2) -> Any:
    return SHAPE.replace(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        zero_residual=True, tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip


def pages(data: Path, count: int, words: int = 400) -> list[str]:
    """Return the first `count` passages of `words` words, taken from each book in turn."""
    books = data / "text_books" / "books36.jsonl.zst"
    if not books.exists():
        raise Missing(f"{books} is not there")
    import pyarrow.json as pj

    with pa.input_stream(str(books), compression="zstd") as stream:
        texts = pj.read_json(pa.py_buffer(stream.read()), read_options=pj.ReadOptions(block_size=1 << 26))["text"].to_pylist()
    cut = [[" ".join(some[i : i + words]) for i in range(0, len(some) - words, words)] for some in (text.split() for text in texts)]
    return [book[i] for i in range(max(map(len, cut))) for book in cut if i < len(book)][:count]


# --- needle ---------------------------------------------------------------------------------------------


def recall(draw: random.Random, length: int, keys: int = 6, most: float = 0.7) -> str:
    """Return a text of words: up to `keys` keys with their values, each mentioned repeatedly among noise words, whose share is drawn up to
    `most`."""
    rate = draw.uniform(0.0, most)
    count = draw.randint(1, keys)
    pairs, found = list(zip(draw.sample(LETTERS, count), draw.choices(LETTERS, k=count), strict=True)), list[str]()
    while len(found) < length:
        key, value = draw.choice(pairs)
        found += [f"n{draw.choice(LETTERS)}"] if draw.random() < rate else [f"k{key}", f"v{value}"]
    return " " + " ".join(found[:length])


def asked(draw: random.Random, length: int, keys: int) -> str:
    """Return a text of `length` words: up to `keys` keys with their values at random places among noise words, and questions for all keys
    at the end."""
    count = draw.randint(1, min(keys, length // 5))
    pairs = list(zip(draw.sample(LETTERS, count), draw.choices(LETTERS, k=count), strict=True))
    words = [f"n{draw.choice(LETTERS)}" for _ in range(length - 4 * count)]
    for key, value in pairs:
        words.insert(draw.randint(0, len(words)), f"k{key} v{value}")
    draw.shuffle(pairs)
    return " " + " ".join([*words, *(f"k{key} v{value}" for key, value in pairs)])


def noise(draw: random.Random, length: int) -> str:
    return " " + " ".join(f"n{draw.choice(LETTERS)}" for _ in range(length))


def needle(folder: Path, data: Path, seeds: Iterable[int] = (0,)) -> dict[str, Any]:
    """Return the needle's figures for one seed, or a list of the figures of each seed."""
    found = {seed: one_needle(folder / str(seed), seed) for seed in seeds}
    return next(iter(found.values())) if len(found) == 1 else {"needle_by_seed": found}


def one_needle(folder: Path, seed: int) -> dict[str, Any]:
    """Extend a context of 128 tokens fourfold, in two steps that must be accepted; measure on new texts, 100 for each depth.

    Most short texts are dense with pairs, and the first 600 thousand tokens are read in pieces of 48: noise would hide the answers from a
    model that has not learned to look back. Long texts fill a row, or half of one, and ask for each pair once, at any distance.
    """
    store, draw = Store.open(folder), random.Random(seed)

    def corpus(count: int, low: int, high: int, recalled: Callable[[int], str], found: Callable[[int], str]) -> list[str]:
        """Return `count` texts of `low` to `high` words: one in sixteen is noise, a quarter of the others come from `found`, the rest from
        `recalled`."""
        kinds = [recalled, recalled, recalled, found]
        sizes = [draw.randint(low, high) for _ in range(count)]
        return [kinds[i % 4](size) if i % 16 else noise(draw, size) for i, size in enumerate(sizes)]

    def shorter(count: int) -> list[str]:
        return corpus(count, 24, 126, lambda size: recall(draw, size, 8, 0.3), lambda size: asked(draw, size, 8))

    def longer(count: int, words: int) -> list[str]:
        return corpus(count, words, words, lambda size: asked(draw, size, 24), lambda size: recall(draw, size, 24))

    short = documents(store, shorter(8000))
    vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=337), {"documents": short}, store)
    initial = rows(store, short, vocabulary, 128)
    # Half of the tokens are short documents, so that the model does not forget what it learned first. Rows twice as long as the wanted
    # context leave half of its documents whole.
    long = rows(store, documents(store, longer(400, 510) + longer(400, 254) + shorter(4000)), vocabulary, 1024)
    passages = NeedleSettings(passage=" k{key} {value}", key_words=tuple(LETTERS), value_words=tuple(f"v{x}" for x in LETTERS), trials=40)
    bounds = {"short_loss": 0.01, "needle": 0.95, "attempts": 4}
    decay = {"learning_rate": 0.01, "warmup_steps": 5, "shape": "linear"}
    first = {"learning_rate": 0.02, "warmup_steps": 20, "shape": "constant", "anneal_steps": 250}
    config = PretrainConfig(
        seed=seed, model=shape(64), optimizer=MUON, needle=passages, validate_every=50, validation_tokens=12_000, validation_share=0.05,
        phases=(
            Phase(name="initial", until=960_000, rows_per_step=9, length=48, ramp=({"after_tokens": 576_000, "rows": 12},), schedule=first),
            Phase(name="256", tokens="long", steps=150, rows_per_step=4, length=512, rope_theta=80_000.0, schedule=decay,
                  accept=bounds | {"length": 256}),
            Phase(name="512", tokens="long", steps=150, rows_per_step=4, schedule=decay, accept=bounds | {"length": 512}),
        ),
    )  # fmt: skip
    try:
        made = execute(pretrain, config, {"tokens": initial, "tokenizer": vocabulary, "long": long}, store)
    except PunaError as error:
        return {"needle_refused": str(error)}
    own = NeedleConfig(**dict(passages) | {"trials": 100}, seed=seed + 1, lengths=(128, 512))
    found = execute(measured, own, {"model": made, "documents": documents(store, [noise(draw, 400) for _ in range(50)])}, store)
    m = made.manifest.metrics
    return {
        "needle_min_depth": found.manifest.metrics["needle_min_512"], "needle_min_depth_128": found.manifest.metrics["needle_min_128"],
        "short_context_loss_change": m["short_loss_change_256"] + m["short_loss_change_512"],
        "needle_attempts": [m["attempts_256"], m["attempts_512"]], "needle_parameters": m["parameters"],
        "needle_depths": {name: dict(points) for name, points in found.manifest.figures["needle"]["series"].items()},
    }  # fmt: skip


# --- the optimizer's moments ----------------------------------------------------------------------------


def kept(folder: Path, data: Path) -> dict[str, Any]:
    """Train the second phase with the first phase's moments and without; return the loss without minus the loss with, over pairs with equal
    seeds."""
    store = Store.open(folder)
    docs = documents(store, pages(data, 1200))
    vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=1024), {"documents": docs}, store)
    given = {"tokens": rows(store, docs, vocabulary, 256), "tokenizer": vocabulary}
    gains: dict[str, list[float]] = {}
    for name, optimizer, rate in (("adamw", {"beta2": 0.98}, 6e-3), ("muon", MUON, 0.02)):
        for seed in range(3):
            own = {"model": shape(48), "optimizer": optimizer, "validation_tokens": 16_000, "validate_every": 200, "seed": seed}
            first = Phase(steps=150, rows_per_step=6, schedule={"learning_rate": rate, "warmup_steps": 10, "shape": "constant"})
            base = execute(pretrain, PretrainConfig(**own, phases=(first,)), given, store)
            loss = {}
            for how in ("keep", "fresh"):
                anneal = Phase(
                    name="anneal", steps=40, rows_per_step=6, optimizer=how,
                    schedule={"learning_rate": rate, "warmup_steps": 0, "shape": "linear"},
                )  # fmt: skip
                settings = PretrainConfig(**{k: v for k, v in own.items() if k != "model"}, phases=(anneal,))
                loss[how] = execute(pretrain, settings, {**given, "model": base}, store).manifest.metrics["validation_loss"]
            gains.setdefault(name, []).append(loss["fresh"] - loss["keep"])
    found = {f"kept_optimizer_gain{'' if name == 'adamw' else f'_{name}'}": list(mean(some)) for name, some in gains.items()}
    return found | {"kept_optimizer_gains": gains}


# --- a kill in each phase -------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
from puna.stages.training.token_rows import Reader
from tests.benchmarks.pretraining_phases import small_run
count, step, original = [0], int(sys.argv[2]), Reader.batches
def batches(self, number, size):
    count[0] += 1
    if count[0] == step:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, number, size)
Reader.batches = batches
print(small_run(sys.argv[1]))
"""
STEPS = (12, 8, 6)


def small_run(folder: str) -> str:
    """Return the sha256 of the weights after three phases; the second has separate rows, the third is averaged."""
    store, draw = Store.open(folder), random.Random(1)
    docs = documents(store, [recall(draw, draw.randint(24, 60)) for _ in range(300)])
    vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=337), {"documents": docs}, store)
    phases = (
        Phase(name="initial", steps=STEPS[0]),
        Phase(name="long", tokens="long", steps=STEPS[1], rope_theta=50_000.0),
        Phase(name="anneal", steps=STEPS[2], schedule={"learning_rate": 1e-3, "warmup_steps": 0, "anneal_steps": 6, "average": 3}),
    )
    given = {"tokens": rows(store, docs, vocabulary, 64), "long": rows(store, docs, vocabulary, 128), "tokenizer": vocabulary}
    config = PretrainConfig(model=shape(16, 1), phases=phases, checkpoint_every=3, validate_every=4, validation_tokens=1000)
    return execute(pretrain, config, given, store).manifest.files["model.safetensors"].sha256


def resume(folder: Path, data: Path) -> dict[str, Any]:
    """Compare runs that are killed with -9 in each phase and restarted with an undisturbed run."""

    def run(place: str, step: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", CHILD, str(folder / place), str(step)], capture_output=True, text=True, check=False,
            cwd=Path(__file__).parents[2], env={**os.environ, "PYTHONPATH": ".pkg:."},
        )  # fmt: skip

    whole = run("whole", 0).stdout.strip()
    same = []
    for number in range(len(STEPS)):
        killed = run(f"killed-{number}", sum(STEPS[:number]) + 5)
        same.append(killed.returncode == -signal.SIGKILL and bool(whole) and run(f"killed-{number}", 0).stdout.strip() == whole)
    return {"phase_resume_bitwise": int(all(same)), "phase_resume_same": same}


# --- data sets judged by annealing ----------------------------------------------------------------------


def lines(file: Path, *fields: str) -> list[str]:
    """Return the texts of a file of JSON lines; each joins the given fields."""
    if not file.exists():
        raise Missing(f"{file} is not there")
    return ["\n".join(json.loads(line)[field] for field in fields) for line in file.read_text(encoding="utf-8").splitlines()]


JUDGED = range(10, 15)


def anneal(folder: Path, data: Path, seeds: Iterable[int] = JUDGED) -> dict[str, Any]:
    """Judge two good and two bad data sets for each seed: school mathematics and programmers' questions; the first with shuffled
    words, and two texts of the second, copied forty times. Seeds 0 to 4 were used to choose the bounds."""
    books, began = pages(data, 400), seconds()
    school = lines(data / "gsm8k" / "train.jsonl", "question", "answer")
    forum = [text[:6000] for text in lines(data / "text_misc" / "dj_stack_exchange.jsonl", "text")]
    good, bad, gains = [0, 0], [0, 0], list[Any]()
    for seed in seeds:
        store, draw = Store.open(folder / str(seed)), random.Random(seed)
        some, chosen = draw.sample(school, 300), draw.sample(forum, 40)
        shuffled = [" ".join(draw.sample(words, len(words))) for words in map(str.split, draw.sample(school, 300))]
        sets = {"school": some, "forum": chosen, "shuffled": shuffled, "copies": chosen[:2] * 40}
        docs = documents(store, [text for texts in sets.values() for text in texts])
        labels = [name for name, texts in sets.items() for _ in texts]
        mixture = store.import_table("mixture", pa.table({
            "id": docs.read(columns=["id"])["id"], "category": labels, "split": ["train"] * len(labels),
            "repeats": pa.array([1] * len(labels), pa.int32()), "weight": [0.25] * len(labels),
        }))  # fmt: skip
        default = documents(store, draw.sample(books, 300))
        vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=1024), {"documents": default}, store)
        config = AnnealExperimentConfig(
            model=shape(32), seed=seed, heldout_tokens=5000, categories=4,
            base=Phase(name="base", steps=150, rows_per_step=4, schedule={"learning_rate": 0.02, "warmup_steps": 10, "shape": "constant"}),
            phase=Phase(name="anneal", steps=40, rows_per_step=4, schedule={"learning_rate": 0.02, "warmup_steps": 4, "shape": "linear"}),
        )  # fmt: skip
        given = {"tokens": rows(store, default, vocabulary, 256), "tokenizer": vocabulary, "documents": docs, "mixture": mixture}
        made = execute(anneal_experiment, config, given, store)
        said = {name: made.manifest.metrics[f"verdict_{name}"] for name in sets}
        for name, verdict in said.items():
            counts = good if name in ("school", "forum") else bad
            counts[0] += verdict == "accepted"
            counts[1] += 1
        gains.append(said | {f"{r['task']} {r['metric']}": [r["value"], r["low"]] for r in made.read().to_pylist() if "gain" in r["metric"]})
    minutes = (seconds() - began) / 60 / len(gains)
    return {"anneal_good_accepted": good, "anneal_bad_accepted": bad, "anneal_minutes": minutes, "anneal_verdicts": gains}


# --- reading --------------------------------------------------------------------------------------------


def reader(folder: Path, data: Path) -> dict[str, Any]:
    """Return the tokens per CPU second of the data reader, over those of training a model of 100 thousand parameters."""
    import numpy as np

    from puna.models.training.loop import train
    from puna.models.training.objectives import LanguageModeling
    from puna.models.training.settings import TrainConfig
    from puna.models.transformer import Transformer
    from puna.stages.training.token_rows import Packed, Reader

    store = Store.open(folder)
    docs = documents(store, pages(data, 1200))
    vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=1024), {"documents": docs}, store)
    packed = Packed.read(rows(store, docs, vocabulary, 512))
    own = Reader(packed, np.zeros(len(packed.owners), dtype=bool), 8, 0, 0)
    network = Transformer(shape(48).complete(1024, 512), seed=0)
    began = time.process_time()
    count = sum(len(batch) for step in range(1, 401) for batch in own.batches(step, 8192))
    reading = count / (time.process_time() - began)
    ready = [own.batches(step, 8192) for step in range(1, 16)]
    train(network, LanguageModeling(), lambda step: ready[step - 1], TrainConfig(steps=5), 0)
    began = time.process_time()
    log = train(network, LanguageModeling(), lambda step: ready[step - 1], TrainConfig(steps=15), 0)
    training = sum(row["tokens"] for row in log) / (time.process_time() - began)
    return {"reader_vs_step": reading / training, "reader_tokens_per_second": reading, "step_tokens_per_second": training}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "needle": needle, "kept": kept, "resume": resume, "anneal": anneal, "reader": reader,
}  # fmt: skip


def seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(parts: list[str], data: Path = DATA, seeds: Iterable[int] = (0,), judged: Iterable[int] = JUDGED) -> dict[str, Any]:
    """Return all figures of these parts, with their CPU seconds. seeds: those of the needle; judged: those of the part anneal."""
    found: dict[str, Any] = {}
    for name in parts:
        before, began = seconds(), time.time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                own = {"needle": (seeds,), "anneal": (judged,)}.get(name, ())
                found |= PARTS[name](Path(folder), data, *own)
            except Missing as error:
                found[f"{name}_skipped"] = str(error)
        found |= {f"{name}_cpu_seconds": round(seconds() - before, 1), f"{name}_wall_seconds": round(time.time() - began, 1)}
    return found


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all parts, for `pretraining.py`; of the needle, which takes longest, only with `--whole`."""
    parts = [name for name in PARTS if arguments.whole or name != "needle"]
    return measure(parts, DATA, range(arguments.first, arguments.first + 1), JUDGED[: arguments.seeds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this part; may be repeated")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with text_books")
    parser.add_argument("--needle-seeds", type=int, nargs="+", default=[0], help="seeds of the part needle")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = measure(options.part or list(PARTS), options.data, options.needle_seeds)
    print(json.dumps(found, indent=1) if options.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
