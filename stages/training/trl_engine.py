"""TRL's trainers as the second engine of sft, reward_model and dpo, on the same artifacts and tokens as Puna's engine.

Puna tokenizes conversations with the chat template of the model's tokenizer and passes token ids to TRL. The settings in `compute` replace
TRL's defaults of bf16 and gradient checkpointing; telemetry is off. An interrupted run resumes from its saved state."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from puna.models.training.settings import TrainingSettings
from puna.models.training.state import Saver, check_identity, load_state, save_state
from puna.stages.contract import StageRun
from puna.stages.training.lora import ADAPTER, keeps, peft_config
from puna.stages.training.rankings import all_pairs, pairs_of
from puna.stages.training.settings import AdaptableConfig, DpoConfig, RewardModelConfig, SftConfig
from puna.stages.training.train import CHECKPOINTS, Example, training_precision, write_log
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from torch import Tensor

    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

# huggingface_hub reads this variable at its import, inside the functions below.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def train_sft(model: Transformer, examples: Sequence[Example], tokenizer: Any, config: SftConfig, run: StageRun) -> Transformer:
    """Return the model trained by TRL's SFTTrainer. The loss is the mean over a step's answer tokens, as in Puna's own engine."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from puna.models.formats.hub import PunaForCausalLM

    def make(adapters: LoraConfig | None) -> Any:
        return SFTTrainer(
            model=PunaForCausalLM.from_transformer(model, pad_token_id=tokenizer.pad_token_id),
            args=SFTConfig(**arguments(config.training, len(examples), run)),
            train_dataset=Dataset.from_list([sft_row(example) for example in examples]), processing_class=tokenizer, peft_config=adapters,
        )  # fmt: skip

    return train(make, model, config, run)


def train_reward(model: Transformer, examples: Sequence[Example], tokenizer: Any, config: RewardModelConfig, run: StageRun) -> Transformer:
    """Return the model trained by TRL's RewardTrainer. A row is a pair of a better and a worse answer in the same ranking."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    from puna.models.formats.hub import PunaForSequenceClassification

    pairs = [
        {"chosen_ids": e.prompt + e.answers[better], "rejected_ids": e.prompt + e.answers[worse]}
        for e in examples
        for better, worse in all_pairs(e)
    ]

    def make(adapters: LoraConfig | None) -> Any:
        return RewardTrainer(
            model=PunaForSequenceClassification.from_transformer(model, pad_token_id=tokenizer.pad_token_id),
            args=RewardConfig(**arguments(config.training, len(pairs), run), disable_dropout=False), train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer, peft_config=adapters,
        )  # fmt: skip

    return train(make, model, config, run)


def train_dpo(model: Transformer, examples: Sequence[Example], tokenizer: Any, config: DpoConfig, run: StageRun) -> Transformer:
    """Return the model trained by TRL's DPOTrainer with a preference term and a likelihood term (TRL's loss `sft`).

    The reference is a copy of the policy or, with LoRA, the policy without adapters. The likelihood term is a mean over tokens. TRL uses
    one mask for both terms: with `mask_format`, the likelihood term also leaves out the chat template's tokens."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from puna.models.formats.hub import PunaForCausalLM

    class PreparedDPOTrainer(DPOTrainer):
        """A DPOTrainer for rows of token ids."""

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def _set_signature_columns_if_needed(self) -> None:
            self._signature_columns = ["prompt_ids", "chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask"]

    pairs = [
        {
            "prompt_ids": e.prompt, "chosen_ids": e.answers[better], "rejected_ids": e.answers[worse],
            "chosen_mask": e.masks[better] if config.mask_format else [True] * len(e.answers[better]),
            "rejected_mask": e.masks[worse] if config.mask_format else [True] * len(e.answers[worse]),
        }
        for e in examples
        for better, worse in pairs_of(e, config.pairs)
    ]
    weights = {"loss_type": [config.loss, "sft"], "loss_weights": [1.0, config.nll_weight], **config.preference.own(config.loss_parameters)}
    weights.pop("length_weight", None)  # always 0: `DpoConfig` rejects other values

    def make(adapters: LoraConfig | None) -> Any:
        frozen = None if adapters else PunaForCausalLM.from_transformer(copy.deepcopy(model), pad_token_id=tokenizer.pad_token_id)
        return PreparedDPOTrainer(
            model=PunaForCausalLM.from_transformer(model, pad_token_id=tokenizer.pad_token_id), ref_model=frozen,
            args=DPOConfig(**arguments(config.training, len(pairs), run), beta=config.beta, disable_dropout=False, **weights),
            train_dataset=Dataset.from_list(pairs), data_collator=PreferenceCollator(tokenizer.pad_token_id), processing_class=tokenizer,
            peft_config=adapters,
        )  # fmt: skip

    return train(make, model, config, run)


