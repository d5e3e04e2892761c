"""Kinds of text in 121 languages: parallel news, each document in every language, so that its English version gives its kind; and the
Universal Declaration of Human Rights in further languages.

`kinds_right_…`: shares of documents in other languages classified as multilingual, and of English ones not so classified. The control is
the knowledge type (`domain`): how often a translation gets the type of its English original, compared with the share of the most common
type.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from collections import Counter
from typing import Any

import zstandard

from puna.stages.contract import StageConfig, execute
from puna.stages.curate.code_reasoning import TrainCodeReasoningConfig, code_reasoning, train_code_reasoning
from puna.stages.curate.domains import TrainDomainsConfig, domains, train_domains
from puna.stages.curate.language import LanguageConfig, language
from puna.stages.pretrain.split import KindsConfig, SplitConfig, split
from puna.storage import Artifact, Store
from tests.benchmarks.pretraining_forecast import DATA
from tests.benchmarks.pretraining_phases import documents


def read(path: str) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    with open(DATA / path, "rb") as raw:
        return [json.loads(line) for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(raw), encoding="utf-8")]


def column(artifact: Artifact, name: str) -> list[Any]:
    return list(artifact.read(columns=["id", name]).sort_by("id")[name].to_pylist())


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the shares of documents whose kind is right, by language, and of those whose knowledge type is that of the English
    original."""
    if not (DATA / "languages").exists() or not (DATA / "web_wcxb_dev").exists():
        return {"skipped": f"{DATA} lacks languages or web_wcxb_dev"}
    declarations = [row for row in read("languages/udhr.jsonl.zst") if row["iso6393"] != "eng"]
    rows = [row for row in read("languages/ntrex_dev.jsonl.zst") if row["language"] != "mya"]  # this language has a separate encoding
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(folder)
        pages = documents(store, [text for row in read("web_wcxb_dev/dev_truth.jsonl.zst") if (text := text_of(row))])
        typed = execute(train_domains, TrainDomainsConfig(), {"documents": pages}, store)
        technical = execute(train_code_reasoning, TrainCodeReasoningConfig(), {"documents": pages}, store)
        texts = ["\n".join(row["sentences"]) for row in rows]
        texts += ["\n".join(line for article in row["articles"] for line in article["p"])[:4000] for row in declarations]
        docs = documents(store, texts)
        languages = execute(language, LanguageConfig(), {"documents": docs}, store)
        scores = execute(code_reasoning, StageConfig(), {"documents": docs, "classifier": technical}, store)
        types = execute(domains, StageConfig(), {"documents": docs, "classifier": typed}, store)
        signals = [types, languages, scores]
        kinds = column(execute(split, SplitConfig(kinds=KindsConfig()), {"documents": docs, "signals": signals}, store), "category")
        type_of = column(types, "domain")
    english = {row["document"]: name for row, name in zip(rows, type_of, strict=False) if row["language"] == "eng"}
    right, same, count = Counter[str](), Counter[str](), Counter[str]()
    for row, kind, name in zip(rows, kinds, type_of, strict=False):
        count[row["language"]] += 1
        right[row["language"]] += (kind == "multilingual") != (row["language"] == "eng")
        same[row["language"]] += name == english[row["document"]]
    shares = sorted((right[name] / count[name], name) for name in count)
    foreign = [name for name in count if name != "eng"]
    # The agreement by chance, because most news have one of few types.
    common = Counter(english.values()).most_common(1)[0][1] / len(english)
    return {
        "kinds_right_declarations": kinds[len(rows) :].count("multilingual") / len(declarations), "kinds_declarations": len(declarations),
        "kinds_right_english": right["eng"] / count["eng"], "kinds_right_others": sum(right[n] for n in foreign) / sum(count[n] for n in foreign),
        "kinds_right_lowest": [[name, round(share, 3)] for share, name in shares[:5]],
        "kinds_right_hindi": right["hin"] / count["hin"], "kinds_right_japanese": right["jpn"] / count["jpn"],
        "types_as_english_hindi": same["hin"] / count["hin"], "types_as_english_japanese": same["jpn"] / count["jpn"],
        "types_as_english_german": same["deu"] / count["deu"], "types_most_common": common, "kinds_languages": len(count),
    }  # fmt: skip


def text_of(row: dict[str, Any]) -> str:
    """Return the text of an annotated page."""
    return str(row["ground_truth"].get("main_content") or "")
