"""SmolLM2-135M-Instruct's published scores beside what is measured here: a part of `evaluation.py`.

The model card gives GSM8K with 5 examples (1.4), and IFEval's strict accuracy, the mean of prompts and instructions (29.9), both by
lighteval on the weights in bf16. Here the weights are the package's, of 4 bits (Q4_1), and what is asked lies in the shared data: GSM8K's
training problems and the first prompts of IFEval. Its ARC (37.3, mean) and HellaSwag (40.9) need data that are not there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import evaluation_checkers as checkers  # the benchmark beside this one
import yaml

from puna.stages.contract import External, execute
from puna.stages.evaluation.benchmark import BenchmarkConfig, benchmark
from puna.stages.io.import_model import ImportModelConfig, import_model
from puna.stages.training.intervals import Interval, mean, ratio, wilson
from puna.storage import Artifact, Store

SHOTS = {"num_fewshot": 5, "fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}}


def figures(model: Path, folder: Path, store: Store, limit: int, longest: int) -> dict[str, Any]:
    """Return the scores with their 95 % intervals on `limit` questions each. longest: tokens of an answer to IFEval."""
    (files,) = External.resolve(f"model={model}")
    artifact = execute(import_model, ImportModelConfig(), {"model": files}, store)
    gsm8k = checkers.lines("gsm8k/train.jsonl", limit + 5)
    prompts = checkers.lines("ifeval/en_input_data.jsonl", limit)
    own = {
        "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_target": "answer", "verifier": "numeric", **SHOTS,
        "generation_kwargs": {"until": ["Question:", "\n\n"], "max_gen_toks": 256},
    }  # fmt: skip
    asked = {
        "doc_to_text": "prompt", "doc_to_target": "key", "generation_kwargs": {"until": [], "max_gen_toks": longest},
        "verifier": {"name": "constraints", "instruction_id_list": "instruction_id_list", "kwargs": "kwargs", "partial": True},
    }  # fmt: skip
    (inputs,) = External.resolve(str(_written(folder / "gsm8k", "gsm8k", own, {"test": gsm8k[5:], "train": gsm8k[:5]})))
    plain = execute(benchmark, BenchmarkConfig(examples=limit), {"model": artifact, "tasks": [inputs]}, store)
    (inputs,) = External.resolve(str(_written(folder / "ifeval", "ifeval", asked, {"test": prompts})))
    chat = execute(benchmark, BenchmarkConfig(examples=limit, prompts="chat"), {"model": artifact, "tasks": [inputs]}, store)
    solved = [one["verified"] for one in _answers(plain)]
    return _named("published_gsm8k", wilson(int(sum(solved)), len(solved))) | _ifeval(chat, prompts)


def _named(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _ifeval(evaluation: Artifact, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return strict accuracies by prompts, by instructions, and their mean. Answers that were cut off are scored as they stand."""
    from puna.stages.verifiers.base import Question
    from puna.stages.verifiers.registry import from_json

    by_key = {str(row["key"]): row for row in prompts}
    shares, sizes = [], []
    for one in _answers(evaluation):
        row = by_key[str(one["target"])]
        given = {"instruction_id_list": row["instruction_id_list"], "kwargs": row["kwargs"], "partial": True}
        verdict = from_json({"name": "constraints", **given}).score(Question(str(row["key"]), "ifeval", row["prompt"], None), one["text"])
        shares.append(verdict.value)
        sizes.append(float(len(row["instruction_id_list"])))
    whole = wilson(sum(share == 1 for share in shares), len(shares))
    each = ratio([share * size for share, size in zip(shares, sizes, strict=True)], sizes)
    both = mean([(float(share == 1) + share) / 2 for share in shares])
    half, middle = both.high - both.value, (whole.value + each.value) / 2
    figures = _named("published_ifeval", Interval(middle, middle - half, middle + half))
    return figures | {"published_ifeval_prompts": whole.value, "published_ifeval_instructions": each.value}


def _answers(evaluation: Artifact) -> list[dict[str, Any]]:
    return [{**json.loads(row["detail"]), "text": row["text"]} for row in evaluation.read("examples").to_pylist()]


def _written(folder: Path, name: str, spec: dict[str, Any], splits: dict[str, list[dict[str, Any]]]) -> Path:
    """Write a task with its data; return the folder."""
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {"task": name, "dataset_path": "json", "test_split": "test", "dataset_kwargs": {"data_files": {s: f"{s}.jsonl" for s in splits}}}
    (folder / "task.yaml").write_text(yaml.safe_dump(task | spec), encoding="utf-8")
    return folder
