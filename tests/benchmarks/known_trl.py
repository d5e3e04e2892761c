"""TRL's GRPO on the prompts and with the checkers of a benchmark, until it has used a given number of CPU seconds.

The settings equal Puna's if TRL has them: learning rate, adapters, prompts and answers per rollout, updates, temperature, clip, no KL.
Gradient checkpointing and vLLM's importance weights, which cost a CPU time, are off. Only sampling and training count as seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from puna.stages.verifiers.base import Question
from puna.stages.verifiers.registry import from_text


def train_grpo(
    model: Path, rows: Sequence[dict[str, Any]], settings: Any, seconds: float, seed: int, folder: Path, bf16: bool = True
) -> dict[str, Any]:
    """Train a policy in Hugging Face's layout and write it to `folder`; return its budget. rows: rows of the prompts table."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    used: dict[str, Any] = {
        "updates": 0.0,
        "checker_calls": 0.0,
        "sampled_tokens": 0.0,
        "cpu_seconds": 0.0,
        "trained_answers": 0.0,
        "log": [],
    }

    def reward(prompts: Any, completions: Any, completion_ids: Any, verifier: list[str], **_: Any) -> list[float]:
        used["checker_calls"] += len(completions)
        used["sampled_tokens"] += sum(map(len, completion_ids))
        texts = [one[0]["content"] if isinstance(one, list) else one for one in completions]
        scores = [from_text(check).score(Question("", "", "", None), text).value for check, text in zip(verifier, texts, strict=True)]
        used["log"].append({"cpu_seconds": time.process_time() - start, "score": sum(score or 0.0 for score in scores) / len(scores)})
        print(json.dumps(used["log"][-1]), file=sys.stderr, flush=True)
        unfinished = [len(ids) >= settings.max_tokens and ids[-1] != tokenizer.eos_token_id for ids in completion_ids]
        return [float(score or 0.0) - settings.unfinished_penalty * cut for score, cut in zip(scores, unfinished, strict=True)]

    class Limit(TrainerCallback):  # type: ignore[misc]
        """A callback that stops the training once the seconds are used."""

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            used["updates"] = float(state.global_step)
            used["cpu_seconds"] = time.process_time() - start
            control.should_training_stop = used["cpu_seconds"] >= seconds

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if bf16 else torch.float32)
    each, split = settings.prompts * settings.answers, 2 if bf16 else 1
    optimizer, schedule = settings.optimizer, settings.schedule
    args = GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=10_000, per_device_train_batch_size=each // settings.minibatches // split,
        gradient_accumulation_steps=split, steps_per_generation=settings.minibatches * split, num_generations=settings.answers,
        max_completion_length=settings.max_tokens, temperature=settings.temperature, learning_rate=schedule.learning_rate, beta=0.0,
        lr_scheduler_type="constant_with_warmup", warmup_steps=int(schedule.warmup_steps), weight_decay=0.0, adam_beta2=optimizer.beta2,
        max_grad_norm=optimizer.max_grad_norm, epsilon=settings.clip, gradient_checkpointing=False, bf16=bf16, use_cpu=True, seed=seed,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1, dataloader_pin_memory=False, remove_unused_columns=False,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": json.loads(row["messages"]) if isinstance(row["messages"], str) else row["messages"],
                               "verifier": row["verifier"]} for row in rows])  # fmt: skip
    sizes = settings.lora
    lora = (
        LoraConfig(r=sizes.rank, lora_alpha=sizes.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        if settings.method == "lora"
        else None
    )
    trainer = GRPOTrainer(policy, reward, args=args, train_dataset=data, processing_class=tokenizer, peft_config=lora, callbacks=[Limit()])
    start = time.process_time()
    trainer.train()
    used["trained_answers"] = used["updates"] * each / settings.minibatches
    trained = trainer.model if lora is None else trainer.model.merge_and_unload()
    trained.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return used
