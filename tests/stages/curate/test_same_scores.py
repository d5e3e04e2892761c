"""Scores and decisions do not depend on the order of rows, the size of parts or the number of workers."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from puna.stages.contract import execute
from puna.stages.contract.config import parse
from puna.stages.curate.decontaminate import DecontaminateConfig, decontaminate
from puna.stages.curate.domains import DomainsConfig, domains
from puna.stages.curate.heuristics import HeuristicsConfig, heuristics
from puna.stages.curate.mix import MixConfig, mix
from puna.stages.curate.quality import QualityConfig, quality
from puna.stages.curate.select import SelectConfig, select
from puna.stages.pretrain.split import SplitConfig, split
from puna.storage import Store

SMALL = {"dimension": 8, "buckets": 10_000, "epochs": 5}


def digests(folder, rows, make_documents, **how):
    """Digests of every table of every stage."""
    store = Store.open(folder)
    documents = make_documents(store, rows)
    prompt = {"id": "p", "task": "t", "split": "heldout", "prompt": rows[0][2][:150], "reference": "", "entry": "{}"}
    prompts = store.import_table("prompts", pa.Table.from_pylist([prompt]))
    made = {"heuristics": execute(heuristics, HeuristicsConfig(min_language_words=1), {"documents": documents}, store, **how)}
    made["quality"] = execute(quality, QualityConfig(**SMALL), {"documents": documents}, store, **how)
    made["domains"] = execute(domains, DomainsConfig(**SMALL, min_labels=5), {"documents": documents}, store, **how)
    rules = parse(SelectConfig, {"gopher_repetition": None, "c4": None, "fineweb": None, "quality": {"min_rank": 0.2}}, "select")
    scores = {"documents": documents, "signals": [made["heuristics"], made["quality"]]}
    made["select"] = execute(select, rules, scores, store, **how)
    made["decontaminate"] = execute(decontaminate, DecontaminateConfig(), {"documents": documents, "prompts": [prompts]}, store, **how)
    made["split"] = execute(split, SplitConfig(), {"documents": documents, "signals": made["domains"]}, store, **how)
    made["mix"] = execute(mix, MixConfig(), {"documents": documents, "split": made["split"]}, store, **how)
    assert made["select"].rows("dropped") > 5
    assert made["decontaminate"].rows("dropped") > 0
    return {f"{name}.{table}": record.digest for name, a in made.items() for table, record in a.manifest.tables.items()}


@pytest.mark.parametrize("case", ["other order", "small parts", "two processes"])
def test_same_result(tmp_path, make_documents, themed, case):
    rows = themed(90)
    expected = digests(tmp_path / "one", rows, make_documents)
    if case == "two processes":
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
            assert digests(tmp_path / "two", rows, make_documents, executor=executor, part_rows=7) == expected
        return
    if case == "other order":
        order = np.random.default_rng(1).permutation(len(rows) - 1) + 1
        rows = [rows[0], *(rows[n] for n in order)]
    assert digests(tmp_path / "two", rows, make_documents, part_rows=5 if case == "small parts" else 1024) == expected
