"""Pretraining of a Llama-family decoder in Puna's own training loop."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pydantic import Field

from puna.models.parameters import parameters
from puna.models.settings import NO_RESULT
from puna.models.training.settings import ComputeSettings
from puna.models.training.state import read_each
from puna.stages.contract import Evaluation, External, Facts, Figure, Model, StageRun, Tokenizer, Tokens, stage
from puna.stages.evaluation.needle import NeedleSettings, by_depth, heat, noise_of
from puna.stages.executors import ranks
from puna.stages.training.chosen_size import ChosenSize, SizedConfig, report_outcome
from puna.stages.training.needs import GRADIENT_BYTES, HELD_BYTES, memory, other_moments, training_memory
from puna.stages.training.phase import Acceptance, Phase, Places
from puna.stages.training.token_rows import Packed, Relay, mean_loss
from puna.stages.training.train import code_of_tasks, device, divergence_named, load_grown, on_threads, save_model, task_watch
from puna.stages.training.vocabulary import check_tokens, tokenizer_of
from puna.storage import Artifact, PunaError
from puna.storage.work import write_text

if TYPE_CHECKING:
    import torch

    from puna.models.tokens.tokenizer import Tokenizer as Vocabulary
    from puna.models.transformer import Transformer
    from puna.stages.evaluation.training_tasks import TaskWatch


SOURCES = ("fresh", "long", "best")  # inputs with tokens that a phase reads only if it names them
MOMENTS = "optimizer/state.safetensors"
"""File of the optimizer state in a model artifact, in a folder that exports leave out."""


class PretrainConfig(SizedConfig):
    compute: ComputeSettings = Field(ComputeSettings(), description="Precision and memory")
    z_loss: float = Field(
        0.0, ge=0, le=1, description="Weight of the z-loss, the squared log-normalizer of the logits, for stability (OLMo: 1e-5); 0: none"
    )
    needle: NeedleSettings = Field(NeedleSettings(), description="Needle-in-a-haystack test on held-out text after phases with `accept`")
    validation_share: float = Field(0.01, gt=0, lt=0.5, description="Maximum share of documents held out for validation (0 to 1)")
    validation_tokens: int = Field(40_000, ge=100, description="Maximum tokens held out for validation (the last document may exceed it)")
    validate_every: int = Field(100, ge=1, description="Number of steps between validation measurements")
    ask_every: int = Field(1000, ge=1, description="Number of steps between evaluations on `tasks`; also after a phase's last step")
    checkpoint_every: int = Field(
        100, ge=1, json_schema_extra=NO_RESULT, description="Number of steps between checkpoints, which do not change results. If steps "
        "are slow, checkpoints are also saved by time; see compute.save_seconds",
    )  # fmt: skip


def needs(config: PretrainConfig, facts: Facts) -> list[str]:
    """Return messages for: tokens that are missing or that no phase reads; `model` and `size` together; settings that these determine;
    unfit optimizer state; and too little memory (for a new model, embeddings do not count)."""
    starts = [name for name in ("model", "size") if facts.inputs.get(name)]
    if lines := misfits(config, {*SOURCES} & {*facts.inputs}):
        return lines
    if len(starts) == 2:
        return ["size: the input model already has a size; give only one of the two, or set train_chosen_size: false in the recipe"]
    asks = bool(facts.inputs.get("tasks"))
    if starts:
        in_vain = [f"{setting}: the input {starts[0]} has its own; leave it out" for setting in config.in_vain(starts[0])]
        others = other_moments(facts, "model", MOMENTS, config.optimizer) if config.phases[0].optimizer == "keep" else []
        return [*in_vain, *others, *training_memory(facts, "model", config.optimizer, config=config, whole=asks)]
    shape, each = config.model.complete(1, 2048), HELD_BYTES + GRADIENT_BYTES + config.optimizer.state_bytes
    remedy = "make the model smaller (model.num_hidden_layers, …), or take another machine"
    # The vocabulary may not be known yet: 4096 tokens are enough to check each layout.
    fitting = shape.replace(vocab_size=4096)
    return memory(facts, parameters(shape).total, each, remedy, config, fitting, whole=asks)


def code_named(inputs: Mapping[str, Sequence[Artifact | External]]) -> list[tuple[str, str]]:
    """Return (module, symbol) of the code that evaluates the input `tasks`, and of the optimizer of the input `size`."""
    sizes = [ChosenSize.read(size) for size in inputs["size"] if isinstance(size, Artifact)]
    return [*code_of_tasks(inputs), *(name for size in sizes for name in size.reaches())]


@stage(kind="model", device=True, ranks=True, needs=needs, named=code_named)
def pretrain(
    tokens: Tokens, tokenizer: Tokenizer, fresh: Tokens | None, long: Tokens | None, best: Tokens | None, model: Model | None,
    size: Evaluation | None, tasks: list[External] | None, config: PretrainConfig, run: StageRun,
) -> None:  # fmt: skip
    """Train a Llama-family decoder on packed documents (Llama 3, sections 3.2 and 3.4), from scratch or from an input model.

    Attention stays inside each document. Every row is read once per epoch, in a new order each time; phases on the same tokens and row
    length share their epochs. Phases run in order; each reads the tokens that it names (the input `tokens` is named initial). A phase may
    lengthen the context; with `accept`, it runs up to `attempts` times until it passes a test. Annealing lowers the learning rate to 0 and
    may average checkpoints. A few documents of the initial tokens are held out from all phases; their loss is logged, and averaged weights
    are used only if they lower it. Optimizer state passes from phase to phase (unless `fresh`) and is saved with the model. A crashed run
    resumes bit-identically (on a GPU: with `compute.deterministic`). `size`, from `choose_size`, sets the model, the optimizer and the
    first phase; that phase's final loss and the forecast are metrics if both are on the same held-out text. Scores on `tasks` (folders of
    task files and data) are in the log and the metrics."""
    from puna.models.training.parallel.parallel import in_pieces, initial

    vocabulary = tokenizer_of(tokenizer)
    choice = None if size is None else ChosenSize.read(size)
    config = _as_begun(config if choice is None else config.with_size(choice), run)
    sources = _sources({"initial": tokens, "fresh": fresh, "long": long, "best": best}, config, tokenizer, vocabulary, run.scratch)
    packed = sources["initial"]
    if choice and choice.sequence_length != packed.row_length:
        raise PunaError(f"{tokens.id} has rows of {packed.row_length} tokens, but the size was chosen for {choice.sequence_length}; set "
            "choose_size.sequence_length, or give the ladder's tokens")  # fmt: skip
    heldout = packed.validation(config.validation_share, config.validation_tokens)
    aside = {packed.ids[owner] for owner in np.unique(packed.owners[heldout])}
    phases, starts = _count_steps(config, sources)
    watch = Watch(packed.validation_pieces(heldout), sum(phase.steps for phase in phases), vocabulary, config, run)
    watch.tasks = task_watch(tasks, config.ask_every, vocabulary, config.compute, run)
    state: dict[str, torch.Tensor] | Path | None = None
    where = config.compute.layout, device(), config.compute.precision_on(device().type)
    if model is None:
        network = initial(config.model.complete(vocabulary.vocab_size, packed.row_length), run.seed("weights"), *where)
    else:
        network, state = in_pieces(load_grown(model, tokenizer, config.compute.layout), *where), _moments(model)
    on_threads(network)
    if watch.tasks is not None:
        watch.tasks.check(max(network.config.max_position_embeddings, sources[phases[0].tokens].row_length * phases[0].join_rows))
    places: Places = {}
    short = math.nan
    run.metric("optimizer_state_given", int(state is not None and phases[0].optimizer == "keep"))
    for number, (phase, before) in enumerate(zip(phases, starts, strict=True)):
        own = sources[phase.tokens]
        if phase.accept:  # the lowest so far: rises of several steps do not add up
            short = float(np.fmin(short, watch.loss(network)))
        _prepare(network, phase, own.row_length)
        for attempt in range(phase.accept.attempts if phase.accept else 1):
            place = (number, attempt) if attempt else (number,)
            relay = phase.relay(sources, aside, run.seed("rows", *place), vocabulary.begin, places, before)
            state = _train(network, phase, place, relay, watch, config, run, state if attempt or phase.optimizer == "keep" else None)
            if not phase.accept or watch.accepts(network, phase, phase.accept, attempt + 1, own.row_length, short):
                break
        if size is not None and not number:
            report_outcome(size, watch.after, run.metrics["validation_tokens"], run)
    _finish(network, watch, run)
    save_model(network, vocabulary, run.folder)
    assert isinstance(state, Path)
    _keep_moments(state, run.folder)


def _as_begun(config: PretrainConfig, run: StageRun) -> PretrainConfig:
    """Return the settings with one precision for all phases and measurements: a resumed run's own, or the configured one."""
    from puna.models.training.loop import as_begun

    compute = as_begun(config.compute, run.scratch / "phase-0")
    return config.replace(compute=compute.replace(precision=compute.precision_on(device().type)))


