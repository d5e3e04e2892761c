"""The reasons why an artifact was made again: differences, field by field, from the nearest earlier artifact of the same step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from puna.storage.artifact import Artifact
from puna.storage.manifest import MEANING, Manifest
from puna.storage.store import Store
from puna.storage.work import Identity


@dataclass(frozen=True)
class Change:
    """One difference: what differs (`config`, `code`, `input` or the `artifact` itself), the field's name, and its old and new values."""

    what: str
    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        if self.what == "code":
            change = "changed" if self.before and self.now else ("new" if self.now else "no longer reached")
            return f"code {self.name} {change}"
        if self.what == "input" and None in (self.before, self.now):
            return f"input {self.name}: {'no longer given' if self.now is None else f'new, {self.now}'}"
        return f"{self.what} {self.name}: {_short(self.before)} → {_short(self.now)}"


def changes(before: Manifest | Identity, now: Manifest | Identity) -> list[Change]:
    """Return all differences in configuration, code and inputs that change the key."""
    differences = [Change("config", n, b, a) for n, b, a in _differences(before.config, now.config)]
    if before.code_version != now.code_version:
        differences += [Change("code", n, b, a) for n, b, a in _differences(*_without_moved(before.code, now.code))]
    if not differences and before.code_version != now.code_version:
        differences.append(Change("code", "version", before.code_version, now.code_version))
    (digests, ids), (digests_now, ids_now) = _inputs(before), _inputs(now)
    return differences + [Change("input", n, ids.get(n), ids_now.get(n)) for n, _, _ in _differences(digests, digests_now)]


def against(store: Store, identity: Identity, step: str) -> list[Change] | None:
    """Return the differences from the nearest earlier artifact of the step (fewest differences, then newest); None if there is none. If an
    artifact with this key was made before, return one change that says so. Ignore artifacts without a common input name (other imports)."""
    keys = {key for key, steps in _steps(store).items() if step in steps}
    if identity.key in keys:
        return [Change("artifact", identity.key[:12], "made before", "damaged or removed since")]
    earlier = (one for one in store.entries() if one["key"] in keys and one["stage"] == identity.stage)
    artifacts = (Artifact(one["kind"], one["key"], store.files) for one in earlier)
    names = {one.name for one in identity.inputs}
    nearest = _nearest((one for one in artifacts if not names or names & {i.name for i in one.manifest.inputs}), identity)
    return nearest[1] if nearest else None


def explain(store: Store, artifact: Artifact) -> tuple[Artifact | None, list[Change]]:
    """Return the nearest earlier artifact of the same step (of the stage if no log names the step) or None, and the differences from it."""
    now, steps_of = artifact.manifest, _steps(store)
    steps = steps_of.get(artifact.key, set())
    earlier = (
        Artifact(one["kind"], one["key"], store.files) for one in store.entries()
        if one["stage"] == now.stage and one["key"] != artifact.key and one["created_at"] < now.created_at
        and (not steps or steps & steps_of.get(one["key"], steps))
    )  # fmt: skip
    return _nearest(earlier, now) or (None, [])


def _steps(store: Store) -> dict[str, set[str]]:
    steps: dict[str, set[str]] = {}
    for run in store.runs():
        for step in store.log(run).made:
            steps.setdefault(step.key, set()).add(step.step)
    return steps


def _nearest(earlier: Iterable[Artifact], now: Manifest | Identity) -> tuple[Artifact, list[Change]] | None:
    """Return the artifact with the fewest differences (the newest on a tie), and the differences. `earlier`: artifacts, oldest first."""
    about = [(artifact, changes(artifact.manifest, now)) for artifact in earlier]
    return min(reversed(about), key=lambda one: len(one[1])) if about else None


def _without_moved(before: dict[str, str], now: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return both maps of symbol → hash without `MEANING` and without symbols that only moved to another module or folder."""
    only_before, only_now = ({(_bare(n), h) for n, h in one.items() if n not in other} for one, other in ((before, now), (now, before)))
    moved = only_before & only_now
    left = [{n: h for n, h in one.items() if n != MEANING and (_bare(n), h) not in moved} for one in (before, now)]
    return left[0], left[1]


def _bare(name: str) -> str:
    """Return the name of a symbol or file without its module or folder."""
    return name.partition(":")[2].rpartition("/")[2] if ":" in name else name.rpartition(".")[2]


def _inputs(manifest: Manifest | Identity) -> tuple[dict[str, str], dict[str, str]]:
    """Return name → kind and content digest, and name → id (of an external input: the first digits of its digest), for all inputs."""
    places: Counter[str] = Counter()
    digests, ids = dict[str, str](), dict[str, str]()
    for item in manifest.inputs:
        name = f"{item.name}[{places[item.name]}]" if places[item.name] else item.name
        digests[name] = f"{item.kind} {item.data_digest}"
        ids[name] = f"external {item.data_digest[:12]}" if item.kind == "external" else f"{item.kind}/{item.key[:12]}"
        places[item.name] += 1
    return digests, ids


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted path → value for nested dicts; lists and empty dicts are values."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    return {path: inner for name, item in value.items() for path, inner in flat(item, f"{prefix}.{name}" if prefix else name).items()}


def _differences(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, old value, new value) for each value that differs in nested dicts and lists of dicts; a missing value is None."""
    if type(before) is type(now) and _is_nested(before) and _is_nested(now):
        old, new = (one if isinstance(one, dict) else dict(enumerate(one)) for one in (before, now))
        for name in sorted(old | new):
            yield from _differences(old.get(name), new.get(name), f"{path}.{name}" if path else str(name))
    elif before != now:
        yield path, before, now


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and all(isinstance(item, dict) for item in value))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
