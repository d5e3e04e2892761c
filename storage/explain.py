"""Why an artifact was made again: field by field, against the artifact that the same stage made before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from puna.storage.artifact import Artifact
from puna.storage.manifest import Manifest
from puna.storage.store import Store
from puna.storage.work import Identity


@dataclass(frozen=True)
class Change:
    """One difference: what (`config`, `code`, `input`, the `artifact` itself), which field, and its values before and now."""

    what: str
    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        if self.what == "code":
            done = "changed" if self.before and self.now else ("new" if self.now else "no longer reached")
            return f"code {self.name} {done}"
        return f"{self.what} {self.name}: {_short(self.before)} → {_short(self.now)}"


def changes(before: Manifest | Identity, now: Manifest | Identity) -> list[Change]:
    """Every difference that enters the key."""
    found = [Change("config", n, b, a) for n, b, a in _differences(flat(before.config), flat(now.config))]
    found += [Change("code", n, b, a) for n, b, a in _differences(before.code, now.code)]
    if not found and before.code_version != now.code_version:
        found.append(Change("code", "version", before.code_version, now.code_version))
    inputs = [{f"{i.name}[{index}]": f"{i.kind} {i.data_digest[:12]}" for index, i in enumerate(m.inputs)} for m in (before, now)]
    return found + [Change("input", n, b, a) for n, b, a in _differences(*inputs)]


def against(store: Store, identity: Identity, step: str) -> list[Change] | None:
    """What differs between a stage about to run and what the same step of earlier runs made; None when it never ran.

    Of several earlier artifacts the nearest counts: fewest differences, then newest.
    """
    keys = {event["key"] for run in store.runs() for event in store.events(run) if event.get("step") == step}
    if identity.key in keys:
        return [Change("artifact", identity.key[:12], "made before", "damaged or removed since")]
    earlier = [a.manifest for a in store.artifacts() if a.key in keys and a.manifest.stage == identity.stage]
    about = [changes(m, identity) for m in reversed(earlier)]
    return min(about, key=len) if about else None


def explain(store: Store, artifact: Artifact) -> tuple[Artifact | None, list[Change]]:
    """The nearest earlier artifact of the same stage (fewest differences, then newest) and what differs."""
    now = artifact.manifest
    earlier = [
        a for a in store.artifacts()
        if a.manifest.stage == now.stage and a.key != artifact.key and a.manifest.created_at < now.created_at
    ]  # fmt: skip
    if not earlier:
        return None, []
    nearest = min(reversed(earlier), key=lambda a: len(changes(a.manifest, now)))
    return nearest, changes(nearest.manifest, now)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted path; a list, or a group without fields, is a value."""
    if isinstance(value, dict) and value:
        found: dict[str, Any] = {}
        for name, item in value.items():
            found.update(flat(item, f"{prefix}.{name}" if prefix else name))
        return found
    return {prefix: value}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(n, before.get(n), now.get(n)) for n in sorted(set(before) | set(now)) if before.get(n) != now.get(n)]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