def _sources(
    given: dict[str, Artifact | None], config: PretrainConfig, tokenizer: Artifact, vocabulary: Vocabulary, folder: Path
) -> dict[str, Packed]:
    """Return name → packed tokens. Raise PunaError for tokens that are missing, unread or of another tokenizer."""
    if lines := misfits(config, {name for name in SOURCES if given[name] is not None}):
        raise PunaError(lines[0])
    packed = {}
    for name, artifact in given.items():
        if artifact is None:
            continue
        check_tokens(artifact, tokenizer)
        packed[name] = Packed.read(artifact, folder / f"tokens-{name}.bin")
        if packed[name].largest >= vocabulary.vocab_size:
            raise PunaError(f"{artifact.id} contains token {packed[name].largest}, but {tokenizer.id} has {vocabulary.vocab_size} tokens")
    return packed


def misfits(config: PretrainConfig, given: set[str]) -> list[str]:
    """Return messages about tokens of `SOURCES` that a phase reads but that are not `given`, or that are given but not read."""
    read = {name: phase.name for phase in config.phases for name in sorted(phase.sources)}
    missing = [f"phase {read[name]} reads the tokens {name}, which are not given: name tokenize_{name} in the recipe, or give "
               f"--input {name}=tokens/ID to the stage" for name in SOURCES if name in read and name not in given]  # fmt: skip
    unread = [f"no phase reads the tokens {name}: set tokens: {name} in one of pretrain.phases, or leave these tokens out (tokenize_{name})"
              for name in SOURCES if name in given and name not in read]  # fmt: skip
    return missing + unread


