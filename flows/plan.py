"""`puna plan`: the steps that a flow would run or reuse, and the cost of pretraining, before anything runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from puna.flows.look import ProjectOption, StoreOption
from puna.flows.program import Flow
from puna.flows.report.markup import duration, size
from puna.flows.settings import DEFAULT_RECIPE, DEFAULT_STORE
from puna.storage import PunaError, Store

if TYPE_CHECKING:
    from puna.flows.experience import Expected
    from puna.flows.launch import Request
    from puna.flows.planned import Planned
    from puna.flows.recipe import Recipe
    from puna.models.accounting import Precision
    from puna.models.config import ModelConfig
    from puna.models.machine import Machine
    from puna.stages.contract import Stage
    from puna.stages.pretrain.pretrain import PretrainConfig

app = typer.Typer()
CPU_FLOPS = 1e20
"""Operations beyond which a plan is not for this CPU: a year at 3 TFLOP/s, which is a fast CPU's rate."""
LARGE, LARGE_BYTES = "H100", 80e9
"""GPU of a plan that is too large for a CPU, and its memory; half of it may hold the state."""
LONGEST = 90 * 86_400
"""Seconds that such a plan may take."""


@app.command()
def plan(
    what: Annotated[str, typer.Argument(metavar="FLOW|STAGE", help="What would run")] = "pipeline",
    recipe: Annotated[
        str | None, typer.Option(help="Name of a recipe, or a YAML file (default: demo for a flow; a stage alone keeps its defaults)")
    ] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the recipe")] = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", metavar="[NAME=]URI|ARTIFACT", help="As `puna run` takes them")] = None,
    store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None,
    gpu: Annotated[str | None, typer.Option(help="Plan for this GPU (H100, H200, A100, …) in bf16, not for this CPU")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that share the work evenly: a supposition, as Puna trains on one device")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output")] = False,
) -> None:
    """Show the steps that are reused or would run, with their cost; of pretraining also parameters, operations, memory and time.

    Time, disk and memory of a step are estimated from its earlier runs in the store. A step after one that runs is computed again only
    if that one's content is new. Pretraining is computed from the model's shape. Each row counts as one document, which costs the most
    attention. The time is that of this CPU's measured rates, or of a GPU's data sheet. Puna trains on one device today: a time for
    several GPUs supposes that they share the work evenly, and leaves out their communication.
    """
    from puna.flows.launch import Request
    from puna.flows.planned import STATES
    from puna.flows.trace import load

    chosen, steps = steps_of(Request(what, recipe, tuple(changes or ()), tuple(inputs or ()), project=project or ""), store)
    trains = isinstance(chosen, Flow) and any(step.stage == "pretrain" for step in steps)
    if gpu is not None and not trains:
        raise PunaError(f"--gpu {gpu}: {what}{f' with recipe {recipe}' if recipe else ''} pretrains nothing")
    found = costs(load(recipe or DEFAULT_RECIPE, changes, chosen.name), gpu, gpus) if trains else {}
    if as_json:
        typer.echo(json.dumps({**found, "steps": [asdict(step) for step in steps], "expected": asdict(Total.of(steps))}))
        return
    for step in steps:
        typer.echo(f"{step.label:24s} {step.state:7s} {step.why}{_expected(step.expected)}")
    counts = Counter(step.state for step in steps)
    typer.echo(", ".join(f"{counts[state]} {words}" for state, words in STATES.items() if counts[state]))
    typer.echo(f"{Total.of(steps)}\n")
    if not found:
        return
    for name, value in found.items():
        if name != "phases":
            typer.echo(f"{name:28s} {_readable(name, value)}")
    for phase in found["phases"]:
        typer.echo(f"\nphase {phase.pop('name')}")
        for name, value in phase.items():
            typer.echo(f"  {name:26s} {_readable(name, value)}")


def steps_of(request: Request, place: str) -> tuple[Flow | Stage, list[Planned]]:
    """What the request names, and its steps as a run would find them; PunaError as such a run would say."""
    from puna.flows.inputs import meant
    from puna.flows.launch import chosen, stage_config
    from puna.flows.planned import planned, planned_stage
    from puna.flows.running import given_to

    found = chosen(request.what)
    if isinstance(found, Flow):
        return found, planned(found, request.recipe_of(found), list(request.inputs), place)
    config = stage_config(found, request.recipe, list(request.changes))
    store = Store.existing(place).within(request.stage_project())
    wanted = meant(request.inputs, found.inputs, store, found.name)
    return found, [planned_stage(found, config, given_to(found, wanted.items, wanted.named), store)]


@dataclass(frozen=True)
class Total:
    """What the steps that run may cost together: seconds, bytes on disk, bytes of memory at the most. `unknown`: steps that no earlier
    run tells of."""

    seconds: float
    bytes: float
    memory: float
    unknown: tuple[str, ...]

    @classmethod
    def of(cls, steps: Sequence[Planned]) -> Total:
        """The sum of the steps that are not reused."""
        known = [step.expected for step in steps if step.expected is not None]
        unknown = tuple(step.label for step in steps if step.state != "reused" and step.expected is None)
        memory = max((one.memory for one in known), default=0.0)
        return cls(sum(one.seconds for one in known), sum(one.bytes for one in known), memory, unknown)

    def __str__(self) -> str:
        if not self.seconds and not self.unknown:
            return "nothing is to be done"
        words = [f"about {duration(self.seconds)}, {size(self.bytes)} of disk, {size(self.memory)} of memory"] if self.seconds else []
        more = f" and {len(self.unknown) - 4} more" if len(self.unknown) > 4 else ""
        words += [f"no earlier run tells what {', '.join(self.unknown[:4])}{more} may cost"] if self.unknown else []
        return "; ".join(words)