def sft_row(example: Example) -> dict[str, list[int]]:
    """Return a row for TRL's SFTTrainer: token ids, and labels, which are -100 in the prompt and at masked tokens."""
    (answer,) = example.answers
    (mask,) = example.masks
    learned = [id_ if counts else -100 for id_, counts in zip(answer, mask, strict=True)]
    return {"input_ids": example.prompt + answer, "labels": [-100] * len(example.prompt) + learned}


class PreferenceCollator:
    """A function that collates pairs into one padded batch, all better answers first; masked tokens are not completion tokens."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `attention_mask` and `completion_mask`, [2n, T] int64, for DPOTrainer."""
        import torch

        sides = [(row, side) for side in ("chosen", "rejected") for row in rows]
        ids = [row["prompt_ids"] + row[f"{side}_ids"] for row, side in sides]
        masks = [[0] * len(row["prompt_ids"]) + [int(flag) for flag in row[f"{side}_mask"]] for row, side in sides]
        longest = max(map(len, ids))
        return {
            "input_ids": torch.tensor([x + [self.pad] * (longest - len(x)) for x in ids]),
            "attention_mask": torch.tensor([[1] * len(x) + [0] * (longest - len(x)) for x in ids]),
            "completion_mask": torch.tensor([m + [0] * (longest - len(m)) for m in masks]),
        }


