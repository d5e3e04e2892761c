"""A reference model's log-probabilities of the answers in preferences, stored beside the preferences."""

from __future__ import annotations

from pydantic import Field

from puna.stages.contract import Model, Preferences, StageRun, stage
from puna.stages.training.bad_rows import BadRows, BadRowsConfig, Limit
from puna.stages.training.needs import model_template
from puna.stages.training.rankings import by_label, read_preferences, render_ranked
from puna.stages.training.reference import answer_ids, name_of, sum_logprobs
from puna.stages.training.train import frozen_dtype, load_model


class ReferenceLogprobsConfig(BadRowsConfig):
    mask_format: bool = Field(True, description="Leave out header and termination tokens, as `dpo` does with its mask_format")
    micro_batch_tokens: int = Field(4096, ge=16, description="Maximum tokens per forward pass; longer preferences get no log-probabilities")


@stage(kind="preferences", device=True, needs=model_template)
def reference_logprobs(model: Model, preferences: Preferences, config: ReferenceLogprobsConfig, run: StageRun) -> None:
    """Copy the preferences, and store the summed log-probability of each answer under `model` in the side table `scores`.

    A `dpo` run that starts from this model with these preferences, the same precision and `mask_format` reads the values, whatever its
    loss. In `scores`, the id is a digest of prompt, answer and mask; the name has mask, precision and model digest. Preferences that the
    chat template rejects, or that are too long, are kept without log-probabilities and listed in `dropped`; see `bad_rows`."""
    import torch

    network, tokenizer = load_model(model, "lm", frozen=True)
    bad = BadRows(config, "reference_logprobs")
    rows = read_preferences([preferences], None)
    limit = Limit(config.micro_batch_tokens, "micro_batch_tokens")
    examples = [one.example for one in render_ranked(tokenizer, rows, limit, bad, by_label)]
    values = sum_logprobs(network, examples, config.mask_format, config.micro_batch_tokens, lambda done, total: run.progress(done, total))
    name = name_of(model, config.mask_format, "bf16" if frozen_dtype() == torch.bfloat16 else "fp32")
    scores = {key: value for one, some in zip(examples, values, strict=True) for key, value in zip(answer_ids(one), some, strict=True)}
    run.write(preferences.read())
    run.write_rows([{"id": key, "name": name, "value": value} for key, value in sorted(scores.items())], "scores")
    bad.write(run)
    run.metric("answers", len(scores))
