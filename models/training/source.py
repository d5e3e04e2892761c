"""The source of a training's rollouts: the ranks that train sample them in turn, or ranks of their own meanwhile."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from puna.models.training.rollouts import Remember, Rollouts, Sampled
from puna.models.training.state import remembered
from puna.models.training.trainer import computing_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from puna.models.training.loop import TrainLog
    from puna.models.training.settings import ComputeSettings


class Source:
    """Rollouts, sampled when they are asked for.

    folder: of a training's state, in which waves of answers are kept until their rollout ends. identity: of the training. `follow` is
    called after each wave. `seconds`: time that this rank sampled, or waited, since it was last set to 0.
    """

    def __init__(self, rollouts: Rollouts[Any], folder: Path | None, identity: dict[str, Any]) -> None:
        assert rollouts.groups is not None
        self._rollouts, self._groups, self._folder = rollouts, rollouts.groups, folder
        self._names = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self.follow: Callable[[], object] = lambda: None
        self.seconds = 0.0
        self._sampled: Sampled | None = None

    def ask(self, rollout: int, version: int) -> None:
        """Have a rollout sampled with the policy's weights as they are, which had been trained on `version` rollouts."""
        with self._timed():
            if self._groups.apart:
                self._groups.ask(self._rollouts.policy, {"rollout": rollout, "version": version})
            else:
                self._sampled = self._rollouts.sample(rollout, self._remember(rollout), version)

    def take(self) -> Sampled:
        """Return the rollout that was asked for."""
        with self._timed():
            if self._groups.apart:
                return Sampled.read(self._groups.take(self.follow))
        assert self._sampled is not None
        return self._sampled

    def keep(self, rollout: int, rows: list[dict[str, Any]]) -> None:
        """Keep the rows of a rollout's answers."""
        self._rollouts.keep(rollout, rows)

    def beat(self) -> None:
        """Show the ranks that sample that this one is at work."""
        self._groups.beat()

    def forget(self, rollout: int) -> None:
        """Remove the waves of a rollout."""
        if self._folder is not None:
            shutil.rmtree(self._of(rollout), ignore_errors=True)

    def end(self, log: TrainLog) -> None:
        """Let ranks that sample end with the same log."""
        if self._groups.apart:
            self._groups.end(json.dumps(log))

    def serve(self, compute: ComputeSettings) -> TrainLog:
        """Sample what the ranks that train ask for, and return their log."""
        policy, self.follow = self._rollouts.policy, self._groups.give
        with computing_in(policy, compute.precision_on(policy.model.embed_tokens.weight.device.type)):
            for order in self._groups.orders(policy):
                if "end" in order:
                    break
                sampled = self._rollouts.sample(order["rollout"], self._remember(order["rollout"]), order["version"])
                self._groups.give(sampled.text())
        log: TrainLog = json.loads(order["end"])
        return log

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def _of(self, rollout: int) -> Path:
        assert self._folder is not None
        return self._folder / f"rollout-{rollout}-{self._names}"

    def _remember(self, rollout: int) -> Remember:
        def remember(name: str, make: Callable[[], Any]) -> Any:
            value = make() if self._folder is None else remembered(self._of(rollout) / f"{name}.json", make)
            self.follow()
            return value

        return remember
