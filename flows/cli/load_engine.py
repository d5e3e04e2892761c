"""Functions that load the engine of a model named on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from puna.models.memory import Work
from puna.models.serving import ServingSettings, Weights, engine_of, offloaded_model
from puna.models.settings import problems
from puna.storage import Artifact, PunaError, Store, errors_at
from puna.storage.errors import DamagedArtifact

if TYPE_CHECKING:
    from puna.models.generation import Engine
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer


def load_engine(
    model: str, store: Callable[[], Store], serving: ServingSettings, draft: str | None = None,
    work: Callable[[Tokenizer, int], Work] | None = None,
    draft_weights: Weights = "same", **limits: Any,
) -> Engine:  # fmt: skip
    """Return the engine of a model, named by artifact, folder or file. Raise PunaError if the model cannot be loaded. `store`: a function
    that opens the store. `limits`: see `engine_of`. With `serving.offload`, print the memory plan on standard error; for the plan, `work`
    returns the workload, given the tokenizer and the context in tokens, and only the limit `step_tokens` is used."""
    if draft is None and draft_weights != "same":
        raise PunaError("--draft-weights: there is no draft model; name one with --draft, or leave this out")
    with errors_at(model, ValueError, FileNotFoundError):
        smaller = None if draft is None else _load_model(draft, store)
        if serving.offload == "none":
            memory = None if serving.memory is None else int(serving.memory * 1e9)
            network, tokenizer = _load_model(model, store)
            engine_limits = {"memory": memory, **serving.window_arguments, **limits}
            return engine_of(network, tokenizer, serving.weights, smaller, draft_weights=draft_weights, **engine_limits)
        return _engine_in_part(model, store, serving, smaller, work, limits.get("step_tokens"), draft_weights)


def _engine_in_part(
    model: str, store: Callable[[], Store], serving: ServingSettings, draft: tuple[Transformer, Tokenizer] | None,
    work: Callable[[Tokenizer, int], Work] | None, step_tokens: int | None, draft_weights: Weights,
) -> Engine:  # fmt: skip
    from puna.models.formats.checkpoint import read_config
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.stages.training.train import device, frozen_dtype

    folder = Path(model) if Path(model).exists() else _artifact(model, store).path()
    context = read_config(folder).max_position_embeddings
    tokenizer, place = Tokenizer.load(folder), (device(), frozen_dtype())
    workload = Work(longest=context) if work is None else work(tokenizer, context)
    smaller = None if draft is None else draft[0]
    part = offloaded_model(folder, place, serving.offload, serving.memory, workload, step_tokens, smaller)
    typer.echo(part.plan, err=True)
    return engine_of(part.model, tokenizer, "same", draft, draft_weights=draft_weights, **part.limits, **serving.window_arguments)


def serving_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with `serving` replaced by one option per `ServingSettings` field, except `engine`, `gpu_memory` and `layout`."""
    fields = {name: field for name, field in ServingSettings.model_fields.items() if name not in ("engine", "gpu_memory", "layout")}

    def run(**values: Any) -> None:
        try:
            serving = ServingSettings.model_validate({name: values.pop(name) for name in fields})
        except ValidationError as error:
            raise PunaError("; ".join(problems(error))) from error
        command(**values, serving=serving)

    own = dict(inspect.signature(command, eval_str=True).parameters)
    options = [*own.values()]
    place = list(own).index("serving")
    options[place : place + 1] = [
        inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=field.default,
            annotation=Annotated[field.annotation, typer.Option(help=field.description)],
        )
        for name, field in fields.items()
    ]  # fmt: skip
    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return run


def _load_model(model: str, store: Callable[[], Store]) -> tuple[Transformer, Tokenizer]:
    from puna.models.formats.checkpoint import CheckpointError, load_with_tokenizer
    from puna.stages.training.train import device, frozen_dtype, load_model

    if not Path(model).exists():
        return load_model(_artifact(model, store), "lm", frozen=True)
    with errors_at(model, CheckpointError):
        return load_with_tokenizer(model, "lm", frozen_dtype(), device())


def _artifact(model: str, store: Callable[[], Store]) -> Artifact:
    try:
        opened = store()
        return opened.check(opened.resolve(model), whole=True)
    except DamagedArtifact:
        raise
    except PunaError as error:
        raise PunaError(f"{model}: there is no such file or folder, and no such artifact: {error}") from error
