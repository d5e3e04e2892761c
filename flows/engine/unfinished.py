"""The message of an interrupted run: the saved work of its unfinished steps, and the command that resumes them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from puna.storage import Store


def command() -> str | None:
    """Return the command line that this process was given; None where it is no `puna` of a terminal."""
    program, *words = sys.argv
    return shlex.join(["puna", *words]) if Path(program).name in ("puna", "main.py") else None


def message(store: Store, keys: Mapping[str, str], go_on: str) -> str:
    """Return what is saved of each unfinished step (label → key of its artifact), and how to go on."""
    steps = [f"{label}: {saved(store, key)}" for label, key in keys.items()]
    return f"Stopped. {'; '.join(steps) or 'Every step that was begun is finished'}. {go_on}"


def saved(store: Store, key: str) -> str:
    """Return what the next attempt to make an artifact takes over: the state of trainings, finished small runs, finished parts."""
    scratch = store.files.scratch(f"work/{key}/scratch")
    trials = sum(1 for _ in scratch.glob("trial-*.json"))
    parts = sum(name.endswith(".json") for name in store.files.list(f"work/{key}/parts"))
    trainings = _trainings(scratch)
    phrases = [*trainings, *_counted(trials, "small run"), *_counted(parts, "finished part")]
    if not phrases:
        return "nothing is saved yet"
    one = len(phrases) == 1 and (trainings or trials + parts == 1)
    return f"{', '.join(phrases)} {'is' if one else 'are'} saved"


def _counted(number: int, what: str) -> list[str]:
    return [f"{number:,} {what}{'s' if number > 1 else ''}"] if number else []


def _trainings(scratch: Path) -> list[str]:
    """Return how far each training is whose state lies below the scratch folder."""
    folders = sorted({path.parent for path in scratch.rglob("step-*")})
    if not folders:
        return []
    from puna.models.training.state import load_record

    phrases = []
    for folder in folders:
        if record := load_record(folder):
            name = f"{folder.name} " if len(folders) > 1 else ""
            phrases.append(f"{name}{record['unit']} {record['done']:,} of {record['of']:,} ({record['seconds']:,.0f} s of work)")
    return phrases
