"""`puna plan`: which steps of a flow would run and which are reused, and what pretraining will cost, before anything runs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from puna.flows.look import StoreOption
from puna.flows.settings import DEFAULT_STORE
from puna.storage import PunaError

if TYPE_CHECKING:
    from puna.flows.recipe import Recipe
    from puna.models.accounting import Precision
    from puna.models.config import ModelConfig
    from puna.models.machine import Machine
    from puna.stages.pretrain.pretrain import PretrainConfig

app = typer.Typer()


@app.command()
def plan(
    flow: Annotated[str, typer.Argument(metavar="FLOW", help="The flow that would run")] = "pipeline",
    recipe: Annotated[str, typer.Option(help="Name of a recipe, or a YAML file")] = "demo",
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the recipe")] = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", metavar="[NAME=]URI|ARTIFACT", help="As `puna run` takes them")] = None,
    store: StoreOption = DEFAULT_STORE,
    gpu: Annotated[str | None, typer.Option(help="Plan for this GPU (H100, H200, A100, …) in bf16, not for this CPU")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="That many of them, each with an even share of the work and the weights' state")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output")] = False,
) -> None:
    """Which steps of a flow are reused and which run, and what pretraining costs: parameters, operations, memory, time.

    A step after one that runs is made again only where that one's content is new. Documents count as filling their rows, which is
    the most that attention can cost. Time is what the measured rates of this CPU, or the data sheet of a GPU, allow; it leaves out
    communication between GPUs.
    """
    from puna.flows.planned import STATES, planned
    from puna.flows.trace import flow_named, load

    chosen = flow_named(flow)
    loaded = load(recipe, changes, flow)
    steps = planned(chosen, loaded, inputs or [], store)
    trains = any(step.stage == "pretrain" for step in steps)
    if gpu is not None and not trains:
        raise PunaError(f"--gpu {gpu}: the flow {flow} with recipe {recipe} pretrains nothing")
    found = costs(loaded, gpu, gpus) if trains else {}
    if as_json:
        typer.echo(json.dumps({**found, "steps": [asdict(step) for step in steps]}))
        return
    for step in steps:
        typer.echo(f"{step.label:24s} {step.state:7s} {step.why}")
    counts = Counter(step.state for step in steps)
    typer.echo(", ".join(f"{counts[state]} {words}" for state, words in STATES.items() if counts[state]) + "\n")
    if not found:
        return
    for name, value in found.items():
        if name != "phases":
            typer.echo(f"{name:28s} {_readable(name, value)}")
    for phase in found["phases"]:
        typer.echo(f"\nphase {phase.pop('name')}")
        for name, value in phase.items():
            typer.echo(f"  {name:26s} {_readable(name, value)}")


def costs(recipe: Recipe, gpu: str | None, gpus: int) -> dict[str, Any]:
    """The figures that `puna plan` prints, bytes and seconds as numbers."""
    from puna.models import accounting

    if gpus > 1 and gpu is None:
        raise PunaError("--gpus needs --gpu NAME: this machine's CPU is one device")
    from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
    from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
    from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer

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
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:,.4g} {letter}{'B' if 'bytes' in name else ''}"
    return f"{value:,.4g}"