def _count_steps(config: PretrainConfig, sources: dict[str, Packed]) -> tuple[list[Phase], list[int]]:
    """Return the phases with steps, and the tokens before each if all rows are full. Raise PunaError if a phase has several row lengths."""
    phases, starts, read = [], [], 0
    for phase in config.phases:
        if len(rows := {sources[name].row_length for name in phase.sources}) > 1:
            raise PunaError(f"phase {phase.name} reads tokens in rows of {' and '.join(map(str, sorted(rows)))}: give all of its tokenize "
                            "steps one sequence_length")  # fmt: skip
        row = rows.pop() * phase.join_rows
        phases.append(phase.with_steps(row, read))
        starts.append(read)
        read += row * phase.growth(row, read).before(phases[-1].steps + 1)
    return phases, starts


def _keep_moments(state: Path, folder: Path) -> None:
    """Save the optimizer state of the last checkpoint in `state` to the model's `folder`, tensor by tensor, on rank 0 only."""
    from puna.models.formats.checkpoint import write_tensors

    if ranks.follows():
        return
    empty, tensors = read_each(state, "state.")
    file = folder / MOMENTS
    file.parent.mkdir(exist_ok=True)
    write_tensors(file, empty, tensors)


def _moments(model: Artifact) -> dict[str, torch.Tensor] | None:
    """Return a model artifact's optimizer state, mapped from its file; None for a model without one, such as an imported model."""
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] | None = load_file(model.path(MOMENTS)) if MOMENTS in model.manifest.files else None
    return state


def _prepare(model: Transformer, phase: Phase, row_length: int) -> None:
    """Set the phase's rotary base and scaling, and a context at least as long as its rows. No weight depends on these."""
    from puna.models.training.parallel.parallel import alone

    old = model.config
    shape = old.replace(
        rope_theta=phase.rope_theta or old.rope_theta,
        rope_scaling=phase.rope_scaling or old.rope_scaling,
        max_position_embeddings=max(old.max_position_embeddings, row_length * phase.join_rows),
    )
    for part in (model, cast("Transformer", alone(model).model)):
        part.config = part.model.config = shape


