"""z-loss and soft-capped logits equal their formulas in value and gradient, on packed documents and with any split of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from puna.models import transformer
from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.formats.checkpoint import load, save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.training.objectives import LanguageModeling, Targets
from puna.models.transformer import Transformer

SHAPE = {"vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


def model(cap: float | None = None, vocab_size: int = 41) -> Transformer:
    config = ModelConfig(**SHAPE | {"vocab_size": vocab_size}, initializer_range=0.6, final_logit_softcapping=cap)
    return Transformer(config, seed=0).double()


def documents(*sizes: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 41, (size,), generator=draw).tolist() for size in sizes]


def plain_logits(network: Transformer, document: list[int]) -> torch.Tensor:
    """Return all logits of the document alone."""
    z = network.hidden(Forest.pack([document]))[:-1] @ network.lm_head.weight.T
    cap = network.config.final_logit_softcapping
    return z if cap is None else cap * (z / cap).tanh()


def gradients(network: Transformer, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(network.parameters())))


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "ROWS", 7)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("weight", [0.0, 0.05])
def test_the_packed_loss_is_the_formula(cap: float | None, weight: float) -> None:
    """Mean over all targets of -log softmax(z)[t] + weight (log sum e^z)^2, with z = c tanh(z / c)."""
    network, some = model(cap), documents(9, 2, 14, 5)
    z = torch.cat([plain_logits(network, document) for document in some])
    targets = torch.tensor([id_ for document in some for id_ in document[1:]])
    expected = torch.nn.functional.cross_entropy(z, targets) + weight * z.exp().sum(-1).log().square().mean()
    loss, metrics = LanguageModeling(weight)(network, Targets.from_documents(some))
    # Without z-loss the tokens' shares are in fp32.
    precise = 1e-12 if weight else 1e-7
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=precise)
    assert ("z_loss" in metrics) == bool(weight)
    for own, theirs in zip(gradients(network, loss), gradients(network, expected), strict=True):
        torch.testing.assert_close(own, theirs, atol=precise, rtol=1e3 * precise)


def test_micro_batches_add_up() -> None:
    network, some, objective = model(4.0), documents(9, 2, 14, 5), LanguageModeling(0.01)
    batches = [Targets.from_documents(part) for part in (some[:1], some[1:])]
    totals = {"tokens": sum(objective.totals(batch)["tokens"] for batch in batches)}
    parts = [objective(network, batch, totals) for batch in batches]
    loss, metrics = objective(network, Targets.from_documents(some))
    torch.testing.assert_close(parts[0][0] + parts[1][0], loss)
    torch.testing.assert_close(parts[0][1]["z_loss"] + parts[1][1]["z_loss"], metrics["z_loss"])


def test_the_gradient_of_both_is_the_difference_quotient() -> None:
    network, batch, objective = model(2.0), Targets.from_documents(documents(6, 4)), LanguageModeling(0.1)
    head = network.lm_head.weight

    def loss(weight: torch.Tensor) -> torch.Tensor:
        network.lm_head._parameters["weight"] = weight
        return objective(network, batch)[0]

    assert torch.autograd.gradcheck(loss, head.detach().clone().requires_grad_(), fast_mode=True)


def test_bounded_logits_are_what_the_model_says_everywhere(tmp_path: Path) -> None:
    network, document = model(3.0, 300), documents(20)[0]
    forest, at, targets = Forest.pack([document]), torch.arange(19), torch.tensor(document[1:])
    z = plain_logits(network, document)
    assert z.abs().max() < 3
    torch.testing.assert_close(network.logits(network.hidden(forest)[at]), z)
    logprobs, entropies = network.token_logprobs(forest, at, targets, 0.7)
    p = (z / 0.7).softmax(-1)
    torch.testing.assert_close(logprobs, p[at, targets].log())
    torch.testing.assert_close(entropies, -(p * p.log()).sum(-1))
    save(network.float(), tmp_path, Tokenizer.train(["a b"], 262))
    again = load(tmp_path)
    assert again.config.final_logit_softcapping == 3.0 and again.config.model_type == "puna"
    torch.testing.assert_close(again.logits(again.hidden(forest)), network.logits(network.hidden(forest)))
