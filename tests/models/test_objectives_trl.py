"""Losses and gradients of SFT, DPO and reward models compared with TRL's trainers on the same weights and batch."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import load, save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.training import objectives as o
from puna.models.transformer import Transformer
from puna.stages.training.settings import TRL_LOSSES

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

ROWS = [
    ("Reverse the word: apple", "elppa", "apple, I think"),
    ("What is 3 + 4?", "The answer is 7.", "8"),
    ("Say hi", "hi", "I'm sorry, I cannot do that."),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([text for row in ROWS for text in row] * 3, 290)


def folder_of(tmp_path: Path, tokenizer: Tokenizer, head: str, seed: int = 0) -> Path:
    config = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    made = Transformer(config, head, seed=seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    folder = tmp_path / f"{head}{seed}"
    save(made, folder, tokenizer)
    return folder


def arguments(kind: type, tmp_path: Path, **more: object) -> object:
    return kind(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=len(ROWS),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        remove_unused_columns=False,
        **more,
    )


def message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def theirs(trainer: object) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of TRL's trainer on its one batch."""
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}


def assert_equal(
    made: Transformer, loss: torch.Tensor, expected: tuple[float, dict[str, torch.Tensor]]
) -> None:
    loss.backward()
    # Hinge and IPO are not flattened by a sigmoid: rounding of fp32 sums of some hundred nats remains.
    assert loss.item() == pytest.approx(expected[0], rel=2e-6, abs=1e-6)
    largest = max(float(g.abs().max()) for g in expected[1].values())
    names = {n for n, _ in made.named_parameters()}
    assert names == set(expected[1])
    for name, parameter in made.named_parameters():
        assert (parameter.grad - expected[1][name]).abs().max() <= 2e-5 * largest, name


def pairs(tokenizer: Tokenizer, columns: tuple[int, ...]) -> o.Targets:
    rendered = [[tokenizer.render_pair(row[0], row[c]) for c in columns] for row in ROWS]
    return o.Targets.from_answers(
        [r[0][0] for r in rendered], [[answer for _, answer, _ in r] for r in rendered]
    )


def test_sft(tokenizer: Tokenizer, tmp_path: Path):
    folder = folder_of(tmp_path, tokenizer, "lm")
    data = datasets.Dataset.from_list(
        [{"prompt": message("user", p), "completion": message("assistant", c)} for p, c, _ in ROWS]
    )
    trainer = trl.SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder),
        args=arguments(trl.SFTConfig, tmp_path),
        train_dataset=data,
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    made = load(folder)
    loss, _ = o.Sft()(made, pairs(tokenizer, (1,)))
    assert_equal(made, loss, theirs(trainer))


@pytest.mark.parametrize(("kind", "nll_weight"), [("sigmoid", 0.0), *((kind, 0.2) for kind in TRL_LOSSES)])
def test_dpo(tokenizer: Tokenizer, tmp_path: Path, kind: str, nll_weight: float):
    folder, reference = folder_of(tmp_path, tokenizer, "lm"), folder_of(tmp_path, tokenizer, "lm", 1)
    data = datasets.Dataset.from_list(
        [
            {
                "prompt": message("user", p),
                "chosen": message("assistant", c),
                "rejected": message("assistant", r),
            }
            for p, c, r in ROWS
        ]
    )
    own = {"label_smoothing": 0.3} if kind == "robust" else {}
    mixed = {"loss_type": [kind, "sft"], "loss_weights": [1.0, nll_weight], **own}
    trainer = trl.DPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder),
        ref_model=transformers.AutoModelForCausalLM.from_pretrained(reference),
        args=arguments(trl.DPOConfig, tmp_path, beta=0.3, **mixed),
        train_dataset=data,
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    made, targets = load(folder), pairs(tokenizer, (1, 2))
    even = torch.arange(0, 2 * len(ROWS), 2)
    batch = o.DpoBatch(targets, even, even + 1, o.reference_logprobs(load(reference), targets))
    loss, _ = o.Dpo(beta=0.3, nll_weight=nll_weight, nll_normalization="tokens", loss=kind, parameters=own)(made, batch)
    assert_equal(made, loss, theirs(trainer))