class Watch:
    """The log and the validation losses of a run over all phases, and the acceptance test of a phase."""

    def __init__(self, pieces: Sequence[Any], total: int, vocabulary: Vocabulary, config: PretrainConfig, run: StageRun) -> None:
        self.pieces, self.total, self.vocabulary, self.config, self.run = pieces, total, vocabulary, config, run
        self.log: list[dict[str, Any]] = []
        self.tasks: TaskWatch | None = None
        self.validation: list[tuple[float, float]] = []
        self.before = self.after = math.nan
        self.flops = self.gain = 0.0
        self.depths: dict[str, list[tuple[Any, float]]] = {}
        run.metric("validation_tokens", sum(len(piece) - 1 for piece in pieces))

    def loss(self, model: Transformer) -> float:
        """Return the loss on the held-out documents, in nats per token, computed in the precision of training."""
        from puna.models.training.parallel.parallel import alone
        from puna.models.training.trainer import computing_in

        compute = self.config.compute
        with computing_in(alone(model).model, compute.precision_on(device().type)):
            return mean_loss(model, self.pieces, compute.micro_batch_tokens)

    def accepts(self, model: Transformer, phase: Phase, bounds: Acceptance, attempt: int, row: int, short: float) -> bool:
        """True if the phase passes its test after attempt `attempt` (1-based). Raise PunaError with the reasons if the last attempt fails.

        `row`: tokens per packed row; `short`: lowest validation loss before a phase with a test. Metrics and a figure are written."""
        length, rise = bounds.length or phase.longest(row * phase.join_rows), self.after - short
        texts = [self.vocabulary.decode(piece.tolist(), skip_special_tokens=True) for piece in self.pieces]
        noise = noise_of(texts, self.vocabulary, self.config.needle)
        seed, size = self.run.seed("needle", phase.name), self.config.compute.micro_batch_tokens
        accuracy = by_depth(model, self.vocabulary, noise, length, self.config.needle, seed, size)
        depth, least = min(((depth, share.value) for depth, share in accuracy.items()), key=lambda pair: pair[1])
        rise, depth, least = ranks.first([rise, depth, least])
        for name, value in {"attempts": attempt, "short_loss_change": rise, "needle_min": least}.items():
            self.run.metric(f"{name}_{phase.name}", value)
        self.depths[f"{phase.name}, {length} tokens, run {attempt}"] = [(f"{at:g}", share.value) for at, share in accuracy.items()]
        self.run.figure("needle", heat(self.depths))
        faults = []
        if not rise <= bounds.short_loss:
            faults.append(f"the loss on the held-out documents rose by {rise:.4f} nats per token, above short_loss = {bounds.short_loss:g}")
        if least < bounds.needle:
            faults.append(f"at depth {depth:g} of {length} tokens it finds {least:.3f} of the passages, below needle = {bounds.needle:g}")
        if faults and attempt == bounds.attempts:
            raise PunaError(f"phase {phase.name} is not accepted after {attempt} runs: {'; '.join(faults)}. Give it more steps or "
                            "attempts, a smaller change of length or base, or wider bounds")  # fmt: skip
        return not faults

    def try_average(self, model: Transformer, folder: Path, phase: str) -> None:
        """Keep the averaged weights in `model` if they lower the last step's validation loss; else restore its weights from `folder`."""
        from puna.models.training.parallel import boxes
        from puna.models.training.parallel.parallel import alone

        loss, self.before = ranks.first([self.loss(model), self.before])
        self.gain, better = self.before - loss, loss < self.before
        self.run.metric(f"averaging_gain_{phase}", self.gain)
        self.run.metric(f"averaging_taken_{phase}", int(better))
        if better:
            self.after = loss
        else:
            held = alone(model)
            weights = {f"weight.{name}": weight.detach() for name, weight in held.parameters.items()}
            boxes.load(folder, {f"weight.{name}": held.pieces[name] for name in held.parameters}, {}, ranks.mesh(), weights)


