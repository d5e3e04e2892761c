"""Every stage of curation writes the same bytes for any order of its inputs, any shard size and any number of workers."""

from __future__ import annotations

import gzip
import importlib
import multiprocessing
import pkgutil
import shutil
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

import puna.stages.curate
from puna.stages.contract import External, Stage, StageConfig, execute
from puna.stages.contract.config import parse
from puna.stages.conversations import asking
from puna.stages.curate.block_lists import BlockListsConfig, block_lists
from puna.stages.curate.code_reasoning import TrainCodeReasoningConfig, code_reasoning, train_code_reasoning
from puna.stages.curate.contamination import ContaminationConfig, contamination
from puna.stages.curate.decontaminate import DecontaminateConfig, decontaminate
from puna.stages.curate.domains import TrainDomainsConfig, domains, train_domains
from puna.stages.curate.encoder_quality import TrainEncoderQualityConfig, encoder_quality, train_encoder_quality
from puna.stages.curate.extract import ExtractConfig, extract
from puna.stages.curate.gather import GatherConfig, gather
from puna.stages.curate.harm import harm
from puna.stages.curate.heuristics import HeuristicsConfig, heuristics
from puna.stages.curate.ingest import IngestConfig, ingest
from puna.stages.curate.judge import JudgeConfig, judge
from puna.stages.curate.language import LanguageConfig, language
from puna.stages.curate.line_dedup import LineDedupConfig, line_dedup
from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
from puna.stages.curate.minhash_update import minhash_update
from puna.stages.curate.pii import PiiConfig, pii
from puna.stages.curate.quality import QualityConfig, quality
from puna.stages.curate.select import SelectConfig, select
from puna.stages.curate.semantic_dedup import SemanticDedupConfig, semantic_dedup
from puna.stages.curate.substring_dedup import SubstringDedupConfig, substring_dedup
from puna.stages.curate.train_classifier import TrainClassifierConfig, classify, train_classifier
from puna.stages.curate.url_dedup import UrlDedupConfig, url_dedup
from puna.stages.curate.url_filter import UrlFilterConfig, url_filter
from puna.stages.pretrain.mix import MixConfig, mix
from puna.stages.pretrain.split import SplitConfig, split
from puna.storage import Artifact, Store

WHEN = datetime(2024, 1, 1, tzinfo=UTC)
SMALL = {"dimension": 8, "buckets": 10_000, "epochs": 3}
MODULES = [f"puna.stages.curate.{module.name}" for module in pkgutil.iter_modules(puna.stages.curate.__path__)]
PASSAGE = " ".join(f"passage{n}" for n in range(60))
CASES = {
    "other order": {"part_rows": 1024},
    "parts of 3": {"part_rows": 3},
    "2 workers, parts of 11": {"part_rows": 11, "workers": 2},
    "4 workers, parts of 5": {"part_rows": 5, "workers": 4},
}


def corpus(themed):
    """Return 72 documents: near-duplicates, repeated lines and passages, personal data, repeated and unwanted addresses, equal times."""
    rows = []
    for n, (identity, source, text) in enumerate(themed(72)):
        if n % 9 == 4:
            text = rows[-1]["text"] + " another end"
        if n % 5 == 0:
            text = f"Sign in here\n{text}\ncall +1 (415) 867-5309, u{n}@mail.com"
        if n % 7 == 0:
            text += f"\n{PASSAGE}"
        host = {6: "pornhub.com", 13: "listed.net", 14: "listed.net"}.get(n, "site.example.net")
        rows.append(
            {"id": identity, "url": f"https://{host}/{n % 50}", "fetched_at": WHEN + timedelta(days=n % 4), "source": source,
             "title": None, "text": text}
        )  # fmt: skip
    return rows


def crawl(folder, order):
    """Return two archives with 40 pages and two repeated records, as inputs."""
    members = []
    for n in range(40):
        body = f"<html><title>t{n}</title><main><p>{' '.join(f'word{w}' for w in range(n, n + 90))}</p></main></html>".encode()
        http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + body
        head = (
            f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Date: 2024-01-{n % 28 + 1:02d}T00:00:00Z\r\n"
            f"WARC-Target-URI: https://site.example.net/{n % 33}\r\n"
            f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(http)}\r\n\r\n"
        )
        members.append(gzip.compress(head.encode() + http + b"\r\n\r\n", mtime=0))
    members += members[:2]
    members = [members[n] for n in order]
    folder.mkdir(parents=True)
    (folder / "a.warc.gz").write_bytes(b"".join(members[:13]))
    (folder / "b.warc.gz").write_bytes(b"".join(members[13:]))
    return External.resolve(f"web={folder}")


def lists_of_sites(folder):
    """Return two lists that contain the same domain."""
    for name in ("first", "second"):
        (folder / f"{name}.txt").write_text("listed.net\n")
    return [External.resolve(f"{name}={folder / name}.txt")[0] for name in ("first", "second")]


