"""Cost estimates: of a flow's steps, of pretraining (from the model's shape), and of sampling (from the model and the prompts)."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from puna.flows.engine import preflight
from puna.flows.engine.declare import Flow
from puna.flows.engine.inputs import existing_sample, parse_inputs, reads_sample
from puna.flows.engine.launch import Request, checked_inputs, stage_config, stage_inputs, target_named
from puna.flows.engine.plan import Expected, Experience, PlannedStep, Planner, plan_stage
from puna.flows.engine.recipe import Recipe
from puna.flows.engine.trace import load_stages
from puna.flows.html.markup import size
from puna.models.config import ModelConfig
from puna.models.parameters import matrix_parameters, parameters
from puna.models.training.parallel.layout import Layout
from puna.models.training.settings import ComputeSettings
from puna.stages.contract import Stage, StageConfig, Value, rank_jobs
from puna.stages.conversations import prompt_ids
from puna.stages.pretrain.pretrain import SOURCES, PretrainConfig, misfits, pretrain
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.stages.training.chosen_size import ChosenSize
from puna.stages.training.phase import Phase
from puna.stages.training.vocabulary import tokenizer_of
from puna.storage import Artifact, PunaError, Store, errors_at

if TYPE_CHECKING:
    from puna.models.accounting import Machine, Precision
    from puna.models.training.parallel.estimate import Estimate

CPU = "this CPU"
ELSEWHERE = ""  # the executor of a plan for another machine, whose memory is unknown
CPU_FLOPS = 1e20  # maximum FLOPs in a plan for this CPU: a year at 3 TFLOP/s, the rate of a fast CPU
LARGE, MOST_GPUS = "H100", 2**17  # the GPU for plans that are too large for a CPU, and the largest number of GPUs that is tried
MODEL = "times are computed; median error 7 % over 27 runs, published or measured on one H200; up to 60 % in long contexts"
REFUSED = "on GPUs: context parallelism"
LONGEST = 90 * 86_400  # maximum seconds of training if the plan chooses the number of GPUs
LOOKED_AT = 256  # maximum number of prompts that are tokenized to estimate lengths


def steps_of(request: Request, place: str, executor: str = ELSEWHERE) -> tuple[Flow | Stage, list[PlannedStep]]:
    """Return the flow or stage of a request, and its planned steps. Raise PunaError for what a run refuses before its first step, except
    for the number of processes; for a lack of memory only if `executor` is that of this machine."""
    target = target_named(request.what)
    if isinstance(target, Flow):
        return target, plan_flow(target, request.recipe_of(target), list(request.inputs), place, executor)
    config, inputs, store = _alone(target, request, place)
    if reads_sample(target) and not any(inputs.values()):  # the run fetches the sample first
        return target, [PlannedStep(target.name, target.name, "after", "input inputs")]
    preflight.check_stage(target, config, inputs, store, executor, planned=True)
    return target, [plan_stage(target, config, inputs, store)]


def plan_flow(flow: Flow, recipe: Recipe, texts: list[str], place: str, executor: str = ELSEWHERE) -> list[PlannedStep]:
    """Return a flow's planned steps. Without input texts, use the default inputs of a run. Placeholders stand for inputs that do not exist
    yet, and for required inputs that are not given. Raise PunaError as `steps_of`."""
    load_stages()
    with tempfile.TemporaryDirectory() as empty:
        try:
            store = Store.existing(place).within(recipe.project)
        except PunaError:  # there is no store yet, so nothing is reused
            store = Store.open(empty)
        planner = Planner(recipe, store, Experience(store))
        planner.walk(flow, checked_inputs(flow, recipe, texts, store, executor=executor, quiet=True, planned=True))
    return planner.steps


def _alone(stage: Stage, request: Request, place: str) -> tuple[StageConfig, dict[str, Value], Store]:
    config = stage_config(stage, request.recipe, list(request.changes))
    store = Store.existing(place).within(request.stage_project())
    parsed = parse_inputs(request.inputs, stage.inputs, store, stage.name)
    items = parsed.items or (existing_sample(store) if reads_sample(stage) else [])
    return config, stage_inputs(stage, items, parsed.named), store


def answering(stage: Stage, request: Request, place: str, gpu: str | None) -> list[dict[str, Any]]:
    """Return the minimum cost of the stage `sample` for each of its models: KV cache memory, roofline time; empty without prompts. Each
    answer counts as `max_tokens` tokens. The time excludes kernel launches, drawing tokens and communication. Bytes are per process."""
    config: Any
    config, values, _ = _alone(stage, request, place)
    inputs = {name: [item for item in items if isinstance(item, Artifact)] for name, items in stage.check(values).items()}
    rows = [row for row in inputs["prompts"][0].read().to_pylist() if row["split"] == config.split]
    return [_answers(model, rows, config, gpu) for model in inputs["models"]] if rows else []


def _answers(model: Artifact, rows: Sequence[dict[str, Any]], config: Any, gpu: str | None) -> dict[str, Any]:
    """Return the minimum costs of one model's answers to rows of prompts. Raise PunaError if not even one answer fits into memory."""
    from puna.models import accounting
    from puna.models.accounting import data_sheet
    from puna.models.formats.checkpoint import read_config
    from puna.models.generation.pages import CPU_KEYS, USUAL_ANSWERS

    shape, tokenizer, layout = read_config(model.path()), tokenizer_of(model), config.serving.layout
    parts = layout.tensor * layout.pipeline
    if gpu and parts > 1:
        raise PunaError(f"--gpu {gpu}: serving.layout = {layout}: groups that answer together are proved only on CPUs; set only data")
    precision: Precision = "bf16" if gpu else "fp32"
    lengths = [len(prompt_ids(tokenizer, row)) for row in rows[:: -(-len(rows) // LOOKED_AT)]]
    longest, mean = max(lengths), sum(lengths) / len(lengths)
    machine, token = _machine(shape, longest, gpu), accounting.cache_bytes(shape, 1, precision) / parts
    weights = accounting.ELEMENT_BYTES[precision] * parameters(shape).total / parts
    own = int(config.serving.memory * 1e9) if config.serving.memory and config.serving.offload == "none" else None
    room = own or (int((data_sheet(gpu).memory - weights) / 2) if gpu else CPU_KEYS)
    each = token * (config.max_tokens + longest / config.answers)  # all answers to a prompt share its keys and values
    at_once = min(USUAL_ANSWERS["cuda" if gpu else "cpu"], math.ceil(len(rows) * config.answers / layout.data), int(room / each))
    if at_once < 1:
        raise PunaError(f"{model.id}: an answer of {config.max_tokens} tokens to the longest prompt ({longest} tokens) needs {size(each)} "
                        f"of KV cache; there is room for {size(max(0, room))}: lower max_tokens")  # fmt: skip
    # n pipeline stages compute n micro-batches of answers, and each micro-batch reads the weights.
    batch = math.ceil(at_once / layout.pipeline)
    operations, memory = accounting.decode_time(shape, batch, longest + config.max_tokens, machine, precision)
    seconds, together = max(operations, memory) / layout.tensor, at_once * layout.data
    reading = len(rows) * mean * 2 * matrix_parameters(shape) / machine.matrix_flops / layout.processes
    steps = len(rows) * config.answers / together * config.max_tokens
    return {
        "model": model.id, "device": gpu or CPU, "layout": str(layout), "prompts": len(rows), "mean_prompt_tokens": mean,
        "longest_prompt_tokens": longest, "answers": len(rows) * config.answers, "weight_bytes": weights, "cache_bytes_per_token": token,
        "cache_bytes": at_once * each, "answers_at_once": together, "bound_by": "memory" if memory > operations else "operations",
        "most_tokens_per_second": together / seconds, "least_step_seconds": seconds, "least_prompt_seconds": reading,
        "least_seconds": reading + steps * seconds,
    }  # fmt: skip


@dataclass(frozen=True)
class Total:
    """The estimated cost of all steps to run: seconds, disk bytes, peak memory bytes. `unknown`: steps without a comparable earlier run."""

    seconds: float
    bytes: float
    memory: float
    unknown: tuple[str, ...]

    @classmethod
    def of(cls, steps: Sequence[PlannedStep]) -> Total:
        """Return the total of the steps that are not reused; memory is the maximum."""
        estimates = [step.expected for step in steps if step.expected is not None]
        unknown = tuple(step.label for step in steps if step.state != "reused" and step.expected is None)
        memory = max((one.memory for one in estimates), default=0.0)
        return cls(sum(one.seconds for one in estimates), sum(one.bytes for one in estimates), memory, unknown)

    def __str__(self) -> str:
        if not self.seconds and not self.unknown:
            return "nothing to do"
        words = [str(Expected(self.seconds, self.bytes, self.memory, 0))] if self.seconds else []
        more = f" and {len(self.unknown) - 4} more" if len(self.unknown) > 4 else ""
        besides = "without an estimate for" if self.seconds else "no estimate for"
        words += [f"{besides} {', '.join(self.unknown[:4])}{more} (no earlier run)"] if self.unknown else []
        return ", ".join(words)


@dataclass(frozen=True)
class Training:
    """A pretraining to plan. `rows`: tokens per packed row of the tokens that phases name. `recipe`: a name, empty for a stage alone."""

    recipe: str
    config: PretrainConfig
    vocab_size: int
    rows: Mapping[str, int]

    @classmethod
    def of(cls, recipe: Recipe) -> Training:
        labels = ("tokenize", *(f"tokenize_{name}" for name in SOURCES))
        own = (name if recipe.values.get(name) is not None else "tokenize" for name in labels)
        rows = [recipe.one(name, tokenize, TokenizeConfig).sequence_length for name in own]
        config, vocabulary = recipe.one("pretrain", pretrain, PretrainConfig), recipe.one("tokenizer", tokenizer, TokenizerConfig)
        return cls(recipe.name, config, vocabulary.vocab_size, dict(zip(("initial", *SOURCES), rows, strict=True)))

    @classmethod
    def alone(cls, request: Request, place: str) -> Training:
        """Return the training of the stage `pretrain`, from its inputs. Raise PunaError for phases whose tokens are not given."""
        config: Any
        config, values, _ = _alone(pretrain, request, place)
        inputs = {name: items[0] for name, items in pretrain.check(values).items() if items and isinstance(items[0], Artifact)}
        if lines := misfits(config, {*SOURCES} & {*inputs}):
            raise PunaError(lines[0])
        pieces = {name: inputs[name].read(columns=["lengths"])["lengths"].to_pylist() for name in ("tokens", *SOURCES) if name in inputs}
        rows = {name.replace("tokens", "initial"): max((sum(row) for row in some), default=1) for name, some in pieces.items()}
        return cls(request.recipe or "", config, tokenizer_of(inputs["tokenizer"]).vocab_size, rows)


def pretraining(
    target: Flow | Stage, request: Request, steps: Sequence[PlannedStep], place: str, gpu: str | None, gpus: int
) -> dict[str, Any]:
    """Return the costs of a planned pretraining run (see `costs`), or a note if `choose_size` must first choose the size."""
    from puna.models.formats.checkpoint import read_config

    training = Training.of(request.recipe_of(target)) if isinstance(target, Flow) else Training.alone(request, place)
    begins = next(step.begins for step in steps if step.stage == "pretrain")
    if begins.get("size") == "":
        return {"recipe": training.recipe, "model": "chosen by choose_size during the run; plan again once its artifact exists"}
    store = Store.existing(place) if begins.get("model") or begins.get("size") else None
    model, size = (store.resolve(begins[name]) if store and begins.get(name) else None for name in ("model", "size"))
    given, chosen = read_config(model.path()) if model else None, ChosenSize.read(size) if size else None
    return costs(training, gpu, gpus, given, chosen, bool(begins.get("tasks")))


def costs(
    planned: Training, gpu: str | None, gpus: int, given: ModelConfig | None = None, size: ChosenSize | None = None, asks: bool = False
) -> dict[str, Any]:
    """Return pretraining's figures for `puna plan`. `given`: the model to continue; `size`: from choose_size; `asks`: has `tasks`. Without
    `gpu`, plan for this CPU or, if it would take years, for as few `LARGE` GPUs as finish within `LONGEST`, else for the fastest. Raise
    PunaError for `gpus` without `gpu`, or if the training's own layout does not fit the GPUs."""
    from puna.models import accounting

    if gpus > 1 and gpu is None:
        raise PunaError("--gpus needs --gpu NAME: this machine's CPU is one device")
    training = planned.config.with_size(size) if size else planned.config
    if gpu is None:
        free = replace(planned, config=training.replace(compute=ComputeSettings()))
        if (flops := costs(free, LARGE, 1, given, None, asks)["flops"]) > CPU_FLOPS:
            needed = training.compute.layout.processes
            tried = [costs(planned, LARGE, needed, given, size, asks)]
            while (tried[-1]["seconds"] or math.inf) > LONGEST and needed < MOST_GPUS:
                needed *= 2
                tried.append(costs(planned, LARGE, needed, given, size, asks))
            large = min(reversed(tried), key=lambda one: one["seconds"] or math.inf)
            return {**large, "device": f"{large['device']} (no --gpu given; this CPU would take years for {flops:.1e} operations)"}
    context = planned.rows["initial"]

    def shape(row: int) -> ModelConfig:
        if given is None:
            return training.model.complete(planned.vocab_size, row)
        return given.replace(max_position_embeddings=max(row, given.max_position_embeddings))

    config = shape(context)
    precision: Precision = training.compute.precision_on("cuda") if gpu else "fp32"
    counts, machine = parameters(config), _machine(config, context, gpu, precision)
    phases, read = list[dict[str, Any]](), 0
    for phase in training.phases:
        row = planned.rows[phase.tokens] * phase.join_rows
        phases.append(_phase(training, phase, read, row, shape(row), machine, gpu, gpus, asks))
        read += phases[-1]["tokens"]
    states, seconds = ([phase[name] for phase in phases] for name in ("state_bytes", "seconds"))
    return {
        **({"recipe": planned.recipe} if planned.recipe else {}),
        "parameters": counts.total,
        "parameters_of_layers": counts.layers,
        "tokens": sum(phase["tokens"] for phase in phases),
        "flops": sum(phase["flops"] for phase in phases),
        "cache_bytes_per_token": accounting.cache_bytes(config, 1, precision),
        "state_bytes": None if None in states else max(states),
        "device": f"{gpus} x {gpu}" if gpu else CPU,
        **({"model": MODEL} if gpu else {}), **({"not_proved": REFUSED} if gpus > 1 else {}),
        "device_flops_per_second": machine.matrix_flops * gpus,
        "device_ops_per_byte": machine.ops_per_byte,
        "seconds": None if None in seconds else sum(seconds),
        "phases": phases,
    }


def _machine(config: ModelConfig, context: int, gpu: str | None, precision: Precision = "bf16") -> Machine:
    from puna.models.accounting import Machine, measured_machine

    if gpu is not None:
        with errors_at(f"--gpu {gpu}", ValueError):
            return Machine.gpu(gpu, precision)
    return measured_machine(config, context)


def _phase(
    training: PretrainConfig, phase: Phase, before: int, row: int, config: ModelConfig, machine: Machine, gpu: str | None, gpus: int,
    asks: bool,
) -> dict[str, Any]:
    """Return the costs of one training phase. `before`: number of tokens trained before it; `row`: tokens per packed row.
    `asks`: has `tasks`. Bytes are those of one device under the first layout."""
    from puna.models import accounting
    from puna.models.accounting import data_sheet
    from puna.models.training.parallel.estimate import Work, best_layouts, estimate

    precision: Precision = training.compute.precision_on("cuda") if gpu else "fp32"
    phase = phase.with_steps(row, before)
    step = [row] * phase.full_rows
    # Counted in full-size steps: during a batch-size ramp, a smaller step counts in proportion to its rows.
    steps = phase.growth(row, before).before(phase.steps + 1) / phase.full_rows
    at_once = max(1, min(phase.full_rows, training.compute.micro_batch_tokens // row)) * row
    time = accounting.step_time(config, step, machine, precision)
    flops = accounting.training_flops(config, step)
    moments, accumulated, layouts = training.optimizer.state_bytes, at_once < sum(step), {}
    held: list[int | None] = [accounting.state_bytes(config, precision, moments)]
    held += [accounting.peak_bytes(config, at_once, precision, less, accumulated, moments) for less in (False, True)]
    seconds: float | None = time.total
    if gpu:
        work = Work(phase.full_rows, row, at_once, precision, moments=moments, whole=asks)
        sheet, own = data_sheet(gpu), _own_layout(training, config, phase, gpus)
        ranked = best_layouts(config, work, gpus, sheet, only=own)
        layouts = {"layouts": _describe_layouts(ranked, gpu, gpus, own, phase.full_rows)}
        seconds = ranked[0].seconds if ranked and ranked[0].fits else None
        if gpus > 1:
            both = [estimate(config, replace(work, checkpointing=less), one.layout, sheet) for one in ranked[:1] for less in (False, True)]
            held = [int(both[0].state), *(int(one.bytes) for one in both)] if both else [None] * 3
    return {
        "name": phase.name, "steps": phase.steps, "tokens_per_step": sum(step), "tokens": round(sum(step) * steps), "flops": flops * steps,
        "flops_per_token": flops / sum(step), "arithmetic_intensity": accounting.intensity(config, step, precision),
        "activation_bytes": accounting.activation_bytes(config, at_once, precision), "state_bytes": held[0], "peak_bytes": held[1],
        "peak_bytes_checkpointing": held[2], **layouts, "seconds_per_step": seconds,
        "share_of_matrices": time.matrices / time.total, "share_of_attention": time.attention / time.total,
        "share_of_memory": time.memory / time.total, "seconds": None if seconds is None else seconds * steps,
    }  # fmt: skip


def _own_layout(training: PretrainConfig, config: ModelConfig, phase: Phase, gpus: int) -> Layout | None:
    """Return the training's own layout, repeated over the GPUs; None if it has none. Raise PunaError if the GPUs cannot run it."""
    ((path, own),) = rank_jobs.layouts(training)
    layout = own.repeated(gpus)
    if not own.axes:
        return None
    if layout.processes != gpus:
        more = " or a multiple of that" if own.repeats else ""
        raise PunaError(f"pretrain: {path} = {own} does not fit {gpus} GPUs; set --gpus to {own.processes}{more}")
    if why := layout.refusal("cuda", config):
        raise PunaError(f"pretrain: {path} = {own}: {why}")
    if phase.full_rows < layout.readers:
        raise PunaError(f"pretrain: {path} = {layout}: phase {phase.name} has {phase.full_rows} rows per step; {layout.readers} are needed")
    return layout


def _describe_layouts(ranked: list[Estimate], gpu: str, gpus: int, own: Layout | None, rows: int) -> list[str]:
    """Return a line for each layout that fits; if none fits, one line, which names the layout with the least memory if there is any."""
    lines = [f"{one.layout}: {one.seconds:.3g} s a step, {one.bytes / 1e9:,.0f} GB per device ({one.reason})" for one in ranked]
    if not ranked:
        return [f"no tested layout divides the step ({rows:,} rows) and the model among {gpus} devices"]
    if not ranked[0].fits:
        return [f"{own or 'no tested layout'} {'does not fit' if own else 'fits'} into {gpu}. The least memory: {lines[0]}"]
    return lines