def _train(
    model: Transformer, phase: Phase, place: tuple[int, ...], relay: Relay, watch: Watch, config: PretrainConfig, run: StageRun,
    state: dict[str, torch.Tensor] | Path | None,
) -> Path:  # fmt: skip
    """Train one phase, starting with the optimizer's `state` (None: new); return the folder of the phase's checkpoints."""
    from puna.models import accounting
    from puna.models.training.loop import train
    from puna.models.training.objectives import LanguageModeling

    done = len(watch.log)
    file = run.scratch / f"validation-{'.'.join(map(str, place))}.json"  # survives a crash
    losses: dict[str, float] = ranks.first(json.loads(file.read_text()) if file.exists() else {})

    def on_step(row: dict[str, float]) -> None:
        step = int(row["step"])
        if (step % config.validate_every == 0 or step == phase.steps) and str(step) not in losses:
            losses[str(step)] = watch.loss(model)
            write_text(file, json.dumps(losses))
        if watch.tasks is not None and watch.tasks.due(step, phase.steps):
            watch.tasks.ask(done + step, model)
        run.progress(done + step, watch.total, f"{phase.name}: loss {row['loss']:.3f}")

    folder = run.scratch / f"phase-{'.'.join(map(str, place))}"
    with divergence_named(f"{run.stage}, phase {phase.name},"), _fitting_state(phase):
        log = train(
            model, LanguageModeling(config.z_loss), lambda step: relay.at(step).later(step, config.compute.micro_batch_tokens),
            phase.train_config(config.optimizer, config.compute), run.seed("loop", *place), checkpoint_dir=folder,
            checkpoint_every=config.checkpoint_every, on_step=on_step, state=state, device=device(),
        )  # fmt: skip
    watch.before = watch.after = losses[str(phase.steps)]
    if phase.schedule.average or phase.schedule.ema:
        watch.try_average(model, folder, phase.name)
    watch.flops += sum(accounting.training_flops(model.config, relay.at(step).lengths(step)) for step in range(1, phase.steps + 1))
    tokens_at = np.cumsum([row["tokens"] for row in log]) + sum(row["tokens"] for row in watch.log)
    watch.validation += [(float(tokens_at[int(step) - 1]), loss) for step, loss in sorted(losses.items(), key=lambda m: int(m[0]))]
    watch.log += [
        {**row, "step": done + int(row["step"]), "phase": float(place[0]), "validation_loss": losses.get(str(int(row["step"]))),
         **(watch.tasks.after(done + int(row["step"])) if watch.tasks else {})}
        for row in log
    ]  # fmt: skip
    run.metric(f"epochs_{phase.name}", relay.at(1).rows_before(phase.steps + 1) / relay.epoch_rows)
    return folder


@contextmanager
def _fitting_state(phase: Phase) -> Iterator[None]:
    """Turn an error about optimizer state that does not fit the phase into a PunaError with a remedy, inside the `with` block."""
    try:
        yield
    except ValueError as error:
        if "does not fit" not in str(error) or phase.optimizer == "fresh":
            raise
        raise PunaError(f"phase {phase.name}: {error}; or set its optimizer to fresh") from error


def _finish(model: Transformer, watch: Watch, run: StageRun) -> None:
    from puna.models import accounting

    log = watch.log
    run.write_rows([{**row, "step": int(row["step"]), "tokens": int(row["tokens"])} for row in log], "training_log")
    tokens, seconds = sum(row["tokens"] for row in log), sum(row["seconds"] for row in log)
    costs = parameters(model.config)
    rate = ranks.count() * accounting.matrix_rate() if device().type == "cpu" else None
    run.metric("parameters", costs.total)
    run.metric("parameters_without_embeddings", costs.layers)
    run.metric("steps", len(log))
    run.metric("trained_tokens", int(tokens))
    run.metric("flops", watch.flops)
    run.metric("tokens_per_second", tokens / seconds)
    run.metric("flops_per_second", watch.flops / seconds)
    if rate is not None:
        run.metric("matrix_flops_per_second", rate)
        run.metric("model_flops_utilization", watch.flops / seconds / rate)
    run.metric("skipped_steps", int(sum(row["skipped"] for row in log)))
    tail = [row["loss"] for row in log[-max(1, len(log) // 20) :] if math.isfinite(row["loss"])]
    if tail:
        run.metric("final_training_loss", sum(tail) / len(tail))
    run.metric("validation_loss", watch.after)
    run.metric("validation_loss_before_averaging", watch.before)
    run.metric("averaging_gain", watch.gain)
    x = np.cumsum([row["tokens"] for row in log])
    groups = np.array_split(np.arange(len(log)), min(100, len(log)))  # a plotted point is the mean loss of a group of steps
    training = [(float(x[g[-1]]), float(np.mean([log[i]["loss"] for i in g]))) for g in groups]
    series: dict[str, list[tuple[Any, float]]] = {
        "training": [point for point in training if math.isfinite(point[1])],
        "set aside": list(watch.validation),
    }
    run.figure("loss", Figure(title="Pretraining loss", x="tokens", y="nats per token", series=series))
    rates: list[tuple[Any, float]] = [(float(x[g[-1]]), log[g[-1]]["learning_rate"]) for g in groups]
    run.figure("learning_rate", Figure(title="Learning rate", x="tokens", y="learning rate", series={"rate": rates}))