def _expected(expected: Expected | None) -> str:
    return "" if expected is None else f" · about {duration(expected.seconds)}, {size(expected.bytes)}, {size(expected.memory)} of memory"


def costs(recipe: Recipe, gpu: str | None, gpus: int) -> dict[str, Any]:
    """Return the figures that `puna plan` prints, bytes and seconds as numbers.

    Without `gpu` the device is this CPU. Where that takes years, it is as many `LARGE` GPUs as hold the state and end within `LONGEST`.
    """
    from puna.models import accounting

    if gpus > 1 and gpu is None:
        raise PunaError("--gpus needs --gpu NAME: this machine's CPU is one device")
    from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
    from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
    from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer

    if gpu is None:
        large = costs(recipe, LARGE, 1)
        if large["flops"] > CPU_FLOPS:
            needed = 1
            while large["state_bytes"] > needed * LARGE_BYTES / 2 or large["seconds"] > needed * LONGEST:
                needed *= 2
            why = f"no --gpu given; this CPU would take years for {large['flops']:.1e} operations"
            planned = costs(recipe, LARGE, needed)
            return {**planned, "device": f"{planned['device']} ({why})"}
    training, packing = recipe.one("pretrain", pretrain, PretrainConfig), recipe.one("tokenize", tokenize, TokenizeConfig)
    vocab_size = recipe.one("tokenizer", tokenizer, TokenizerConfig).vocab_size
    context = packing.sequence_length
    config = training.model.complete(vocab_size, context)
    parameters, machine = accounting.parameters(config), _machine(config, context, gpu)
    phases = [_phase(training, number, (vocab_size, context), machine, gpu, gpus) for number in range(len(training.phases))]
    return {
        "recipe": recipe.name,
        "parameters": parameters.total,
        "parameters_of_layers": parameters.layers,
        "tokens": sum(phase["tokens"] for phase in phases),
        "flops": sum(phase["flops"] for phase in phases),
        "cache_bytes_per_token": accounting.cache_bytes(config, 1, "bf16" if gpu else "fp32"),
        "state_bytes": accounting.state_bytes(config, "bf16" if gpu else "fp32") // gpus,
        "device": f"{gpus} x {gpu}" if gpu else "this CPU",
        **({"supposes": f"Puna trains on one device today; the time supposes that {gpus} share the work evenly"} if gpus > 1 else {}),
        "device_flops_per_second": machine.matrix_flops * gpus,
        "device_ops_per_byte": machine.ops_per_byte,
        "seconds": sum(phase["seconds"] for phase in phases),
        "phases": phases,
    }


def _machine(config: ModelConfig, context: int, gpu: str | None) -> Machine:
    from puna.models.machine import Machine
    from puna.models.probe import measure

    if gpu is not None:
        try:
            return Machine.gpu(gpu)
        except ValueError as error:
            raise PunaError(f"--gpu {gpu}: {error}") from error
    return measure(config, context)


def _phase(training: PretrainConfig, number: int, sizes: tuple[int, int], machine: Machine, gpu: str | None, gpus: int) -> dict[str, Any]:
    """The costs of one phase; `sizes`: vocabulary and tokens of a packed row."""
    from puna.models import accounting

    phase = training.phases[number]
    precision: Precision = "bf16" if gpu else "fp32"
    row = sizes[1] * phase.join_rows
    config = training.model.complete(sizes[0], row)
    step = [row] * phase.rows_per_step
    # Steps of the full size: a ramp's first ones count for the rows they read.
    steps = phase.growth().before(phase.steps + 1) / phase.rows_per_step
    at_once = max(1, min(phase.rows_per_step, training.compute.micro_batch_tokens // row)) * row
    time = accounting.step_time(config, step, machine, precision)
    flops = accounting.training_flops(config, step)
    # What is sharded is the state; every GPU holds the activations of its own rows.
    resting = accounting.state_bytes(config, precision)
    accumulated = at_once < sum(step)
    peak, checkpointing = (accounting.peak_bytes(config, at_once, precision, less, accumulated) for less in (False, True))
    return {
        "name": phase.name,
        "steps": phase.steps,
        "tokens_per_step": sum(step),
        "tokens": round(sum(step) * steps),
        "flops": flops * steps,
        "flops_per_token": flops / sum(step),
        "arithmetic_intensity": accounting.intensity(config, step, precision),
        "activation_bytes": accounting.activation_bytes(config, at_once, precision),
        "peak_bytes": peak - resting + resting // gpus,
        "peak_bytes_checkpointing": checkpointing - resting + resting // gpus,
        "seconds_per_step": time.total / gpus,
        "share_of_matrices": time.matrices / time.total,
        "share_of_attention": time.attention / time.total,
        "share_of_memory": time.memory / time.total,
        "seconds": time.total / gpus * steps,
    }


def _readable(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if name.startswith("share"):
        return f"{value:.0%}"
    if name.endswith("seconds"):
        return f"{value:,.0f} s ({value / 3600:,.1f} h)" if value >= 10 else f"{value:.3g} s"
    for unit, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:,.4g} {letter}{'B' if 'bytes' in name else ''}"
    return f"{value:,.4g}"
