"""Kinds of text in 121 languages: parallel news, each document in every language, so that its English version gives its kind; and the
Universal Declaration of Human Rights in further languages.

`kinds_right_…`: shares of documents in other languages classified as multilingual, and of English ones not so classified. The control is
the knowledge type (`domain`): how often a translation gets the type of its English original, compared with the share of the most common
type.

`kinds_of_pages_…`: news in twelve languages as they are, with code of MBPP or with paragraphs of formulas (arXiv) between their sentences,
and worked problems: of GSM8K's second half, which chose nothing, as they are and without marks such as <<48/2=24>>; and of
reasoning-gym's generator. The figure is the share whose kind is right. Code is code in any language, formulas are mathematics in English
and multilingual elsewhere, as the language signal has it. The controls are the most common kind, and the kinds without `min_formulas`.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import tempfile
from collections import Counter
from typing import Any

import zstandard
from reasoning_gym import create_dataset

from puna.stages.contract import StageConfig, execute
from puna.stages.curate.code_reasoning import TrainCodeReasoningConfig, code_reasoning, train_code_reasoning
from puna.stages.curate.domains import TrainDomainsConfig, domains, train_domains
from puna.stages.curate.language import LanguageConfig, language
from puna.stages.pretrain.split import KindsConfig, SplitConfig, split
from puna.storage import Artifact, Store
from tests.benchmarks.pretraining_forecast import DATA
from tests.benchmarks.pretraining_phases import documents, lines


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


LANGUAGES = ("eng", "hin", "jpn", "swa", "deu", "rus", "arb", "zho-CN", "kor", "fra", "vie", "tur")


def mixed_pages(draw: random.Random) -> list[tuple[str, str, str]]:
    """Return (language, content, text) of news as they are, news with code, news with formulas, and worked problems."""
    code = lines(DATA / "mbpp" / "mbpp.jsonl", "code")
    papers = [part for text in lines(DATA / "text_misc" / "dj_arxiv.jsonl", "text") for part in text.split("\n\n")]
    formulas = [part for part in papers if part.count("$") >= 4 and 80 < len(part) < 700]
    pages = []
    for row in read("languages/ntrex_dev.jsonl.zst"):
        if row["language"] not in LANGUAGES:
            continue
        groups = [" ".join(row["sentences"][i : i + 3]) for i in range(0, min(12, len(row["sentences"])), 3)]
        pages.append((row["language"], "general", "\n".join(row["sentences"])))
        for content, blocks in (("code", code), ("formulas", formulas)):
            pages.append((row["language"], content, "\n".join(part for group in groups for part in (group, draw.choice(blocks)))))
    problems = lines(DATA / "gsm8k" / "train.jsonl", "question", "answer")[3700:]
    generated = [one["question"] + "\n" + one["metadata"]["answer_cot"] for one in create_dataset("gsm_symbolic", size=800, seed=11)]
    groups = {"problems": problems, "plain": [re.sub("<<.*?>>|####", "", one) for one in problems], "generated": generated}
    return pages + [("eng", name, "\n".join(draw.sample(some, 4))) for name, some in groups.items() for _ in range(200)]


def mixed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the share of mixed pages whose kind is right, by content, and its controls. The classifiers learn from these and web pages."""
    if not (DATA / "languages").exists() or not (DATA / "web_wcxb_dev").exists():
        return {"skipped": f"{DATA} lacks languages or web_wcxb_dev"}
    pages = mixed_pages(random.Random(7))
    web = [text for row in read("web_wcxb_dev/dev_truth.jsonl.zst") if (text := text_of(row))]
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(folder)
        docs = documents(store, [text for _, _, text in pages] + web)
        typed = execute(train_domains, TrainDomainsConfig(), {"documents": docs}, store)
        technical = execute(train_code_reasoning, TrainCodeReasoningConfig(), {"documents": docs}, store)
        languages = execute(language, LanguageConfig(), {"documents": docs}, store)
        signals = [
            execute(domains, StageConfig(), {"documents": docs, "classifier": typed}, store), languages,
            execute(code_reasoning, StageConfig(), {"documents": docs, "classifier": technical}, store),
        ]  # fmt: skip
        own, before = (
            column(execute(split, SplitConfig(kinds=kinds), {"documents": docs, "signals": signals}, store), "category")[: len(pages)]
            for kinds in (KindsConfig(), KindsConfig(min_formulas=10**6))
        )
        spoken = column(languages, "language")
    right: dict[tuple[str, str], list[list[bool]]] = {}
    for (name, content, _), code, *kinds in zip(pages, spoken, own, before, strict=False):
        english = name == "eng" if content == "general" else code in ("en", "zxx")
        wanted = {"code": "code", "general": "general"}.get(content, "mathematics_reasoning")
        wanted = wanted if content == "code" or english else "multilingual"
        right.setdefault((name, content), []).append([kind == wanted for kind in kinds])
    shares = {f"{name} {content}": [sum(side) / len(some) for side in zip(*some, strict=True)] for (name, content), some in right.items()}
    result: dict[str, Any] = {"kinds_of_pages_by_language": {name: [round(share, 3) for share in pair] for name, pair in shares.items()}}
    for content in ("general", "code", "formulas", "problems", "plain", "generated"):
        pairs = [pair for (_, one), some in right.items() if one == content for pair in some]
        sides = [sum(side) / len(pairs) for side in zip(*pairs, strict=True)]
        result |= {f"kinds_of_pages_{content}": sides[0], f"kinds_of_pages_{content}_before": sides[1]}
    return result | {"kinds_of_pages_most_common": max(Counter(own).values()) / len(own), "kinds_of_pages": len(pages)}


def text_of(row: dict[str, Any]) -> str:
    """Return the text of an annotated page."""
    return str(row["ground_truth"].get("main_content") or "")