def arguments(training: TrainingSettings, rows: int, run: StageRun) -> dict[str, Any]:
    import torch

    if torch.cuda.device_count() > 1:
        raise PunaError(f"{run.stage}: engine trl needs one device, since others would enlarge the batch; set CUDA_VISIBLE_DEVICES to one")
    config = training.train_config(rows)
    optimizer, schedule, compute = config.optimizer, config.schedule, config.compute
    return {
        "output_dir": str(run.scratch / "trl"), "max_steps": config.steps, "per_device_train_batch_size": training.batch_size,
        "learning_rate": schedule.peak(optimizer), "warmup_steps": config.warmup_steps, "lr_scheduler_type": SCHEDULES[schedule.shape],
        "weight_decay": optimizer.weight_decay, "adam_beta1": optimizer.beta1, "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.epsilon, "max_grad_norm": optimizer.max_grad_norm or 0.0, "max_length": compute.micro_batch_tokens,
        "seed": run.seed("trl") % 2**31, "use_cpu": not torch.cuda.is_available(), "bf16": training_precision(compute, run) == "bf16",
        "gradient_checkpointing": compute.activation_checkpointing, "dataloader_pin_memory": False, "logging_steps": 1,
        "logging_nan_inf_filter": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip


def hub_tokenizer(artifact: Artifact, tokenizer: Tokenizer) -> Any:
    """Return the artifact's tokenizer, loaded by transformers. TRL uses only its padding token; a missing one is taken from `tokenizer`."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(artifact.path())
    if theirs.pad_token_id is None:
        theirs.pad_token = tokenizer.token(tokenizer.pad)
    return theirs


def train(make: Callable[[LoraConfig | None], Any], model: Transformer, config: AdaptableConfig, run: StageRun) -> Transformer:
    """Return the model trained by the trainer that `make` builds, with any adapters merged. Write `training_log` and kept adapters."""
    import torch
    from transformers import PrinterCallback

    from puna.models.training.loop import weights_digest

    seed, save_seconds = run.seed("trl"), config.training.compute.save_seconds
    identity = {"config": config.identity(), "seed": seed, "initial": weights_digest(model)}
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # adapters are initialized before TRL sets its own seed
        trainer = make(peft_config(model, config.lora) if config.method == "lora" else None)
        trainer.remove_callback(PrinterCallback)
        recorder = Recorder(trainer, identity, save_seconds, run)
        trainer.add_callback(recorder)
        recorder.train()
    write_log(recorder.rows, run)
    if config.method == "lora" and keeps(config.lora):
        trainer.model.save_pretrained(str(run.folder / ADAPTER), selected_adapters=["default"])
        (run.folder / ADAPTER / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    trained = trainer.model.merge_and_unload() if config.method == "lora" else trainer.model
    return cast("Transformer", trained.to_transformer())


class Recorder:
    """The record of one training run: a row per step, and the training state, saved at the times chosen by `Saver`.

    The state is tensors and JSON, as in Puna's own loop; TRL's checkpoints are pickles, which Puna does not store. `Recorder` is a callback
    without transformers' base class, because all commands import this file, and most should not import transformers."""

    def __init__(self, trainer: Any, identity: Mapping[str, Any], save_seconds: float, run: StageRun) -> None:
        self.rows: list[dict[str, float]] = []
        self._trainer, self._identity, self._run = trainer, identity, run
        self._folder = run.scratch / CHECKPOINTS
        self._saver = Saver(save_seconds, self._save)
        self._last, self._tokens = time.perf_counter(), 0.0
        self._found: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        """Return a function that ignores an event (`on_…`) for which this class has no method."""
        if name.startswith("on_"):
            return lambda *event, **details: None
        raise AttributeError(name)

    def train(self) -> None:
        """Train to the end, from the saved state if there is one."""
        self._found = load_state(self._folder)
        steps = self._trainer.args.max_steps
        with self._saver:
            if self._found is None:
                self._trainer.train()
                return
            record = self._found[1]
            check_identity(self._folder, record, dict(self._identity))
            self.rows = record["log"]
            if record["done"] == steps:  # otherwise the trainer would take one more step
                self._load_weights()
                return
            mark = self._run.scratch / "trl" / "begun"
            mark.mkdir(parents=True, exist_ok=True)
            (mark / "trainer_state.json").write_text(json.dumps(record["state"]), encoding="utf-8")
            self._trainer._load_from_checkpoint = self._load_weights
            self._trainer.train(resume_from_checkpoint=str(mark))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the saved optimizer state and learning-rate schedule if the run resumes."""
        if self._found is None:
            return
        tensors, record = self._found
        optimizer, scheduler = self._trainer.optimizer, self._trainer.lr_scheduler
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in _below("moments", tensors).items():
            index, kind = name.split(".", 1)
            moments.setdefault(int(index), {})[kind] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
        scheduler.load_state_dict(record["schedule"])
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the random generators if the state was saved at the end of an epoch."""
        if self._found is not None and float(state.epoch).is_integer():
            self._restore_random()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the random generators if the state was saved within an epoch, since skipping rows has used them."""
        if self._found is not None:
            self._restore_random()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add a step's row; save the state if a save is due; end the training if a signal asked for it."""
        if not logs or "loss" not in logs:
            return
        now, tokens = time.perf_counter(), float(logs.get("num_tokens", self._tokens))
        row = {
            "step": state.global_step, "loss": float(logs["loss"]), "learning_rate": float(logs["learning_rate"]),
            "gradient_norm": float(logs["grad_norm"]), "tokens": tokens - self._tokens, "seconds": now - self._last,
        }  # fmt: skip
        self.rows.append(row)
        self._last, self._tokens = now, tokens
        self._saver.save_if_due(state.global_step == state.max_steps)
        self._run.progress(state.global_step, state.max_steps, f"loss {row['loss']:.3f}")
        self._saver.end_if_asked()

    def _save(self) -> Path:
        from puna.models.training.loop import progress

        trainer = self._trainer
        tensors = {f"weights.{name}": value for name, value in trainer.model.named_parameters() if value.requires_grad}
        for index, moments in trainer.optimizer.state_dict()["state"].items():
            tensors |= {f"moments.{index}.{name}": value for name, value in moments.items()}
        tensors |= {f"random.{number}": value for number, value in enumerate(_random())}
        record = {
            **self._identity, "precision": "bf16" if trainer.args.bf16 else "fp32", "schedule": trainer.lr_scheduler.state_dict(),
            "state": dataclasses.asdict(trainer.state) | {"log_history": []}, **progress("step", trainer.state.max_steps, self.rows),
        }  # fmt: skip
        return save_state(self._folder, trainer.state.global_step, tensors, record)

    def _load_weights(self, *_: Any) -> None:
        import torch

        assert self._found is not None
        weights = dict(self._trainer.model.named_parameters())
        with torch.no_grad():
            for name, value in _below("weights", self._found[0]).items():
                weights[name].copy_(value)

    def _restore_random(self) -> None:
        import torch

        assert self._found is not None
        cpu, *gpus = _below("random", self._found[0]).values()
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
        self._found = None


def _random() -> list[Tensor]:
    import torch

    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


def _below(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return name → tensor for one part of the state (`moments`, `weights`, …), without its prefix; numeric names are sorted as numbers."""
    own = {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{part}.")}
    return dict(sorted(own.items(), key=lambda item: (int(item[0]) if item[0].isdecimal() else 0, item[0])))
