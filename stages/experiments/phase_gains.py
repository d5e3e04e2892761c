"""`phase_gains`: the gain from each phase of pretraining, measured against control runs without it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pydantic import Field

from puna.stages.contract import Documents, Mixture, Model, SeededConfig, StageRun, stage
from puna.stages.evaluation.multiple_choice import heldout_pages
from puna.stages.training import intervals
from puna.stages.training.bits_per_byte import document_nats
from puna.stages.training.train import load_model
from puna.storage import Artifact, PunaError

MICRO_BATCH = 8192


class PhaseGainsConfig(SeededConfig):
    max_bytes: int = Field(300_000, ge=1000, description="Maximum held-out text to score, bytes; pages are chosen by a hash of their ids")
    max_page_bytes: int = Field(100_000, ge=100, description="Maximum size of a page, in bytes; longer pages are left out")


@stage(kind="evaluation")
def phase_gains(
    model: Model, short_rows: Model | None, natural: Model | None, constant: Model | None, fresh: Model | None, documents: Documents,
    mixture: Mixture | None, best: Mixture | None, config: PhaseGainsConfig, run: StageRun,
) -> None:  # fmt: skip
    """Compare a model with control models that were trained without one of its phases, on held-out documents.

    `short_rows` was trained, and is measured, in rows of the first context; `natural` was annealed on other data than the mixture `best`;
    `constant` was not annealed; `fresh` started each phase with new optimizer state. The gain is the control's loss minus the model's, in
    nats per token of the same documents, with a paired interval; `gain_start` and `gain_beyond` are gains on the tokens in the first
    context and after it. `gain_best` weights categories as `best` does. `token_ratio`: the control's training tokens over the model's."""
    given = {"short_rows": short_rows, "natural": natural, "constant": constant, "fresh": fresh}
    controls = {name: control for name, control in given.items() if control is not None}
    if not controls:
        raise PunaError(f"phase_gains compares a model with its controls; give at least one of {', '.join(given)}")
    rows = [] if short_rows is None else [one for phase in short_rows.manifest.config["phases"] for one in (phase, *phase["ramp"])]
    context = max((int(one["length"]) for one in rows if one["length"]), default=None)
    pages = heldout_pages(documents, mixture, config.max_page_bytes, config.max_bytes, run)
    texts, categories = [page.text for page in pages], np.array([page.category for page in pages])
    own, sizes = _measure(model, texts, context, None)
    shares = {} if best is None else {row["category"]: row["weight"] for row in best.read(columns=["category", "weight"]).to_pylist()}
    category_weights = np.array([shares.get(name, 0.0) / sizes[:, categories == name].sum() for name in categories])
    weights = {"gain": np.ones((2, 1)), "gain_best": category_weights, "gain_start": np.eye(2)[:, :1], "gain_beyond": np.eye(2)[:, 1:]}
    for number, (name, control) in enumerate(controls.items(), 1):
        nats, others = _measure(control, texts, context, context if name == "short_rows" else None)
        if (sizes != others).any():
            raise PunaError(f"{control.id} and {model.id} have different tokenizers, so their losses per token cannot be compared")
        for metric, weight in weights.items():
            gain, tokens = ((values * weight).sum(0) for values in (nats - own, sizes))
            if (some := tokens > 0).any():
                value = intervals.ratio(gain[some].tolist(), tokens[some].tolist())
                run.write_rows([intervals.evaluation_row(name, metric, value, int(some.sum()))])
        trained, of_model = (float(one.manifest.metrics["trained_tokens"]) for one in (control, model))
        run.write_rows([intervals.evaluation_row(name, "token_ratio", trained / of_model, 1)])
        run.progress(number, len(controls), name)


def _measure(model: Artifact, texts: Sequence[str], context: int | None, window: int | None) -> tuple[npt.NDArray[np.float64], ...]:
    """Return nats and numbers of tokens [2, P] of texts: in the first `context` tokens, and after. `window`: tokens per pass; None: all."""
    network, tokenizer = load_model(model, "lm", frozen=True)
    whole = [[*tokenizer.lead, *ids, *tokenizer.end] for ids in tokenizer.encode_batch(texts)]
    starts = [ids[:context] for ids in whole]
    window = min(window or network.config.max_position_embeddings, MICRO_BATCH)
    nats = np.array([document_nats(network, some, window, MICRO_BATCH) for some in (starts, whole)])
    counts = np.array([[float(len(ids) - 1) for ids in some] for some in (starts, whole)])
    return np.diff(nats, axis=0, prepend=0), np.diff(counts, axis=0, prepend=0)