def test_reward(tokenizer: Tokenizer, tmp_path: Path):
    folder = folder_of(tmp_path, tokenizer, "scalar")
    data = datasets.Dataset.from_list(
        [
            {
                "chosen": message("user", p) + message("assistant", c),
                "rejected": message("user", p) + message("assistant", r),
            }
            for p, c, r in ROWS
        ]
    )
    trainer = trl.RewardTrainer(
        model=transformers.AutoModelForSequenceClassification.from_pretrained(folder),
        args=arguments(trl.RewardConfig, tmp_path),
        train_dataset=data,
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    made = load(folder)
    batch = o.RewardBatch(pairs(tokenizer, (1, 2)), torch.tensor([0, 1] * len(ROWS)))
    loss, metrics = o.Reward()(made, batch)
    assert 0.0 <= metrics["accuracy"].item() <= 1.0
    assert_equal(made, loss, theirs(trainer))


@pytest.mark.parametrize("seeds", [(0, 1), (1, 0)])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 1.6)])
def test_kto(tokenizer: Tokenizer, tmp_path: Path, seeds: tuple[int, int], weights: tuple[float, float]):
    """For its estimate of the KL divergence, TRL pairs each prompt with the previous prompt's answer; so does this batch."""
    folder, reference = (folder_of(tmp_path, tokenizer, "lm", seed) for seed in seeds)
    labels = [True, False, True]
    data = datasets.Dataset.from_list(
        [{"prompt": message("user", p), "completion": message("assistant", c), "label": flag} for (p, c, _), flag in zip(ROWS, labels, strict=True)]
    )
    trainer = trl.KTOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder),
        ref_model=transformers.AutoModelForCausalLM.from_pretrained(reference),
        args=arguments(trl.KTOConfig, tmp_path, beta=0.02, desirable_weight=weights[0], undesirable_weight=weights[1]),
        train_dataset=data,
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    made, frozen = load(folder), load(reference)
    rendered = [tokenizer.render_pair(p, c) for p, c, _ in ROWS]
    matched = o.Targets.from_answers([r[0] for r in rendered], [[r[1]] for r in rendered])
    others = o.Targets.from_answers([r[0] for r in rendered], [[rendered[i - 1][1]] for i in range(len(ROWS))])
    batch = o.KtoBatch(matched, torch.tensor(labels), o.reference_logprobs(frozen, matched), others, o.reference_logprobs(frozen, others))
    objective = o.Kto(0.02, nll_weight=0.0, loss="kto", parameters={"desirable_weight": weights[0], "undesirable_weight": weights[1]})
    # The two orders of the models have estimates of opposite signs; TRL clips the negative one to 0.
    sign = 1 if objective.measure(lambda compute, part: compute(made, part), batch)["mismatched_ratio"] > 0 else 0
    loss, metrics = objective(made, batch)
    assert (metrics["kl"] > 0) == bool(sign)
    assert_equal(made, loss, theirs(trainer))


