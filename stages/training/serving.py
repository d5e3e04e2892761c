"""Loading of models that answer in a stage, and distribution of prompts over the stage's processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from puna.models.memory import Work
from puna.models.serving import ServingSettings, offloaded_model
from puna.models.training.parallel.layout import Layout
from puna.stages.contract import StageRun
from puna.stages.executors import ranks
from puna.stages.training.train import device, frozen_dtype, load_model, on_threads
from puna.storage import Artifact, PunaError, errors_at

if TYPE_CHECKING:
    from puna.models.generation import AnswerEngine, Completion, SamplingParams
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer


def check_shared(serving: ServingSettings, drafted: bool, run: StageRun) -> bool:
    """True if `serving` sets at most speculate, memory, layout, and there is no draft. Raise PunaError if processes cannot share it."""
    plain = serving.replace(speculate=0, memory=None, layout={}) == type(serving)() and not drafted
    if ranks.count() > 1 and not plain:
        raise PunaError(f"{run.stage}: several processes are not supported (untested) with a draft, offload, a window, weights in 8 bits "
            "or engine vllm: change only speculate and layout of `serving`, or run in one process")  # fmt: skip
    if serving.layout.axes - {"data"} and device().type != "cpu":
        raise PunaError(f"{run.stage}: serving.layout = {serving.layout}: on GPUs only data is supported (others are untested)")
    return plain


def load_served(
    artifact: Artifact, serving: ServingSettings, work: Work, run: StageRun, step_tokens: int | None = None,
    draft: Transformer | None = None,
) -> tuple[Transformer, Tokenizer, dict[str, Any]]:  # fmt: skip
    """Load a language model as configured by `serving`; return model, tokenizer and the engine's arguments.

    With offloading, a metric records the plan. `step_tokens`: longest pass outside the engine, in tokens. On a CPU, the engine is exact if
    possible, so that no answer depends on its batch or process. Raise PunaError if several processes cannot share the work."""
    from puna.kernels.exact import can_be_exact
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.training.parallel.parallel import parallel

    plain = check_shared(serving, draft is not None, run)
    if serving.offload == "none":
        own: dict[str, Any] = {"exact": True} if plain and can_be_exact(frozen_dtype(), device()) else {}
        own |= {} if serving.memory is None else {"memory": int(serving.memory * 1e9)}
        model, tokenizer = load_model(artifact, "lm", frozen=True, layout=serving.layout)
        if serving.layout.axes - {"data"}:
            try:
                own["held"] = held = parallel(model, serving.layout, ranks.mesh(serving.layout), device())
            except ValueError as error:
                raise PunaError(f"{run.stage}: {artifact.id}: serving.{error}") from error
            model = cast("Transformer", held.model)
        return model, tokenizer, own | serving.window_arguments
    with errors_at(artifact.id, ValueError):
        place = (device(), frozen_dtype())
        part = offloaded_model(artifact.path(), place, serving.offload, serving.memory, work, step_tokens, draft)
    run.metric(f"offload_{artifact.data_digest[:12]}", part.plan)
    return on_threads(part.model), Tokenizer.load(artifact.path()), part.limits | serving.window_arguments


class DealtEngine:
    """An engine that distributes prompts over a stage's processes, or groups of processes; each process gets all answers."""

    def __init__(self, engine: AnswerEngine, layout: Layout) -> None:
        self.engine, self.tokenizer, self.layout = engine, engine.tokenizer, layout

    def generate(
        self, prompts: Sequence[Sequence[int] | str], params: SamplingParams, progress: Callable[[int, int], None] | None = None
    ) -> list[list[Completion]]:
        """Return the answers of `Engine.generate`. Equal prompts go to one process, since different ones would repeat the answers."""
        from puna.models.generation import Completion

        def generate(own: list[Sequence[int] | str]) -> list[list[Completion]]:
            return self.engine.generate(own, params, progress)

        return [[Completion(*answer) for answer in some] for some in ranks.dealt(prompts, generate, self.layout, tuple)]
