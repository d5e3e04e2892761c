"""A store with the artifacts of a whole run, built without running any stage; its texts are hostile."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from puna.stages.conversations import answering, asking, dump, messages_of, text_of
from puna.storage import Artifact, Identity, InputRecord, Store
from puna.storage.schemas import table_schema

EVIL = '</script><script>alert("x")</script><img src=http://evil.example/x onerror=alert(1)> & \x00 \u202e<!-- '
POOL = ["grass", "llama", "wind", "stone", "the", "of", "and", "river", "model", "über", "naïve", "data", "a", "altitude", "weaving"]
NAV = "Share this page\n"
KINDS = {
    "prompts": "prompts", "ingest": "pages", "language": "signals", "heuristics": "signals", "quality": "signals", "domains": "signals",
    "tokenizer": "tokenizer", "split": "mixture", "mix": "mixture", "tokenize": "tokens", "mix_experiment": "evaluation", "law": "evaluation",
    "evaluate": "evaluation", "instructions": "instructions", "rejection_sample": "instructions", "data_quality": "instructions",
    "sample": "answers", "preferences": "preferences", "pretrain": "model", "sft": "model", "dpo": "model", "ppo": "model",
    "reward_model": "model", "average": "model",
}  # fmt: skip
Rows = list[dict[str, Any]]


def rows(columns: str, values: Iterable[tuple[Any, ...]]) -> Rows:
    """Return the rows of a table from tuples."""
    return [dict(zip(columns.split(), row, strict=True)) for row in values]


def figure(title: str, x: str, y: str, kind: str, **series: list[tuple[Any, float]]) -> dict[str, Any]:
    return {"title": title, "x": x, "y": y, "kind": kind, "note": "", "lines": {"floor": 0.1}, "series": series}


class Built:
    """A store with a run under construction; `add` records a step."""

    def __init__(self, root: Path, run: str = "20240501T100000-pipeline-abc123") -> None:
        self.store, self.run, self.random = Store.open(root), run, random.Random(7)
        self.at: dict[str, Artifact] = {}
        self.store.record(run, {"event": "started", "flow": "pipeline"})

    def add(
        self, step: str, given: dict[str, Any] | None = None, stage: str = "", seconds: float = 1.0, reused: bool = False, **made: Any
    ) -> Artifact:
        """Return a step's artifact, added to the run. `given`: artifacts, lists of them or names of files; `made`: rows of tables, metrics,
        figures."""
        stage = stage or step.rstrip("_0123456789")
        kind = KINDS.get(stage, "documents")
        about = {name: made.pop(name) for name in ("metrics", "figures") if name in made}
        records = []
        for name, values in (given or {}).items():
            for a in values if isinstance(values, list) else [values]:
                outside = InputRecord(f"{name}:{a}", "external", f"file:///{a}", "0" * 64)
                records.append(outside if isinstance(a, str) else InputRecord(name, a.kind, a.key, a.data_digest, a.manifest.stage))
        identity = Identity(stage, "1", {}, {"step": step, "run": self.run}, records)
        with self.store.work(identity.key) as work:
            for name, table in made.items():
                schema = table_schema(name).schema_for(pa.Table.from_pylist(table).schema)
                loose = pa.schema([f.with_nullable(True) for f in schema])
                if table:
                    work.add(name, pa.Table.from_pylist(table, schema=loose), "part")
            if kind == "model":
                # Each model has distinct content, because answers refer to their model by it.
                (work.output / "config.json").write_text(json.dumps({"step": step}))
            about |= {"run": self.run, "timings": {"seconds": seconds}, "peak_memory_bytes": int(4e8 + 1e8 * seconds)}
            artifact = work.commit(kind, identity.key, identity, **about)
        event = {"step": step, "stage": stage, "kind": kind, "key": artifact.key, "reused": reused}
        self.store.record(self.run, {**event, "seconds": 0.01 if reused else seconds})
        self.at[step] = artifact
        return artifact

    def filtered(self, step: str, table: Rows, rules: dict[str, float | None], share: float, **made: Any) -> Rows:
        """Add a step on `documents` that drops a share of the rows by its rules; return the rows that it keeps."""
        draw, kept, dropped = random.Random(step), [], []
        for row in table:
            if draw.random() < share:
                rule, threshold = draw.choice(list(rules.items()))
                value = None if threshold is None else threshold * draw.random()
                dropped.append((row["id"], rule, value, threshold, EVIL if draw.random() < 0.3 else None))
            else:
                kept.append(row)
        gone = rows("id rule value threshold detail", dropped)
        if "duplicates" in made:
            found = [(g["id"], kept[0]["id"], "minhash, verified", 0.8 + 0.19 * n / len(gone), kept[0]["id"]) for n, g in enumerate(gone)]
            made["duplicates"] = rows("id kept_id method similarity cluster", found)
        self.documents(step, kept, dropped=gone, **made)
        return kept

    def documents(self, step: str, table: Rows, **made: Any) -> None:
        """Add a step that turns the current documents into `table`."""
        given = made.pop("given", None) or {"documents": self.at["documents"]}
        self.at["documents"] = self.at[step] = self.add(step, given, documents=table, **made)

    def text(self, words: int) -> str:
        """Return random words, some of them hostile."""
        body = " ".join(self.random.choice(POOL) for _ in range(words))
        return body + (EVIL if self.random.random() < 0.2 else "") + "\n" + NAV + body[:60]


def curated(b: Built) -> None:
    """Add the steps from pages to documents, with every side table that the report shows."""
    asked = [(f"p{i:02}", "sum", "heldout", asking(f"What is {i} + {i}? {EVIL}"), str(2 * i), None) for i in range(20)]
    b.add("prompts", prompts=rows("id task split messages reference verifier", asked))
    when, texts = datetime(2024, 5, 1, tzinfo=UTC), []
    for n in range(420):
        title = f"{EVIL} {n}" if n % 5 == 0 else f"On llamas, part {n}"
        url = f"https://site{n % 7}.example/page?q=<{n}>&x='{n}'"
        texts.append((f"{b.random.getrandbits(128):032x}", url, when, ("web", "code", "wikipedia")[n % 3], title, b.text(30 + n % 120)))
    table = sorted(rows("id url fetched_at source title text", texts), key=lambda row: row["id"])
    pages = [
        {k: r[k] for k in ("id", "url", "fetched_at", "source")}
        | {"content_type": "text/html", "charset": None, "body": r["text"].encode()}
        for r in table
    ]
    broken = rows("id rule value threshold detail", [(f"{i:032x}", "truncated", None, None, f"record {i}") for i in range(3)])
    read = b.add("ingest", {"inputs": ["web.warc.gz", "wiki.warc.gz"]}, seconds=3, pages=pages, dropped=broken)
    table = b.filtered("extract", table, {"empty": None, "not_html": None}, 0.05, seconds=14, given={"pages": read})
    table = b.filtered("url_filter", table, {"adult_domain": None, "<b>list</b>": None}, 0.04, seconds=4)
    table = b.filtered("url_dedup", table, {"older_version": None}, 0.06)
    words = [{"id": r["id"], "words": len(r["text"].split())} for r in table]
    languages = [{"id": r["id"], "language": ("en", "fr", "es", "de")[n % 7 % 4], "language_score": 0.9} for n, r in enumerate(table)]
    before = b.at["documents"]
    scores = [
        b.add("language", {"documents": before}, signals=languages),
        b.add("heuristics", {"documents": before}, signals=words, seconds=9),
    ]
    rules = {"gopher_quality.min_words": 50.0, "gopher_repetition.top_2gram": 0.2, "c4.min_sentences": 3.0, "language.min_score": 0.65}
    table = b.filtered("select", table, rules, 0.3, given={"documents": before, "signals": scores})
    b.documents(
        "pii", table, examples=rows("id kind prompt text detail", [("e1", "email", None, f"write to |||EMAIL||| {EVIL}", "1 masked")])
    )
    table = b.filtered("minhash_dedup", table, {"near_duplicate": 0.8}, 0.12, duplicates=[])
    lines = rows("id line text rule value", [(r["id"], 3, NAV.strip(), "frequent_line", 312.0) for r in table])
    table = [r | {"text": r["text"].replace(NAV, "")} for r in table]
    b.documents("line_dedup", table, removed_lines=lines)
    before = b.at["documents"]
    bars = figure("Quality scores", "probability", "share", "bar", web=[(i / 10, math.exp(-i / 3)) for i in range(10)])
    quality = [{"id": r["id"], "quality": b.random.random()} for r in table]
    domain = [{"id": r["id"], "domain": ("science", "code", "news", EVIL)[n % 9 % 4], "domain_score": 0.7} for n, r in enumerate(table)]
    b.add("quality", {"documents": before}, signals=quality, figures={"scores": bars}, seconds=6)
    b.add("domains", {"documents": before}, signals=domain, seconds=5)
    given = {"documents": before, "signals": [b.at["quality"], b.at["domains"]]}
    table = b.filtered("select_model", table, {"quality.min": 0.3}, 0.2, stage="select", given=given)
    b.filtered("decontaminate", table, {"contaminated": 0.5}, 0.02, given={"documents": b.at["documents"], "prompts": b.at["prompts"]})


def log_of(steps: int, **columns: float) -> Rows:
    """Return a training log whose loss falls, with noise."""
    draw, found = random.Random(steps), []
    for s in range(1, steps + 1):
        more = {name: value * s / steps + 0.1 * draw.gauss(0, 1) for name, value in columns.items()}
        loss = 2 + 5 / math.sqrt(s) + 0.2 * draw.gauss(0, 1)
        found.append(
            {"step": s, "loss": loss, "learning_rate": min(1e-3, 5e-5 * s), "gradient_norm": 1 + draw.random(), "tokens": 4096, **more}
        )
    return found


def pretrained(b: Built) -> None:
    """Add the steps from tokenizer to base model, and the experiments before them."""
    documents, domains = b.at["documents"], b.at["domains"]
    texts = documents.read(columns=["id", "text"]).to_pylist()
    types = ("science", "code", "news")
    sides = [(d["id"], types[n % 3], "train" if n % 10 else "heldout", 1, 1 / 3) for n, d in enumerate(texts)]
    split = b.add("split", {"documents": documents, "signals": domains}, mixture=rows("id category split repeats weight", sides))
    vocabulary = b.add("tokenizer", {"documents": documents, "mixture": split}, seconds=3, metrics={"vocab_size": 4096})
    given = {"documents": documents, "split": split, "tokenizer": vocabulary}
    bars = figure(
        "Weights", "type", "weight", "bar", natural=[(t, 0.3) for t in types], fitted=[(t, 0.2 + 0.1 * n) for n, t in enumerate(types)]
    )
    shares = rows("category weight", [(t, 0.3) for t in types])
    weights = b.add("mix_experiment", given, seconds=40, figures={"weights": bars}, weights=shares)
    mixed = [(d["id"], types[n % 3], "train" if n % 10 else "heldout", 1 + n % 2, (0.5, 0.3, 0.2)[n % 3]) for n, d in enumerate(texts)]
    given = {"documents": documents, "split": split, "weights": weights}
    mixture = b.add("mix", given, mixture=rows("id category split repeats weight", mixed))
    packed = [(2 * n + k, [1] * 8, [len(d["text"]) // 4], [d["id"]]) for n, d in enumerate(texts) if n % 10 for k in range(1 + n % 2)]
    given = {"documents": documents, "mixture": mixture, "tokenizer": vocabulary}
    count = sum(row[2][0] for row in packed)
    tokens = b.add("tokenize", given, tokens=rows("row tokens lengths documents", packed), metrics={"tokens": count}, seconds=4)
    flops = [10.0 ** (12 + k / 8) for k in range(33)]
    law = figure("Loss against compute", "operations", "nats per token", "scatter", law=[(f, 2 + 40 * f**-0.12) for f in flops],
                 runs=[(f, 2.02 + 40 * f**-0.12) for f in flops[:20:4]], predicted=[(1e16, 2.5)])  # fmt: skip
    given = {"tokens": tokens, "tokenizer": vocabulary}
    found = rows("task metric value low high n", [("law", "floor", 2.0, None, None, 5)])
    b.add("law", given, seconds=50, figures={"law": law}, metrics={"floor": 2.0}, evaluation=found)
    curve = figure(
        "Pretraining loss", "tokens", "nats per token", "line", training=[(4096.0 * s, 2 + 5 / math.sqrt(s)) for s in range(1, 300)]
    )
    metrics = {"parameters": 1_900_000, "validation_loss": 2.41}
    base = b.add("pretrain", given, training_log=log_of(300), figures={"loss": curve}, seconds=140, metrics=metrics)
    judge(b, "evaluate_base", base, 0.02, {"documents": documents, "mixture": mixture})


def judge(b: Built, step: str, model: Artifact, accuracy: float, more: dict[str, Artifact] | None = None) -> None:
    """Add an evaluation; with documents (`more`), also bits per byte."""
    found = []
    for n, task in enumerate(("all", "sum", "sort", EVIL)):
        value = min(1.0, accuracy * (1 + 0.1 * n))
        found += [(task, m, value, max(0.0, value - 0.04), min(1.0, value + 0.04), 100 if n else 300) for m in ("accuracy", "score")]
    shown = []
    for p in b.at["prompts"].read().to_pylist()[:10]:
        right = b.random.random() < accuracy
        detail = json.dumps({"task": p["task"], "reference": p["reference"], "score": float(right)})
        shown.append((f"prompt-{p['id']}", "answer", text_of(messages_of(p)), p["reference"] if right else EVIL, detail))
    if more:
        for task, bits in (("pages", 1.9), ("pages/code", 1.5)):
            found += [
                (task, metric, value, value - 0.05, value + 0.05, 40)
                for metric, value in (("document_bits_per_byte", bits), ("ngram_bits_per_byte", 2.7))
            ]
        shown.append(("page-1", "continuation", "On the puna", EVIL, json.dumps({"category": "news", "page": "lived a llama"})))
    tables = {"evaluation": rows("task metric value low high n", found), "examples": rows("id kind prompt text detail", shown)}
    b.add(step, {"model": model, **(more or {}), "prompts": b.at["prompts"]}, stage="evaluate", seconds=8, **tables)


def said(question: str, answer: str) -> str:
    """Return a conversation of two turns."""
    return dump([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def aligned(b: Built, rounds: int = 2) -> None:
    """Add supervised finetuning, then rounds."""
    instruction = "id prompt_id task split messages source score"
    gold = b.add(
        "instructions", {"prompts": b.at["prompts"]}, instructions=rows(instruction, [("i1", "p01", "sum", "train", said("1+1", "2"), "gold", None)])
    )
    policy = b.add("sft_first", {"model": b.at["pretrain"], "instructions": [gold]}, "sft", 30, training_log=log_of(120))
    other = b.add("sft_lora", {"model": policy, "instructions": [gold]}, "sft", 20, reused=True, training_log=log_of(60))
    judge(b, "evaluate_sft", policy, 0.34)
    data, pairs = [gold], []
    for r in range(1, rounds + 1):
        tasks = b.add(f"prompts_{r}", prompts=[])
        drawn = [
            (f"a{m.data_digest[:4]}{i}", f"p{i % 9}", i, m.data_digest, EVIL, [1], [-0.1], True, None, float(b.random.random() < 0.3 + 0.1 * r))
            for m in (policy, other) for i in range(80)
        ]  # fmt: skip
        answers = rows("id prompt_id sample model text tokens logprobs finished score gold", drawn)
        drawn_by = b.add(f"sample_{r}", {"models": [policy, other], "prompts": tasks}, seconds=22, answers=answers)
        gone = rows("id rule value threshold detail", [(f"x{i}", "similar", 0.01 * i, 0.05, EVIL) for i in range(5)])
        kept = [(f"q{i}", "p1", "sum", "train", asking(EVIL), answering("4"), answering("5"), None, "better", 0.5, policy.data_digest, other.data_digest) for i in range(11)]
        columns = "id prompt_id task split messages chosen rejected edited level margin chosen_model rejected_model"
        pairs.append(b.add(f"preferences_{r}", {"answers": drawn_by, "prompts": tasks}, preferences=rows(columns, kept), dropped=gone))
        metrics = {"heldout_accuracy": 0.78 + 0.03 * r, "train_accuracy": 0.88, "heldout_pairs": 200}
        given = {"model": policy, "preferences": list(pairs)}
        reward = b.add(f"reward_model_{r}", given, seconds=18, training_log=log_of(90, accuracy=0.9), metrics=metrics)
        best = rows(instruction, [(f"j{i}", f"p{i}", "sum", "train", said(EVIL, EVIL), "best", 1.0) for i in range(9)])
        scores = rows("id name value", [(a["id"], "reward", r + b.random.gauss(0, 1)) for a in answers])
        given = {"answers": drawn_by, "reward_model": reward, "prompts": tasks}
        picked = b.add(f"rejection_sample_{r}", given, instructions=best, scores=scores)
        gone = rows("id rule value threshold detail", [(best[i]["id"], "low_reward", 0.1 * i, 0.5, None) for i in range(4)])
        data.append(b.add(f"data_quality_{r}", {"instructions": picked, "model": policy}, instructions=best[4:], dropped=gone))
        tuned = b.add(f"sft_{r}", {"model": policy, "instructions": list(data)}, seconds=25, training_log=log_of(100))
        preferred = b.add(
            f"dpo_{r}", {"model": tuned, "preferences": pairs[-1]}, seconds=21, training_log=log_of(70, margin=3, accuracy=0.9)
        )
        models = [tuned, preferred]
        if r == rounds:
            given = {"policy": preferred, "reward_model": reward, "prompts": tasks}
            models = [preferred, b.add(f"ppo_{r}", given, seconds=33, training_log=log_of(30, reward=2))]
        policy, other = b.add(f"average_{r}", {"models": models}), tuned
        judge(b, f"evaluate_round_{r}", policy, 0.34 + 0.2 * r)


def everything(root: Path) -> Built:
    """Return a finished run of 47 steps."""
    b = Built(root)
    curated(b)
    pretrained(b)
    aligned(b)
    b.store.record(b.run, {"event": "finished"})
    return b


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return everything(tmp_path_factory.mktemp("store"))