class Given:
    """A model with given log-probabilities and entropies of the targets."""

    def __init__(self, logprobs: torch.Tensor, entropies: torch.Tensor) -> None:
        self.logprobs, self.entropies = logprobs, entropies

    def token_logprobs(self, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        return self.logprobs, self.entropies


TRL_POLICY_LOSSES = {
    "dapo": {"normalizer": "tokens"},
    "grpo": {"normalizer": "answers"},
    "dr_grpo": {"normalizer": "constant"},
    "gspo": {"normalizer": "answers", "ratio": "sequence"},
    "cispo": {"surrogate": "cispo"},
}
WEIGHED = ("dapo", "gspo", "cispo")
"""Losses with importance weights for another engine's tokens, as in TRL's `vllm_importance_sampling_correction`."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "weighed"), [*((kind, False) for kind in TRL_POLICY_LOSSES), *((kind, True) for kind in WEIGHED)])
def test_policy_losses_are_those_of_trls_grpo(kind: str, weighed: bool, seed: int) -> None:
    """Six answers of unequal length in fp64, some tokens masked: loss, gradient and the share of clipped ratios."""
    generator = torch.Generator().manual_seed(seed)
    lengths, most = torch.randint(1, 9, (6,), generator=generator).tolist(), 9
    mask = torch.rand(6, most, generator=generator) < 0.8
    mask[:, 0] = True
    inside = torch.arange(most) < torch.tensor(lengths)[:, None]
    old = -3 * torch.rand(6, most, generator=generator, dtype=torch.float64)
    new = (old + 0.4 * torch.randn(6, most, generator=generator, dtype=torch.float64)).requires_grad_()
    entropies = torch.rand(6, most, generator=generator, dtype=torch.float64)
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    counted = (mask & inside).long()
    drawn = old + 0.5 * torch.randn(6, most, generator=generator, dtype=torch.float64)
    ratio = torch.clamp(torch.exp((old - drawn) * counted), max=1.5)  # as TRL computes it in mode token_truncate

    args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    accelerator = SimpleNamespace(num_processes=1, sync_gradients=True, gather=lambda value: value, reduce=lambda value, reduction: value)
    trainer = SimpleNamespace(
        args=args, accelerator=accelerator, model=SimpleNamespace(training=True), beta=0.0, current_gradient_accumulation_steps=1,
        loss_type="grpo" if kind == "gspo" else kind, importance_sampling_level="sequence" if kind == "gspo" else "token",
        epsilon_low=0.2, epsilon_high=1.3 if kind == "cispo" else 0.3, max_completion_length=most, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=weighed, vllm_importance_sampling_correction=True, _entropy_bonus_enabled=True, use_adaptive_entropy=False,
        entropy_coef=0.07, _metrics={"train": defaultdict(list)}, _get_per_token_logps_and_entropies=lambda *_, **__: (new, entropies, None),
    )  # fmt: skip
    empty = torch.zeros(6, 0, dtype=torch.long)
    inputs = {
        "prompt_ids": empty, "prompt_mask": empty, "completion_ids": counted, "completion_mask": counted, "advantages": advantages,
        "old_per_token_logps": old, "num_items_in_batch": counted.sum(), "importance_sampling_ratio": ratio,
    }  # fmt: skip
    expected = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    expected.backward()

    leaf = new.detach()[inside].requires_grad_()
    answers = [[list(range(1, n + 1)) for n in lengths[:2]], [list(range(1, n + 1)) for n in lengths[2:]]]
    flags = [row[:n].tolist() for row, n in zip(mask, lengths, strict=True)]
    targets = o.Targets.from_answers([[1], [2]], answers, [flags[:2], flags[2:]])
    each = advantages.repeat_interleave(torch.tensor(lengths))
    weights = o.ppo.importance_weights(old[inside], drawn[inside], 1.5) if weighed else None
    batch = o.PpoBatch(targets, old[inside], each, torch.zeros_like(each), torch.zeros_like(each), weights)
    objective = o.Ppo(0.2, 0.07, clip_high=0.3, max_tokens=most, **TRL_POLICY_LOSSES[kind])
    loss, metrics = objective(Given(leaf, entropies[inside]), batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (leaf.grad - new.grad[inside]).abs().max() <= 1e-6 * new.grad.abs().max()
    assert leaf.grad.abs().max() > 1e-3 and 0 < metrics["clip_fraction"] < 1


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_divergence_is_that_of_trls_gkd(beta: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd")
    generator = torch.Generator().manual_seed(0)
    ours, theirs_ = (torch.randn(6, 11, generator=generator).double() for _ in range(2))
    student = ours.clone().requires_grad_(True)
    o.likelihood.divergence((student / 0.7).log_softmax(-1), (theirs_ / 0.7).log_softmax(-1), beta).mean().backward()
    other = ours.clone().requires_grad_(True)
    loss = gkd.GKDTrainer.generalized_jsd_loss(other[None], theirs_[None], torch.zeros(1, 6), beta, 0.7, "batchmean")
    loss.backward()
    found = o.likelihood.divergence((ours / 0.7).log_softmax(-1), (theirs_ / 0.7).log_softmax(-1), beta).mean()
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    assert (student.grad - other.grad).abs().max() <= 1e-6 * other.grad.abs().max()
