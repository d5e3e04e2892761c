"""Models for verifiers (artifacts in a stage's input `judges`, named by data digest), and other resources of verifiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from puna.stages.contract import StageRun
from puna.stages.endpoint import Endpoint
from puna.stages.verifiers.base import ScoringConfig
from puna.storage import Artifact, PunaError, errors_at

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

Head = Literal["lm", "scalar"]
HEADS: dict[Head, str] = {"lm": "a language model", "scalar": "a reward model"}
T = TypeVar("T")
DIGEST = 8  # minimum number of hex digits of a data digest that name a model
BATCH_TOKENS = 8192  # approximate number of tokens per forward pass of a judge


class Loaded(NamedTuple):
    """A model, ready to compute, and its tokenizer."""

    model: Transformer
    tokenizer: Tokenizer


class Judges:
    """The models in a stage's input `judges`, each loaded at its first use."""

    def __init__(self, artifacts: Sequence[Artifact]) -> None:
        self._artifacts = tuple(artifacts)
        self._loaded: dict[str, Loaded] = {}

    def find(self, verifier: str, head: Head, name: str | None) -> Loaded:
        """Return the model whose data digest begins with `name` (None: one with `head`). Raise PunaError unless exactly one fits."""
        if name is None:
            fitting = [judge for artifact in self._artifacts if (judge := self._load(artifact)).model.head == head]
            if len(fitting) == 1:
                return fitting[0]
            there = f"has {len(fitting)}, so the verifier's `model` must name one" if fitting else "has none"
            raise PunaError(f"verifier {verifier} needs {HEADS[head]}, but the input `judges` {there}")
        matches = [artifact for artifact in self._artifacts if artifact.data_digest.startswith(name)]
        if len(matches) != 1:
            names = ", ".join(artifact.data_digest[:12] for artifact in self._artifacts) or "none"
            raise PunaError(f"verifier {verifier}: not exactly one model of the input `judges` has the data digest {name}…; given: {names}")
        judge = self._load(matches[0])
        if judge.model.head != head:
            raise PunaError(f"verifier {verifier}: {matches[0].id} is {HEADS[judge.model.head]}; it needs {HEADS[head]}")
        return judge

    def _load(self, artifact: Artifact) -> Loaded:
        if artifact.data_digest not in self._loaded:
            import torch

            from puna.models.formats.checkpoint import CheckpointError, load
            from puna.models.tokens.tokenizer import Tokenizer

            with errors_at(f"{artifact.id} cannot be read", CheckpointError):
                model = load(artifact.path(), device="cuda" if torch.cuda.is_available() else "cpu")
            self._loaded[artifact.data_digest] = Loaded(model.eval(), Tokenizer.load(artifact.path()))
        return self._loaded[artifact.data_digest]


class Tools:
    """The resources of verifiers, passed to `Verifier.prepare` and `Verifier.score_many`: limits, run, models, endpoint."""

    def __init__(self, config: ScoringConfig, run: StageRun, judges: Sequence[Artifact] = ()) -> None:
        self.config = config
        self.run = run
        self.judges = Judges(judges)
        self.endpoint = None if config.endpoint is None else Endpoint(config.endpoint, run)


def chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