class World:
    """The inputs of every stage, and the artifacts that the stages make of them with one worker and one large shard."""

    def __init__(self, folder, themed, small_model):
        self.folder, self.store, self.rows = folder, Store.open(folder / "store"), corpus(themed)
        self.documents = self.imported(self.store, self.rows)
        texts = [self.rows[n]["text"][:150] for n in (0, 1)]
        tasks = [
            {"id": "p", "task": f"t{n}", "split": "heldout", "messages": asking(text), "tools": None, "reference": "", "verifier": None}
            for n, text in enumerate(texts)
        ]
        self.prompts = [self.store.import_table("prompts", pa.Table.from_pylist([task])) for task in (*tasks, {**tasks[0], "task": "s"})]
        self.crawl, self.lists = crawl(folder / "crawl", range(42)), lists_of_sites(folder)
        self.old, self.new = (self.imported(self.store, [r for n, r in enumerate(self.rows) if (n % 3 == 0) == late]) for late in (False, True))
        self.model = small_model(self.store, [row["text"] for row in self.rows])
        grades = {f"{kind}_judgement": [float(n % k) * 3 for n in range(72)] for kind, k in (("code", 2), ("reasoning", 3))}
        self.grades = self.store.import_table("signals", pa.table({"id": [row["id"] for row in self.rows], **grades}))
        self.made = {}
        for name in SPECS:
            self.made[name] = self.run(name, self.store)

    @staticmethod
    def imported(store, rows):
        schema = pa.schema([("id", pa.string()), ("url", pa.string()), ("fetched_at", pa.timestamp("us", tz="UTC")),
                            ("source", pa.string()), ("title", pa.string()), ("text", pa.string())])  # fmt: skip
        return store.import_table("documents", pa.Table.from_pylist(rows, schema=schema))

    def run(self, name, store, **how):
        function, config, inputs = SPECS[name]
        return execute(function, config, inputs(self), store, **how)

    def copied(self, store, name):
        """Return the same artifacts in another store, without the one that the stage `name` made."""
        shutil.copytree(self.store.root / "objects", store.root / "objects", dirs_exist_ok=True)
        store.files.remove(self.made[name].place)

        def there(value):
            if isinstance(value, Artifact):
                return Artifact(value.kind, value.key, store.files)
            if isinstance(value, dict):
                return {one: there(item) for one, item in value.items()}
            return [there(item) for item in value] if isinstance(value, list) else value

        other = object.__new__(World)
        other.__dict__.update({one: there(value) for one, value in self.__dict__.items()})
        return other

    def shuffled(self, store, folder):
        """Return the same inputs with rows, files and lists of inputs in another order."""
        other = object.__new__(World)
        order = np.random.default_rng(1).permutation(len(self.rows))
        other.__dict__.update(self.__dict__)
        other.documents = self.imported(store, [self.rows[n] for n in order])
        other.prompts, other.lists = self.prompts[::-1], self.lists[::-1]
        other.crawl = crawl(folder / "crawl", np.random.default_rng(2).permutation(42))
        return other


def _rules(**groups):
    return parse(SelectConfig, {"gopher_repetition": None, "c4": None, "fineweb": None, **groups}, "select")


