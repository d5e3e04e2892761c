"""The trigger of the flow `round`: enough new preferences. Puna counts them; the server's worker starts the run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from puna.flows.engine.defaults import DEFAULT_RECIPE
from puna.flows.engine.rounds import POLICY, History
from puna.stages.align.judgements import ALIAS
from puna.storage import Artifact, PunaError, Store

NOTE = "rounds"


@dataclass(frozen=True)
class Trigger:
    """Settings of automatic rounds. `preferences`: number of new ones that starts a round, 0 for never. `recipe`: of that round."""

    preferences: int = 0
    recipe: str = DEFAULT_RECIPE


def load_trigger(store: Store) -> Trigger:
    try:
        note = json.loads(store.files.read(f"{store.own(NOTE)}.json"))
        return Trigger(int(note["preferences"]), str(note["recipe"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Trigger()


def save_trigger(store: Store, trigger: Trigger) -> None:
    store.files.write(f"{store.own(NOTE)}.json", json.dumps(asdict(trigger)).encode())


def judged(store: Store) -> Artifact | None:
    """Return the preferences of people, as `judged@latest` names them."""
    return store.alias(ALIAS) if ALIAS in store.aliases() else None


def new_preferences(store: Store) -> int:
    """Return the number of human preferences that no round behind `policy@latest` has learned from."""
    preferences = judged(store)
    if preferences is None:
        return 0
    learned: set[str] = set()
    if POLICY in store.aliases():
        for earlier in History.of(store, store.alias(POLICY)).preferences:
            learned.update(earlier.read(columns=["id"])["id"].to_pylist())
    return len(set(preferences.read(columns=["id"])["id"].to_pylist()) - learned)


def due(store: Store) -> tuple[str, Trigger] | None:
    """Return a name for the round that should start now, unchanged until somebody judges again; None if none is due."""
    trigger, preferences = load_trigger(store), judged(store)
    if not trigger.preferences or preferences is None:
        return None
    try:
        enough = new_preferences(store) >= trigger.preferences
    except PunaError:  # the policy's past is no longer whole: the flow itself says so to who starts it
        return None
    return (f"{store.own('round')}-{preferences.data_digest[:24]}-{trigger.preferences}", trigger) if enough else None
