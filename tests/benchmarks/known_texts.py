"""Texts on which `alignment_known.py` measures forgetting: WikiText-2, last words of novels, continuations of WikiText articles."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

import alignment_smollm2 as smollm2  # the benchmark beside this one

from puna.stages.contract import External
from puna.stages.evaluation.benchmark import benchmark
from puna.stages.evaluation.evaluate import evaluate
from puna.stages.io.imports import import_documents
from puna.storage import Artifact

LAST_WORDS, CONTINUATIONS = 100, 40
CHARACTERS = 600
"""Length of the beginnings of WikiText's articles, each of which gives one question."""
SEED = 541


class Texts:
    """Texts on which forgetting is measured."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        misc = bench.data / "text_misc"
        articles = smollm2.articles_of(misc / "wikitext2_valid.txt")
        beginnings = [row | {"text": row["text"][:CHARACTERS]} for row in articles]
        self.articles = bench.rows(import_documents, "wikitext", beginnings)
        folder = bench.folder / "lambada"
        folder.mkdir(exist_ok=True)
        rows = last_words((misc / "tinystories_248k.txt").read_text(encoding="utf-8"), LAST_WORDS)
        (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        task = {"task": "last_word", "dataset_path": "json", "test_split": "test", "dataset_kwargs": {"data_files": {"test": "test.jsonl"}},
                "output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "choices", "doc_to_target": "target",
                "metric_list": [{"metric": "acc"}]}  # fmt: skip
        (folder / "task.yaml").write_text(json.dumps(task), encoding="utf-8")
        (self.task,) = External.resolve(str(folder))

    def measured(self, model: Artifact) -> dict[str, float]:
        """Return the perplexity on beginnings of WikiText, and the shares of right words and right continuations."""
        pages = {"questions": CONTINUATIONS, "continuations": 0, "max_bytes": 24_000, "prompt_words": 40, "option_words": 12}
        read = self.bench.make(evaluate, {"pages": pages}, {"model": model, "documents": self.articles}).read().to_pylist()
        words = self.bench.make(benchmark, {}, {"model": model, "tasks": [self.task]}).read().to_pylist()
        value = {(row["task"], row["metric"]): float(row["value"]) for row in [*read, *words]}
        return {"wikitext_perplexity": math.exp(value["pages", "nats_per_token"]), "continuations": value["choice", "accuracy_per_byte"],
                "last_words": value["last_word", "acc"]}  # fmt: skip


def last_words(text: str, count: int) -> list[dict[str, Any]]:
    """Return passages of whole sentences, 40 to 60 words long, without their last word, which occurs earlier in the passage. The choices are
    this word and the last words of three other passages."""
    words, passages, start = text.split(), [], 0
    while start < len(words):
        ends = [at for at in range(start + 40, min(start + 60, len(words))) if words[at][-1] == "." and words[at][:-1].isalpha()]
        said = {one.strip('.,;"!?').lower() for one in words[start : start + 40]}
        at = next((at for at in ends if words[at][:-1].lower() in said), None)
        if at is not None:
            passages.append((" ".join(words[start:at]), words[at][:-1]))
        start = next((place + 1 for place in range(start if at is None else at, len(words)) if words[place][-1] == "."), len(words))
    random, rows = Random(SEED), list[dict[str, Any]]()
    for context, word in random.sample(passages, min(count, len(passages))):
        others = sorted({other for _, other in passages if other.lower() != word.lower()})
        choices = random.sample(others, 3)
        target = random.randrange(4)
        rows.append({"context": context, "choices": [*choices[:target], word, *choices[target:]], "target": target})
    return rows


def worse(model: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Return how much worse the model reads each text, relative to the original model; below 0: better."""
    fallen = {name: 1 - model[name] / before[name] for name in ("continuations", "last_words")}
    return {"wikitext_perplexity": model["wikitext_perplexity"] / before["wikitext_perplexity"] - 1, **fallen}
