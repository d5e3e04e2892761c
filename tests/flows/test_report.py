"""The report: one page that holds together whatever is in the store, and says what the tables say."""

from __future__ import annotations

import json
import math
import random
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from puna.flows.report import write
from puna.flows.report.funnel import characters_per_token, funnel
from puna.flows.report.run import Run
from puna.storage import Artifact, Identity, InputRecord, PunaError, Store
from puna.storage.schemas import table_schema

EVIL = '</script><script>alert("x")</script><img src=http://evil.example/x onerror=alert(1)> & \x00 \u202e<!-- '
WHEN = datetime(2024, 5, 1, tzinfo=UTC)
RULES = {"select": [("gopher_quality.min_words", 50.0), ("gopher_repetition.top_2gram", 0.2), ("c4.min_sentences", 3.0), ("language.min_score", 0.65)]}


class Built:
    """A store with the artifacts of a run, made without any stage."""

    def __init__(self, root: Path, run: str = "20240501T100000-pipeline-abc123") -> None:
        self.store, self.run, self.random = Store.open(root), run, random.Random(7)
        self.store.record(run, {"event": "started", "flow": "pipeline"})

    def add(self, step: str, stage: str, kind: str, inputs: dict[str, Any] | None = None, *, tables: dict[str, list[dict[str, Any]]] | None = None,
            reused: bool = False, seconds: float = 1.0, **about: Any) -> Artifact:  # fmt: skip
        records = []
        for name, given in (inputs or {}).items():
            for a in given if isinstance(given, list) else [given]:
                external = isinstance(a, str)
                records.append(InputRecord(f"{name}:{a}", "external", f"file:///{a}", "0" * 64) if external
                               else InputRecord(name, a.kind, a.key, a.data_digest, a.manifest.stage))  # fmt: skip
        identity = Identity(stage, "1", {}, {"step": step, "run": self.run}, records)
        with self.store.work(identity.key) as work:
            for name, rows in (tables or {}).items():
                schema = table_schema(name).schema_for(dict.fromkeys(k for row in rows for k in row))
                loose = pa.schema([f.with_nullable(True) for f in schema])
                if rows:
                    work.add(name, pa.Table.from_pylist(rows, schema=loose), "part")
            made = work.commit(kind, identity.key, identity, run=self.run, timings={"seconds": seconds}, peak_memory_bytes=int(4e8 + 1e8 * seconds), **about)
        self.store.record(self.run, {"step": step, "stage": stage, "kind": kind, "key": made.key, "reused": reused, "seconds": 0.01 if reused else seconds})
        return made

    def text(self, words: int) -> str:
        """Random words in lines, some of them hostile."""
        pool = ("grass", "llama", "wind", "stone", "the", "of", "and", "river", "model", "über", "naïve", "data", "a", "altitude", "weaving")
        body = " ".join(self.random.choice(pool) for _ in range(words))
        return body + (EVIL if self.random.random() < 0.2 else "") + "\nShare this page\n" + body[:60]


def documents_of(built: Built, count: int) -> list[dict[str, Any]]:
    hexes = sorted(f"{built.random.getrandbits(128):032x}" for _ in range(count))
    return [
        {"id": i, "url": f"https://site{n % 7}.example/page?q=<{n}>&x='{n}'", "fetched_at": WHEN, "source": ("web", "code", "wikipedia")[n % 3],
         "title": f"{EVIL} {n}" if n % 5 == 0 else f"On llamas, part {n}", "text": built.text(30 + n % 120)}
        for n, i in enumerate(hexes)
    ]  # fmt: skip