# Name of the stage → its function, a configuration with which it has work to do, its inputs.
SPECS = {
    "ingest": (ingest, IngestConfig(), lambda w: {"inputs": w.crawl}),
    "extract": (extract, ExtractConfig(), lambda w: {"pages": w.made["ingest"]}),
    "gather": (gather, GatherConfig(sources=("first", "")), lambda w: {"documents": [w.documents, w.old]}),
    "block_lists": (block_lists, BlockListsConfig(), lambda w: {"inputs": w.lists}),
    "url_filter": (url_filter, UrlFilterConfig(), lambda w: {"documents": w.documents, "lists": [w.made["block_lists"]]}),
    "url_dedup": (url_dedup, UrlDedupConfig(), lambda w: {"documents": w.documents}),
    "language": (language, LanguageConfig(), lambda w: {"documents": w.documents}),
    "heuristics": (
        heuristics, HeuristicsConfig(min_language_words=1), lambda w: {"documents": w.documents, "language": w.made["language"]}
    ),
    "train_classifier": (train_classifier, TrainClassifierConfig(**SMALL), lambda w: {"documents": w.documents}),
    "quality": (quality, QualityConfig(), lambda w: {
        "documents": w.documents, "classifier": w.made["train_classifier"], "language": w.made["language"]}),
    "harm": (harm, StageConfig(), lambda w: {"documents": w.documents, "language": w.made["language"]}),
    "classify": (classify, StageConfig(), lambda w: {"documents": w.documents, "classifier": w.made["train_classifier"]}),
    "train_code_reasoning": (
        train_code_reasoning, TrainCodeReasoningConfig(**SMALL), lambda w: {"documents": w.documents, "labels": [w.grades]}
    ),
    "code_reasoning": (
        code_reasoning, StageConfig(), lambda w: {"documents": w.documents, "classifier": w.made["train_code_reasoning"]}
    ),
    "train_domains": (train_domains, TrainDomainsConfig(**SMALL, min_labels=5), lambda w: {"documents": w.documents}),
    "domains": (domains, StageConfig(), lambda w: {"documents": w.documents, "classifier": w.made["train_domains"]}),
    "select": (
        select, _rules(quality={"min_rank": 0.2}),
        lambda w: {"documents": w.documents, "signals": [w.made["heuristics"], w.made["quality"]]},
    ),
    "pii": (pii, PiiConfig(), lambda w: {"documents": w.documents}),
    "minhash_dedup": (minhash_dedup, MinhashDedupConfig(keep_index=True), lambda w: {"documents": w.old}),
    "minhash_update": (minhash_update, StageConfig(), lambda w: {"documents": w.new, "previous": [w.made["minhash_dedup"]]}),
    "line_dedup": (line_dedup, LineDedupConfig(bucket_documents=25, max_occurrences=3, min_documents=0), lambda w: {"documents": w.documents}),
    "substring_dedup": (substring_dedup, SubstringDedupConfig(), lambda w: {"documents": w.documents}),
    "semantic_dedup": (
        semantic_dedup, SemanticDedupConfig(dimensions=128, buckets=65_536, cluster_documents=20), lambda w: {"documents": w.documents}
    ),
    "semantic_dedup by an encoder": (
        semantic_dedup, SemanticDedupConfig(cluster_documents=20, max_tokens=32), lambda w: {"documents": w.documents, "model": w.model}
    ),
    "contamination": (contamination, ContaminationConfig(), lambda w: {
        "documents": [w.documents], "prompts": min(w.prompts, key=lambda one: one.key)}),
    "decontaminate": (decontaminate, DecontaminateConfig(), lambda w: {"documents": w.documents, "prompts": w.prompts}),
    "split": (split, SplitConfig(), lambda w: {"documents": w.documents, "signals": w.made["domains"]}),
    "mix": (mix, MixConfig(), lambda w: {"documents": w.documents, "split": w.made["split"]}),
    "judge": (judge, JudgeConfig(max_tokens=32, prompt="Grade {text}", sample=10, batch_documents=3), lambda w: {
        "documents": w.documents, "model": w.model, "language": w.made["language"]}),
    "train_encoder_quality": (train_encoder_quality, TrainEncoderQualityConfig(max_tokens=32), lambda w: {
        "documents": w.documents, "model": w.model}),
    "encoder_quality": (encoder_quality, StageConfig(), lambda w: {
        "documents": w.documents, "classifier": w.made["train_encoder_quality"], "model": w.model, "language": w.made["language"]}),
}  # fmt: skip
WORKS = {
    "url_filter": "dropped", "url_dedup": "dropped", "select": "dropped", "pii": "scores", "minhash_dedup": "duplicates",
    "minhash_update": "duplicates", "line_dedup": "removed_lines", "substring_dedup": "removed_spans", "semantic_dedup": "duplicates",
    "semantic_dedup by an encoder": "duplicates",
    "decontaminate": "dropped", "ingest": "dropped",
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory, themed, small_model):
    return World(tmp_path_factory.mktemp("world"), themed, small_model)


@pytest.fixture(scope="module")
def pools():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)  # imported once instead of by every worker
    with ProcessPoolExecutor(2, mp_context=context) as two, ProcessPoolExecutor(4, mp_context=context) as four:
        yield {2: two, 4: four}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("case", CASES)
def test_same_bytes(world, pools, tmp_path, name, case):
    how = dict(CASES[case])
    store = Store.open(tmp_path / "store")
    given = world.copied(store, name)
    if case == "other order":
        given = given.shuffled(store, tmp_path)
    made = given.run(name, store, executor=pools.get(how.pop("workers", 1)), **how)
    expected = world.made[name]
    assert made.manifest.files == expected.manifest.files  # one checksum per file
    assert made.manifest.data_digest == expected.manifest.data_digest
    assert made.manifest.metrics == expected.manifest.metrics
    assert made.manifest.figures == expected.manifest.figures


@pytest.mark.parametrize(("name", "table"), WORKS.items())
def test_there_is_something_to_do(world, name, table):
    assert world.made[name].rows(table) > 0


def test_every_stage_is_here():
    found = {value.name for module in MODULES for value in vars(importlib.import_module(module)).values() if isinstance(value, Stage)}
    assert found - {"import_classifier"} <= set(SPECS)  # import_classifier copies a file from outside
