"""SmolLM2-135M-Instruct's published scores compared with scores measured here: a part of `evaluation.py`.

Source: the model card of HuggingFaceTB/SmolLM2-135M-Instruct, section "Instruction model", and the tasks of huggingface/smollm
(text/evaluation). The published scores were measured with lighteval, in the chat template, on bf16 weights, with at most 2,048 tokens
including the prompt:

- GSM8K 1.4: the 1,319 test problems, 5 examples drawn from the training problems, 256 tokens, up to "Question:". Here: training problems
  (the test file is not in the shared data) and the first 5 of them as examples, as plain text.
- IFEval 29.9: the mean of strict accuracy by prompts and by instructions over 541 prompts, 1,280 tokens. Here: the first of them, in the
  chat template; `--longest` tokens.
- ARC 37.3 (mean of Easy and Challenge), HellaSwag 40.9: cloze, without examples. Their data are not in the shared data: not measured.

The weights here are the package's 4-bit weights (Q4_1), which is another reason for differences. Of IFEval's answers 22 % pass but do not
end within 1,280 tokens (`published_ifeval_cut_off`); as in the published scores, they are scored although cut off.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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


BENCHMARKS = ("gsm8k", "ifeval")


def figures(
    model: Path, folder: Path, store: Store, limit: int, longest: int, names: Sequence[str] = BENCHMARKS
) -> dict[str, Any]:  # fmt: skip
    """Return the scores with their 95 % intervals on `limit` questions each. longest: maximum tokens of an IFEval answer."""
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
    found: dict[str, Any] = {}
    if "gsm8k" in names:
        (inputs,) = External.resolve(str(_written(folder / "gsm8k", "gsm8k", own, {"test": gsm8k[5:], "train": gsm8k[:5]})))
        plain = execute(benchmark, BenchmarkConfig(examples=limit), {"model": artifact, "tasks": [inputs]}, store)
        solved = [one["verified"] for one in _answers(plain)]
        found |= _named("published_gsm8k", wilson(int(sum(solved)), len(solved)))
    if "ifeval" in names:
        (inputs,) = External.resolve(str(_written(folder / "ifeval", "ifeval", asked, {"test": prompts})))
        chat = execute(benchmark, BenchmarkConfig(examples=limit, prompts="chat"), {"model": artifact, "tasks": [inputs]}, store)
        found |= _ifeval(chat, prompts)
    return found


def _named(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _ifeval(evaluation: Artifact, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the strict accuracies by prompts and by instructions, and their mean. Cut-off answers are scored, too."""
    from puna.stages.verifiers.base import Question
    from puna.stages.verifiers.registry import from_json

    by_key = {str(row["key"]): row for row in prompts}
    shares, sizes, cut_off = [], [], 0
    for one in _answers(evaluation):
        row = by_key[str(one["target"])]
        given = {"instruction_id_list": row["instruction_id_list"], "kwargs": row["kwargs"], "partial": True}
        verdict = from_json({"name": "constraints", **given}).score(Question(str(row["key"]), "ifeval", row["prompt"], None), one["text"])
        cut_off += one["verified"] < (verdict.value or 0.0)
        shares.append(verdict.value)
        sizes.append(float(len(row["instruction_id_list"])))
    whole = wilson(sum(share == 1 for share in shares), len(shares))
    each = ratio([share * size for share, size in zip(shares, sizes, strict=True)], sizes)
    both = mean([(float(share == 1) + share) / 2 for share in shares])
    half, middle = both.high - both.value, (whole.value + each.value) / 2
    figures = _named("published_ifeval", Interval(middle, middle - half, middle + half))
    own = {"prompts": whole.value, "instructions": each.value, "cut_off": cut_off / len(shares)}
    return figures | {f"published_ifeval_{name}": value for name, value in own.items()}


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
