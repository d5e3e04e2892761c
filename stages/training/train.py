"""Functions that the training stages share: rendering, loading, the training loop, the log, saving."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from puna.models.config import ModelConfig
from puna.models.training.packing import pack
from puna.models.training.parallel.layout import Layout
from puna.models.training.settings import ComputeSettings, TrainConfig, TrainingSettings
from puna.stages.contract import External, Figure, StageRun
from puna.stages.conversations import BadRow, Message, messages_of, prompt_ids, rendering, tools_of
from puna.stages.executors import ranks
from puna.stages.training.bad_rows import BadRows, Limit
from puna.stages.training.vocabulary import tokenizer_of
from puna.storage import Artifact, PunaError, errors_at

if TYPE_CHECKING:
    import torch

    from puna.models.accounting import Precision
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer
    from puna.stages.evaluation.training_tasks import TaskWatch

CHECKPOINTS = "training"
"""Name of the folder of checkpoints in a run's scratch folder."""
CHECKPOINT_STEPS = 50  # number of steps between checkpoints of a run; checkpoints do not change results
WATCH = "puna.stages.evaluation.training_tasks"
"""Module that evaluates tasks during training. It is imported by name, so that its code is not part of the keys of models without tasks."""


@dataclass(frozen=True)
class Example:
    """One prompt with its answers as token ids.

    masks   per answer token, True if it counts in the preference term or, in a conversation to learn, in the loss
    groups  rankings of answers, as indices: a ranking is a list of tiers of equally good answers, best tier first"""

    prompt: list[int]
    answers: list[list[int]]
    masks: list[list[bool]]
    groups: list[list[list[int]]]

    def __len__(self) -> int:
        return len(self.prompt) + sum(map(len, self.answers))


def render(tokenizer: Tokenizer, row: Mapping[str, Any], groups: Sequence[Sequence[Sequence[Message]]]) -> Example:
    """Return a row's context and ranked answers, tokenized. Answer tokens that only the chat template adds are masked.

    `groups`: rankings (see `Example`). An answer ends in its stop token unless it has `finished: false`. Raise BadRow on failure."""
    context, tools = messages_of(row), tools_of(row)
    with rendering(row):
        answers = [answer for tiers in groups for tier in tiers for answer in tier]
        pairs = [tokenizer.render_pair(context, answer, answer.get("finished", True), tools) for answer in answers]
    if not all(prompt and ids for prompt, ids, _ in pairs):
        raise BadRow("empty", f"row {row['id']}: its prompt or one of its answers has no tokens")
    if any(prompt != pairs[0][0] for prompt, _, _ in pairs):
        raise BadRow("chat_template", f"row {row['id']}: the chat template renders the prompt differently before different answers")
    numbers = iter(range(len(pairs)))
    return Example(
        prompt=list(pairs[0][0]), answers=[list(ids) for _, ids, _ in pairs], masks=[[not flag for flag in mask] for _, _, mask in pairs],
        groups=[[[next(numbers) for _ in tier] for tier in tiers] for tiers in groups],
    )  # fmt: skip


