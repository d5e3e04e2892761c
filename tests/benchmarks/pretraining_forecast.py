"""Forecasts of a loss from a ladder of small runs, each beside the run itself."""

from __future__ import annotations

import io
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import zstandard

from puna.models.config import ModelShape
from puna.stages.contract import execute
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.storage import Artifact, Store

DATA = Path(os.environ.get("PUNA_DATA", Path(__file__).parents[3] / "shared" / "data"))
PAGE = 4000
"""Characters of a document cut from a book."""
MODEL = ModelShape(
    hidden_size=64, intermediate_size=172, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, initializer_range=0.1,
    zero_residual=True,
)  # fmt: skip


def texts() -> list[str]:
    """Return pages of the books and of WikiText."""
    with open(DATA / "text_books" / "books36.jsonl.zst", "rb") as raw:
        stream = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(raw), encoding="utf-8")
        books = [json.loads(line)["text"] for line in stream]
    pages = [book[start : start + PAGE] for book in books for start in range(0, len(book), PAGE)]
    articles = re.split(r"\n = (?=[^=])", (DATA / "text_misc" / "wikitext2_valid.txt").read_text())
    return [page for page in [*pages, *articles] if len(page) > 500]


def corpus(store: Store) -> dict[str, Artifact]:
    """Return the tokens of all pages, and their tokenizer."""
    pages = texts()
    n = len(pages)
    documents = store.import_table("documents", pa.table({
        "id": [f"{i:032x}" for i in range(n)], "url": [f"https://x.org/{i}" for i in range(n)],
        "fetched_at": [datetime(2026, 1, 1, tzinfo=UTC)] * n, "source": ["text"] * n, "title": pa.array([None] * n, pa.string()), "text": pages,
    }))  # fmt: skip
    vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=1024), {"documents": documents}, store)
    tokens = execute(tokenize, TokenizeConfig(sequence_length=256), {"documents": documents, "tokenizer": vocabulary}, store)
    return {"tokens": tokens, "tokenizer": vocabulary}