def dropping(rows: list[dict[str, Any]], rules: list[tuple[str, float | None]], share: float, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Kept rows and dropped rows, some for each rule."""
    draw, kept, dropped = random.Random(seed), [], []
    for row in rows:
        if draw.random() < share:
            rule, threshold = draw.choice(rules)
            value = None if threshold is None else threshold * draw.random()
            dropped.append({"id": row["id"], "rule": rule, "value": value, "threshold": threshold, "detail": EVIL if draw.random() < 0.3 else None})
        else:
            kept.append(row)
    return kept, dropped


def curated(b: Built) -> dict[str, Artifact]:
    """Pages to documents, with every side table that the report shows."""
    rows = documents_of(b, 420)
    pages = [{k: r[k] for k in ("id", "url", "fetched_at", "source")} | {"content_type": "text/html", "charset": None, "body": f"<p>{r['text']}".encode()} for r in rows]  # fmt: skip
    made: dict[str, Artifact] = {}
    made["prompts"] = b.add("prompts", "prompts", "prompts", tables={"prompts": [
        {"id": f"p{i}", "task": "sum", "split": "heldout", "prompt": f"What is {i} + {i}? {EVIL}", "reference": str(2 * i), "entry": "{}"} for i in range(20)]})  # fmt: skip
    read = b.add("ingest", "ingest", "pages", {"inputs": ["web.warc.gz", "wiki.warc.gz"]}, seconds=3, tables={
        "pages": pages, "dropped": [{"id": "f" * 31 + str(i), "rule": "truncated", "value": None, "threshold": None, "detail": f"web.warc.gz record {i}"} for i in range(3)]})  # fmt: skip
    rows, gone = dropping(rows, [("empty", None), ("not_html", None)], 0.05, 1)
    at = b.add("extract", "extract", "documents", {"pages": read}, tables={"documents": rows, "dropped": gone}, seconds=14)
    chain = (
        ("url_filter", [("adult_domain", None), ("<b>list</b>", None)], 0.04), ("url_dedup", [("older_version", None)], 0.06),
        ("select", RULES["select"], 0.3), ("pii", None, 0), ("minhash_dedup", [("near_duplicate", 0.8)], 0.12), ("line_dedup", None, 0),
    )  # fmt: skip
    for seed, (name, rules, share) in enumerate(chain):
        before = {r["id"]: r for r in rows}
        inputs: dict[str, Any] = {"documents": at}
        if name == "select":
            language = [{"id": r["id"], "language": ("en", "fr", "es", "de")[n % 7 % 4], "language_score": 0.9} for n, r in enumerate(rows)]
            signals = b.add("language", "language", "signals", {"documents": at}, tables={"signals": language}, seconds=2)
            words = [{"id": r["id"], "words": len(r["text"].split())} for r in rows]
            inputs["signals"] = [signals, b.add("heuristics", "heuristics", "signals", {"documents": at}, tables={"signals": words}, seconds=9)]
        gone = []
        if rules:
            rows, gone = dropping(rows, rules, share, seed + 2)  # type: ignore[arg-type]
        else:
            rows = [r | {"text": r["text"].replace("Share this page\n", "")} if name == "line_dedup" else r for r in rows]
        tables = {"documents": rows, "dropped": gone}
        if name == "minhash_dedup":
            kept = rows[0]["id"]
            tables["duplicates"] = [{"id": g["id"], "kept_id": kept, "method": "minhash, verified", "similarity": 0.8 + 0.19 * n / len(gone), "cluster": kept} for n, g in enumerate(gone)]  # fmt: skip
        if name == "line_dedup":
            tables["removed_lines"] = [{"id": i, "line": 3, "text": "Share this page", "rule": "frequent_line", "value": 312.0} for i in before]
        if name == "pii":
            tables["examples"] = [{"id": "e1", "kind": "email", "prompt": None, "text": f"write to |||EMAIL||| {EVIL}", "detail": "1 masked"}]
        at = b.add(name, name, "documents", inputs, tables=tables, seconds=4 + seed)
    quality = [{"id": r["id"], "quality": b.random.random()} for r in rows]
    domain = [{"id": r["id"], "domain": ("science", "code", "news", EVIL)[n % 9 % 4], "domain_score": 0.7} for n, r in enumerate(rows)]
    histogram = {"title": "Quality", "x": "probability", "y": "share", "kind": "bar", "series": {"web": [[i / 10, math.exp(-i / 3)] for i in range(10)]}}
    score = b.add("quality", "quality", "signals", {"documents": at}, tables={"signals": quality}, seconds=6, figures={"scores": histogram})
    made["domains"] = b.add("domains", "domains", "signals", {"documents": at}, tables={"signals": domain}, seconds=5)
    rows, gone = dropping(rows, [("quality.min", 0.3)], 0.2, 20)
    at = b.add("select_model", "select", "documents", {"documents": at, "signals": [score, made["domains"]]}, tables={"documents": rows, "dropped": gone})
    rows, gone = dropping(rows, [("contaminated", 0.5)], 0.02, 21)
    at = b.add("decontaminate", "decontaminate", "documents", {"documents": at, "prompts": [made["prompts"]]}, tables={"documents": rows, "dropped": gone})
    return made | {"documents": at}


def log_of(steps: int, seed: int, **columns: float) -> dict[str, list[dict[str, Any]]]:
    draw = random.Random(seed)
    return {"training_log": [
        {"step": s, "loss": 2 + 5 / math.sqrt(s) + 0.2 * draw.gauss(0, 1), "learning_rate": 1e-3 * min(1, s / 20), "gradient_norm": 1.0 + draw.random(),
         "tokens": 4096, **{n: v * s / steps + 0.1 * draw.gauss(0, 1) for n, v in columns.items()}} for s in range(1, steps + 1)
    ]}  # fmt: skip


def pretrained(b: Built, c: dict[str, Artifact]) -> Artifact:
    """Tokenizer to base model, with the experiments before it."""
    documents = c["documents"].read(columns=["id", "text"]).to_pylist()
    vocabulary = b.add("tokenizer", "tokenizer", "tokenizer", {"documents": c["documents"]}, seconds=3, metrics={"vocab_size": 4096})
    bars = {"title": "Weights", "x": "type", "y": "weight", "kind": "bar", "series": {n: [["science", 0.5], ["code", v], ["news", 0.1]] for n, v in (("natural", 0.3), ("fitted", 0.2))}}
    weights = b.add("mix_experiment", "mix_experiment", "evaluation", {"documents": c["documents"], "signals": c["domains"], "tokenizer": vocabulary},
                    seconds=40, figures={"weights": bars}, tables={"weights": [{"category": "science", "weight": 0.5}, {"category": "code", "weight": 0.5}]})  # fmt: skip
    mixture = b.add("mix", "mix", "mixture", {"documents": c["documents"], "signals": c["domains"], "weights": weights}, tables={"mixture": [
        {"id": d["id"], "category": ("science", "code", "news")[n % 3], "split": "heldout" if n % 10 == 0 else "train", "repeats": 1 + n % 2, "weight": (0.5, 0.3, 0.2)[n % 3]}
        for n, d in enumerate(documents)]})  # fmt: skip
    packed = []
    for n, d in enumerate(documents):
        if n % 10:
            packed += [{"row": 2 * n + k, "tokens": [1] * 8, "lengths": [len(d["text"]) // 4], "documents": [d["id"]]} for k in range(1 + n % 2)]
    tokens = b.add("tokenize", "tokenize", "tokens", {"documents": c["documents"], "mixture": mixture, "tokenizer": vocabulary},
                   tables={"tokens": packed}, metrics={"tokens": sum(r["lengths"][0] for r in packed)}, seconds=4)  # fmt: skip
    flops = [10.0 ** (12 + k / 8) for k in range(33)]
    law = {"title": "Loss against compute", "x": "operations", "y": "nats per token", "kind": "scatter", "note": "Predicted before it was made.",
           "series": {"law": [[f, 2 + 40 * f**-0.12] for f in flops], "small runs": [[f, 2.02 + 40 * f**-0.12] for f in flops[:20:4]], "predicted": [[1e16, 2.5]]}}  # fmt: skip
    b.add("scaling_law", "scaling_law", "evaluation", {"tokens": tokens, "tokenizer": vocabulary}, seconds=50, figures={"law": law},
          metrics={"predicted_loss": 2.48, "exponent": 0.12}, tables={"evaluation": [{"task": "law", "metric": "floor", "value": 2.0, "low": None, "high": None, "n": 5}]})  # fmt: skip
    curve = {"title": "Pretraining loss", "x": "tokens", "y": "nats per token", "kind": "line",
             "series": {"training": [[4096 * s, 2 + 5 / math.sqrt(s)] for s in range(1, 300)], "set aside": [[4096 * s, 2.1 + 5 / math.sqrt(s)] for s in range(20, 300, 40)]}}  # fmt: skip
    base = b.add("pretrain", "pretrain", "model", {"tokens": tokens, "tokenizer": vocabulary}, tables=log_of(300, 3), figures={"loss": curve}, seconds=140,
                 metrics={"parameters": 1_900_000, "validation_loss": 2.41})  # fmt: skip
    judge(b, "evaluate_base", base, c["prompts"], 0.02, {"documents": c["documents"], "mixture": mixture})
    return base


def judge(b: Built, step: str, model: Artifact, prompts: Artifact, accuracy: float, more: dict[str, Artifact] | None = None) -> None:
    rows = []
    for n, task in enumerate(("all", "sum", "sort", EVIL)):
        value = min(1.0, accuracy * (1 + 0.1 * n))
        rows += [{"task": task, "metric": m, "value": value, "low": max(0.0, value - 0.04), "high": min(1.0, value + 0.04), "n": 300 if n == 0 else 100} for m in ("accuracy", "score")]
    asked = prompts.read().to_pylist()[:10]
    shown = [{"id": f"prompt-{p['id']}", "kind": "answer", "prompt": p["prompt"], "text": p["reference"] if b.random.random() < accuracy else EVIL,
              "detail": json.dumps({"task": p["task"], "reference": p["reference"], "score": float(b.random.random() < accuracy)})} for p in asked]  # fmt: skip
    if more:
        rows += [{"task": t, "metric": m, "value": v, "low": v - 0.05, "high": v + 0.05, "n": 40}
                 for t in ("pages", "pages/code") for m, v in (("bits_per_byte", 1.9 if t == "pages" else 1.5), ("gzip_bits_per_byte", 2.7))]  # fmt: skip
        shown.append({"id": "page-1", "kind": "continuation", "prompt": "On the puna", "text": EVIL, "detail": json.dumps({"category": "news", "page": "lived a llama"})})
    b.add(step, "evaluate", "evaluation", {"model": model, **(more or {}), "prompts": prompts}, tables={"evaluation": rows, "examples": shown}, seconds=8)


def aligned(b: Built, c: dict[str, Artifact], base: Artifact, rounds: int = 2) -> None:
    """Supervised finetuning and rounds."""
    gold = b.add("instructions", "instructions", "instructions", {"prompts": c["prompts"]}, tables={"instructions": [
        {"id": "i1", "prompt_id": "p1", "task": "sum", "prompt": "1+1", "response": "2", "source": "gold", "score": None}]})  # fmt: skip
    policy = b.add("sft_first", "sft", "model", {"model": base, "instructions": [gold]}, tables=log_of(120, 4), seconds=30)
    other = b.add("sft_lora", "sft", "model", {"model": policy, "instructions": [gold]}, tables=log_of(60, 5), seconds=20, reused=True)
    judge(b, "evaluate_sft", policy, c["prompts"], 0.34)
    data, pairs = [gold], []
    for r in range(1, rounds + 1):
        tasks = b.add(f"prompts_{r}", "prompts", "prompts", tables={"prompts": []})
        answers = b.add(f"sample_{r}", "sample", "answers", {"models": [policy, other], "prompts": tasks}, seconds=22, tables={"answers": [
            {"id": f"a{m.key[:4]}{i}", "prompt_id": f"p{i % 9}", "sample": i, "model": m.key, "text": EVIL, "tokens": [1], "logprobs": [-0.1], "finished": True,
             "score": None, "gold": float(b.random.random() < 0.3 + 0.1 * r + 0.1 * k)} for k, m in enumerate((policy, other)) for i in range(80)]})  # fmt: skip
        fallen = [{"id": f"x{i}", "rule": "similar", "value": 0.01 * i, "threshold": 0.05, "detail": f"{EVIL!r} / 'four'"} for i in range(5)]
        pairs.append(b.add(f"preferences_{r}", "preferences", "preferences", {"answers": answers, "prompts": tasks}, tables={"dropped": fallen, "preferences": [
            {"id": f"q{i}", "prompt_id": "p1", "task": "sum", "split": "train", "prompt": EVIL, "chosen": "4", "rejected": "5", "edited": None, "level": "better", "margin": 0.5,
             "chosen_model": policy.key, "rejected_model": other.key} for i in range(11)]}))  # fmt: skip
        reward = b.add(f"reward_model_{r}", "reward_model", "model", {"model": policy, "preferences": list(pairs)}, tables=log_of(90, 6, accuracy=0.9), seconds=18,
                       metrics={"heldout_accuracy": 0.78 + 0.03 * r, "train_accuracy": 0.88, "heldout_pairs": 200})  # fmt: skip
        best = b.add(f"rejection_sample_{r}", "rejection_sample", "instructions", {"answers": answers, "reward_model": reward, "prompts": tasks}, seconds=5, tables={
            "instructions": [{"id": f"j{i}", "prompt_id": f"p{i}", "task": "sum", "prompt": EVIL, "response": EVIL, "source": "best", "score": 1.0} for i in range(9)],
            "scores": [{"id": a, "name": "reward", "value": r + b.random.gauss(0, 1)} for a in answers.read(columns=["id"])["id"].to_pylist()]})  # fmt: skip
        kept, gone = dropping(best.read().to_pylist(), [("low_reward", 0.5), ("repeated", None)], 0.4, 40 + r)
        data.append(b.add(f"data_quality_{r}", "data_quality", "instructions", {"instructions": best, "model": policy}, tables={"instructions": kept, "dropped": gone}))
        tuned = b.add(f"sft_{r}", "sft", "model", {"model": policy, "instructions": list(data)}, tables=log_of(100, 7), seconds=25)
        best_of = b.add(f"dpo_{r}", "dpo", "model", {"model": tuned, "preferences": pairs[-1]}, tables=log_of(70, 8, margin=3, accuracy=0.9), seconds=21)
        models = [tuned, best_of]
        if r == rounds:
            models = [best_of, b.add(f"ppo_{r}", "ppo", "model", {"policy": best_of, "reward_model": reward, "prompts": tasks}, tables=log_of(30, 9, reward=2), seconds=33)]
        policy, other = b.add(f"average_{r}", "average", "model", {"models": models}), tuned
        judge(b, f"evaluate_round_{r}", policy, c["prompts"], 0.34 + 0.2 * r)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return everything(tmp_path_factory.mktemp("store"))


def everything(root: Path) -> Built:
    b = Built(root)
    c = curated(b)
    aligned(b, c, pretrained(b, c))
    b.store.record(b.run, {"event": "finished"})
    return b
