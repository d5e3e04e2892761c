"""Compile the loops of curation, training and generation once, into their cache, so that the first run need not.

    python deploy/compile.py [--ship]

`--ship`: compile the loops of curation alone, for all common processors of this machine's kind, into the folder that the wheel and the
image bring (`numba_cache.SHIPPED`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import torch

from puna.flows.cli.clean import clean
from puna.flows.engine.session import session
from puna.kernels.cpu import numba_cache
from puna.kernels.text.characters import letters_and_capitals
from puna.kernels.text.technical import measure
from puna.models.config import ModelConfig
from puna.models.generation import Engine, SamplingParams
from puna.models.training.loop import TrainConfig, Trainer
from puna.models.training.objectives import LanguageModeling
from puna.models.training.objectives.base import Targets
from puna.models.transformer import Transformer
from puna.stages.contract import Stage, StageConfig, Value
from puna.stages.curate.decontaminate import DecontaminateConfig, decontaminate
from puna.stages.curate.extract import ExtractConfig, extract
from puna.stages.curate.harm import harm
from puna.stages.curate.heuristics import HeuristicsConfig, heuristics
from puna.stages.curate.language import LanguageConfig, language
from puna.stages.curate.line_dedup import LineDedupConfig, line_dedup
from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
from puna.stages.curate.pii import PiiConfig, pii
from puna.stages.curate.quality import QualityConfig, quality
from puna.stages.curate.train_classifier import TrainClassifierConfig, train_classifier
from puna.stages.prompts.prompts import PromptsConfig, Task, prompts
from puna.storage import Artifact, Store

TEXT = "The quick brown fox jumps over the lazy dog while {0} others of its kind look on from the edge of the old wood."
PAGE = (
    "<html><head><title>Page {0} à la carte</title></head><body><h1>Page {0}</h1><ul><li><a href='/'>Home</a></ul>"
    "<p>{1}</p><pre>x = {0}</pre><table><tr><td>{0}<td>two</table><p>Contact: 12 Main Street, Springfield, IL 62704, "
    "+1 650 253 0000, info@example.org, DE89 3704 0044 0532 0130 00, 192.168.7.11</p><p>我们在这里学习语言，也写程序。</p></body></html>"
)
"""A page with what has a loop of its own: a list, code, a table, personal data, a script without spaces."""


def pages(count: int = 12) -> pa.Table:
    """Small pages, two of them alike."""
    bodies = [PAGE.format(n, " ".join(TEXT.format(n * k) for k in range(20))).encode() for n in [0, *range(count - 1)]]
    now = datetime(2024, 1, 1, tzinfo=UTC)
    return pa.table(
        {
            "id": [f"{n:02d}" for n in range(count)],
            "url": [f"https://example.com/{n}" for n in range(count)],
            "fetched_at": [now] * count,
            "content_type": ["text/html"] * count,
            "charset": ["utf-8"] * count,
            "body": bodies,
            "source": ["web", "wikipedia"] * (count // 2),
        }
    )


def model() -> None:
    """A step of training, and two answers."""
    shape = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        max_position_embeddings=64,
    )  # fmt: skip
    tiny = Transformer(shape, seed=0)
    trainer = Trainer(tiny, LanguageModeling(), TrainConfig(steps=2, schedule={"learning_rate": 1e-3}))
    trainer.step(1, Targets.from_documents([torch.arange(32), torch.arange(16)]), seed=0)
    for temperature in (0.0, 1.0):
        Engine(tiny).generate([list(range(20))], SamplingParams(n=2, temperature=temperature, max_tokens=2, stop=()))


def ship() -> None:
    """Compile the loops of curation anew for the common processors of this machine's kind."""
    target = numba_cache.target()
    if target is None:
        sys.exit(f"compile: this processor lacks instructions of {numba_cache.TARGETS}; build on another one, or without --ship")
    shutil.rmtree(numba_cache.SHIPPED, ignore_errors=True)
    place = numba_cache.SHIPPED / target
    place.mkdir(parents=True)
    print(f"compiling the loops of curation for {target}", flush=True)
    options = {"NUMBA_CPU_NAME": target, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(place)}
    subprocess.run([sys.executable, __file__, "curation"], env=os.environ | options, check=True)


def curation() -> None:
    """Clean pages, then run each stage that has loops; a session also notes that they are compiled."""
    with tempfile.TemporaryDirectory() as folder:
        file, rows = Path(folder, "pages.jsonl"), pages(40).select(["url", "body"]).to_pylist()
        file.write_text("".join(json.dumps({"url": row["url"], "html": row["body"].decode()}) + "\n" for row in rows), encoding="utf-8")
        clean([str(file)], Path(folder, "documents.jsonl"), Store.open(Path(folder, "store")), workers=1, say=lambda _: None)
    with tempfile.TemporaryDirectory() as folder, session(store := Store.open(folder), flow="compile", workers=1) as now:

        def made(stage: Stage, config: StageConfig, **given: Value) -> Artifact:
            return now.perform(stage, config, given, stage.name).artifact

        documents = made(extract, ExtractConfig(), pages=store.import_table("pages", pages()))
        signals = made(language, LanguageConfig(), documents=documents)
        made(heuristics, HeuristicsConfig(min_language_words=1000), documents=documents, language=signals)
        public = made(pii, PiiConfig(), documents=documents)
        unique = made(minhash_dedup, MinhashDedupConfig(), documents=public)
        lines = made(line_dedup, LineDedupConfig(), documents=unique)
        asked = made(prompts, PromptsConfig(tasks=[Task(task="digits")], train=2, heldout=2))
        made(quality, QualityConfig(), documents=lines, language=signals)
        made(harm, StageConfig(), documents=lines, language=signals)
        examples = TrainClassifierConfig(dimension=8, epochs=1, buckets=10_000, positive_sources=("wikipedia",))
        trained = made(train_classifier, examples, documents=documents)
        made(quality, QualityConfig(), documents=lines, classifier=trained)
        made(decontaminate, DecontaminateConfig(), documents=lines, prompts=[asked])
        measure(pa.array([TEXT]), 2000)
        letters_and_capitals(TEXT)


if __name__ == "__main__":
    if sys.argv[1:] == ["--ship"]:
        ship()
    else:
        if sys.argv[1:] != ["curation"]:
            model()
        curation()