def render_conversation(tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[Example]:
    """Return a conversation, tokenized for learning the assistant's turns and their end tokens; tokens between the turns are masked.

    There are several examples if the template renders an answer differently when a later turn follows. Raise BadRow on failure."""
    with rendering(row):
        rows = tokenizer.render(messages_of(row), tools_of(row))
    results = []
    for one in rows:
        start = one.trained.index(True)
        results.append(Example(one.ids[:start], [one.ids[start:]], [one.trained[start:]], []))
    return results


def by_answer(
    examples: Sequence[Example], micro_batch_tokens: int, compute: Callable[[list[Example]], torch.Tensor],
    progress: Callable[[int, int], None] | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return a tensor for each example, with one row per answer. `compute` is called with the examples of one packed row, `progress` with
    the numbers of finished and of all examples."""
    values: dict[int, torch.Tensor] = {}
    for row in pack([len(example) for example in examples], micro_batch_tokens):
        values |= zip(row, compute([examples[i] for i in row]).split([len(examples[i].answers) for i in row]), strict=True)
        if progress is not None:
            progress(len(values), len(examples))
    return [values[i] for i in range(len(examples))]


def row_limit(training: TrainingSettings) -> Limit:
    return Limit(training.compute.micro_batch_tokens, "training.compute.micro_batch_tokens")


def context_limit(model: ModelConfig, max_tokens: int) -> Limit:
    """Return the limit of a prompt with an answer of `max_tokens`: the maximum context of a model of this shape."""
    what = f"the prompt with an answer of max_tokens={max_tokens}"
    return Limit(model.max_position_embeddings, "the model's max_position_embeddings", what, "lower max_tokens")


def heldout_prompts(prompts: Artifact) -> dict[str, list[dict[str, Any]]]:
    """Return the held-out prompts by task. Raise PunaError if there are none."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for row in prompts.read().to_pylist():
        if row["split"] == "heldout":
            tasks.setdefault(row["task"], []).append(row)
    if not tasks:
        raise PunaError(f"{prompts.id} has no held-out prompts; hold out some of its prompts")
    return tasks


def training_prompts(
    given: Sequence[dict[str, Any]], model: Transformer, tokenizer: Tokenizer, answers: int, max_tokens: int, row: Limit, bad: BadRows
) -> tuple[list[dict[str, Any]], list[tuple[dict[str, Any], list[int]]]]:  # fmt: skip
    """Return the training prompts' rows, and (row, prompt token ids) of those that fit. Raise PunaError if there are rows but none fits.

    A prompt must fit into the model's context with one answer of `max_tokens`, and into a packed row with all its `answers`."""
    rows = [one for one in given if one["split"] == "train"]
    within = row._replace(what=f"the prompt with {answers} answers of max_tokens={max_tokens}")
    rendered = bad.examples(
        rows, lambda one: prompt_ids(tokenizer, one), lambda ids: len(ids) + max_tokens, context_limit(model.config, max_tokens),
        (lambda ids: len(ids) + answers * max_tokens, within),
    )  # fmt: skip
    if rows:
        bad.check_left(len(rendered), f"{len(rows)} training prompts")
    return rows, rendered


def device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def frozen_dtype() -> torch.dtype:
    """Return the dtype of models that are not trained: bf16 on a GPU, fp32 on a CPU."""
    import torch

    return torch.bfloat16 if device().type == "cuda" else torch.float32


SMALL = 8_000_000  # number of parameters below which a model runs fastest on one CPU thread, since more threads would mostly wait
_large: weakref.WeakSet[Transformer] = weakref.WeakSet()


@functools.cache
def _threads() -> int:
    import torch

    return torch.get_num_threads()


def on_threads(model: Transformer) -> Transformer:
    """Return the model. Set torch to one thread or, if a model in use has `SMALL` parameters or more, to all threads of the environment."""
    import torch

    everything = _threads()
    if sum(p.numel() for p in model.parameters()) >= SMALL:
        _large.add(model)
    torch.set_num_threads(everything if _large else 1)
    return model


HEADS = {"lm": "a language model", "scalar": "a reward model"}


def load_model(
    artifact: Artifact, head: Literal["lm", "scalar"], *, new: bool = False, frozen: bool = False, quantization: str = "none",
    layout: Layout | None = None,
) -> tuple[Transformer, Tokenizer]:  # fmt: skip
    """Return the model and tokenizer of a model artifact. Raise PunaError if it cannot be read or has another head.

    `new`: add a zero-initialized scalar head to a language model. `frozen`: the model is not trained, and computes in bf16 on a GPU.
    `quantization` nf4 converts the layers' matrices to 4 bits one by one. If `layout` splits the model, its weights stay memory-mapped in
    the file's number format until each rank has read its own pieces."""
    import torch

    from puna.models.formats.checkpoint import CheckpointError, load, read_config
    from puna.models.formats.quantized import to_nf4
    from puna.models.tokens.tokenizer import Tokenizer

    place, own = (device(), frozen_dtype() if frozen else torch.float32), (torch.device("cpu"), None)
    with errors_at(artifact.id, ValueError), errors_at(f"{artifact.id} cannot be read", CheckpointError):
        cut = layout is not None and layout.parts(read_config(artifact.path())) is not None
        where, dtype = own if cut or quantization != "none" else place
        model = load(artifact.path(), dtype=dtype, device=where)
        if model.head != head and new and head == "scalar":
            model = load(artifact.path(), head, dtype, where)
        if quantization == "nf4":
            model = to_nf4(model).to(*place)
    if model.head != head:
        raise PunaError(f"{artifact.id} is {HEADS[model.head]}, made by {artifact.manifest.stage}; give {HEADS[head]}")
    return on_threads(model), Tokenizer.load(artifact.path())


def check_one_tokenizer(models: Sequence[Artifact], why: str) -> None:
    """Raise PunaError if the models' tokenizers differ, since a token id would stand for different texts."""
    from tokenizers import Tokenizer as Backend

    # Compare both as the installed release serializes them, since releases may write the same tokenizer differently.
    first, *others = [Backend.from_file(str(model.path("tokenizer.json"))).to_str() for model in models]
    for model, other in zip(models[1:], others, strict=True):
        if other != first:
            raise PunaError(f"{models[0].id} and {model.id} have different tokenizers: {why}")


def load_grown(artifact: Artifact, tokenizer: Artifact, layout: Layout | None = None) -> Transformer:
    """Return a language model with embeddings for the tokens that `tokenizer` adds. Raise PunaError if the tokenizers differ otherwise.
    `layout`: see `load_model`."""
    from puna.models.tokens.growth import grown_model

    network, own = load_model(artifact, "lm", layout=layout)
    try:
        return grown_model(network, own, tokenizer_of(tokenizer))
    except ValueError as error:
        raise PunaError(f"{artifact.id} and {tokenizer.id} have different tokenizers: tokenize with the model's own, which can grow by "
            f"tokenizer.new_tokens; the stage tokenizer takes it from the input model ({error})") from error  # fmt: skip


def divergence_named(what: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which divergence raises a PunaError that names the training run (`what`)."""
    from puna.models.training.loop import TrainingDiverged

    return errors_at(f"{what} diverged", TrainingDiverged)


def fit(
    model: Any, objective: Callable[..., Any], batches: Callable[[int], Any], config: TrainConfig, run: StageRun,
    scales: Mapping[str, float] | None = None, sampled: bool = False, watch: TaskWatch | None = None,
) -> list[dict[str, float]]:  # fmt: skip
    """Train with Puna's loop; save checkpoints in the run's scratch folder and the log in the table `training_log`. Return the log.

    `scales`: parameter name → learning rate factor. `sampled`: batches depend on weights. Raise PunaError on divergence."""
    from puna.models.training.loop import train

    def on_step(row: dict[str, float]) -> None:
        run.progress(row["step"], config.steps, f"loss {row['loss']:.3f}")
        if watch is not None and watch.due(int(row["step"]), config.steps):
            watch.ask(int(row["step"]), model)

    with divergence_named(run.stage):
        log = train(
            model, objective, batches, config, run.seed("loop"), rate_scales=scales, sampled=sampled,
            checkpoint_dir=run.scratch / CHECKPOINTS, checkpoint_every=CHECKPOINT_STEPS, on_step=on_step, device=device(),
        )  # fmt: skip
    write_log([row | watch.after(int(row["step"])) for row in log] if watch else log, run)
    return list(log)


def task_watch(
    tasks: Sequence[External] | None, every: int, tokenizer: Tokenizer, compute: ComputeSettings, run: StageRun
) -> TaskWatch | None:
    """Return the object that evaluates `tasks` during training, every `every` steps; None without tasks."""
    return importlib.import_module(WATCH).TaskWatch(tasks, every, tokenizer, compute, run) if tasks else None


def code_of_tasks(inputs: Mapping[str, Sequence[Artifact | External]]) -> list[tuple[str, str]]:
    """Return (module, symbol) of the code that evaluates the input `tasks` during training; [] without tasks."""
    return [*importlib.import_module(WATCH).code(inputs["tasks"])] if inputs["tasks"] else []


def training_precision(compute: ComputeSettings, run: StageRun) -> Precision:
    """Return the precision of this run's training. A resumed run keeps the precision that it started with."""
    from puna.models.training.loop import as_begun

    return as_begun(compute, run.scratch / CHECKPOINTS).precision_on(device().type)


def write_log(log: Sequence[dict[str, float]], run: StageRun) -> None:
    """Write the table `training_log`, a figure of the loss, and metrics: steps, tokens and the mean loss of the last tenth of steps. Raise
    PunaError if no step has a finite loss."""
    rows = [{**row, "step": int(row["step"]), "tokens": int(row["tokens"])} for row in log]
    run.write_rows(rows, "training_log")
    run.metric("steps", len(rows))
    run.metric("trained_tokens", sum(row["tokens"] for row in rows))
    tail = [row["loss"] for row in log[-max(1, len(log) // 10) :] if math.isfinite(row["loss"])]
    if tail:
        run.metric("final_loss", sum(tail) / len(tail))
    points: list[tuple[Any, float]] = [(row["step"], row["loss"]) for row in log if math.isfinite(row["loss"])]
    if log and not points:
        raise PunaError(f"{run.stage} diverged: the loss is not finite in any of {len(log)} steps; lower the learning rate")
    run.figure("loss", Figure(title="Training loss", x="step", y="loss", series={run.stage: points}))


def report_ends(log: Sequence[dict[str, float]], names: Sequence[str], run: StageRun) -> None:
    """Write as metrics the first and last finite value of each column in `names` that is in the log. Skipped steps lack some columns."""
    for name in names:
        if finite := [row[name] for row in log if math.isfinite(row.get(name, math.nan))]:
            run.metric(f"first_{name}", finite[0])
            run.metric(f"final_{name}", finite[-1])


def save_model(model: Transformer, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model and its tokenizer to `folder`, on rank 0. 4-bit matrices are first merged with their adapters. If the model is
    divided among ranks, all must call this together."""
    from puna.models.formats.checkpoint import save
    from puna.models.formats.quantized import Nf4Linear, merge
    from puna.models.training.parallel.base import write_weights

    if model.held is not None:
        return write_weights(model.held, functools.partial(save, model, folder, tokenizer))
    if ranks.follows():
        return
    if any(isinstance(module, Nf4Linear) for module in model.modules()):
        merge(model.to("cpu"))
    save(model, folder, tokenizer)
