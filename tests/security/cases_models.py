"""Hostile requests and hostile model files. Each function returns how many of its attacks succeeded; none should."""

from __future__ import annotations

from typing import Any

import torch

from puna.models.config import ModelConfig
from puna.models.generation import Engine, SamplingParams
from puna.models.transformer import Transformer

SHAPE = ModelConfig(vocab_size=83, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
HOSTILE: tuple[dict[str, Any], ...] = (
    {"temperature": 1e-9},
    {"temperature": 5e-324, "top_p": 0.5},
    {"mask": lambda _: torch.zeros(83, dtype=torch.bool)},
    {"mask": lambda _: torch.ones(5, dtype=torch.bool)},
    {"mask": lambda answer: answer[99]},
    {"logit_bias": {3: 1e308}},
    {"logit_bias": {83: 1.0}},
    {"repetition_penalty": 1e-308, "top_k": 2},
)
"""Parameters of requests that once ended the answers of all others."""


def _model() -> Transformer:
    """A model whose token 82 makes everything behind it not finite."""
    model = Transformer(SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.model.embed_tokens.weight[82] = torch.nan
    return model


def answers_ended(model: Transformer | None = None) -> int:
    """Count hostile requests that end, change or delay beyond its steps the answer of another request."""
    engine = Engine(model or _model(), exact=True)
    asked, params = [5, 6, 7], SamplingParams(max_tokens=12, stop=(), seed=3)
    (expected,) = engine.generate([asked], params)
    succeeded = 0
    for prompt, hostile in [*(([1, 2], one) for one in HOSTILE), ([1, 82], {}), ([*range(40), 82], {})]:
        good = engine.submit(asked, params)
        tokens = [event.token for _ in range(3) for event in engine.step()]
        request = None
        try:
            request = engine.submit(prompt, SamplingParams(max_tokens=4, stop=(), **hostile))
            while not engine.scheduler.idle:
                tokens += [event.token for event in engine.step() if event.request is good]
        except Exception:  # noqa: BLE001  whatever a step raises ends everybody's answers
            engine.clear()
        failed = [one for one, _ in engine.failed()]
        succeeded += tokens != expected[0].tokens or any(one is not request for one in failed)
    return succeeded
