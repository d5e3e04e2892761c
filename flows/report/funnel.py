"""The funnel as numbers: rows and characters that each step took in, each rule removed, and what was left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from puna.flows.report.run import Run, Step
from puna.storage import Artifact

FUNNEL_KINDS = ("pages", "documents")
PLACES = ("closest to the threshold", "in the middle", "farthest from it")


@dataclass(frozen=True)
class Example:
    """A dropped row: where it lies among those of its rule, the decision, and the row itself when it was found."""

    place: str
    decision: Mapping[str, Any]
    row: Mapping[str, Any] | None


@dataclass
class Rule:
    """What one rule of one step removed."""

    name: str
    rows: int = 0
    characters: int | None = None
    examples: list[Example] = field(default_factory=list)


@dataclass(frozen=True)
class Level:
    """One step of the funnel: `came` rows in, `kept` rows out; lengths are characters (bytes of pages), None if unknown."""

    step: Step
    came: int
    kept: int
    rules: list[Rule]
    characters_in: int | None
    characters_out: int | None

    @property
    def dropped(self) -> int:
        """Rows that the rules removed."""
        return sum(rule.rows for rule in self.rules)

    @property
    def lost(self) -> int:
        """Rows that are neither kept nor dropped; 0 in a sound artifact."""
        return self.came - self.kept - self.dropped

    @property
    def edited(self) -> int | None:
        """Characters removed from (or, when negative, added to) documents that were kept."""
        if self.characters_in is None or self.characters_out is None:
            return None
        return self.characters_in - self.characters_out - sum(rule.characters or 0 for rule in self.rules)


def funnel(run: Run) -> list[Level]:
    """Every step that wrote pages or documents, in order."""
    return [level(run, step) for step in run.kind(*FUNNEL_KINDS)]


def level(run: Run, step: Step) -> Level:
    """One step: rules by the rows they removed, with examples fetched from the step's input."""
    sources = run.filtered(step)
    grouped = _dropped(step)
    chosen = {rule: _choose(rows) for rule, rows in grouped.items()}
    wanted = {str(row["id"]) for rows in chosen.values() for _, row in rows}
    scans = [run.scan(source, wanted) for source in sources]
    lengths = {name: length for scan in scans for name, length in scan.lengths.items()}
    found = {name: row for scan in scans for name, row in scan.rows.items()}
    rules = []
    for name, rows in grouped.items():
        examples = [Example(place, row, found.get(row["id"])) for place, row in chosen[name]]
        removed = sum(lengths.get(row["id"], 0) for row in rows) if lengths else None
        rules.append(Rule(name, len(rows), removed, examples))
    kept = step.artifact.rows() if step.artifact.kind in step.artifact.tables else 0
    came = kept + sum(rule.rows for rule in rules)
    if sources and step.artifact.kind in FUNNEL_KINDS:
        came = sum(source.rows() for source in sources)
    # Lengths before and after compare only where both are characters: pages are measured in bytes.
    comparable = lengths and all(source.kind == step.artifact.kind for source in sources)
    return Level(step, came, kept, rules, sum(lengths.values()) if comparable else None, _characters(run, step.artifact))


def _characters(run: Run, artifact: Artifact) -> int | None:
    """Length of all texts; the records of documents' shards have it, pages are read."""
    if artifact.kind not in FUNNEL_KINDS:
        return None
    known = [shard.characters for shard in artifact.record().shards]
    return run.scan(artifact).total if None in known else sum(length for length in known if length is not None)


def _dropped(step: Step) -> dict[str, list[dict[str, Any]]]:
    """Dropped rows by rule, the rule that removed most first."""
    if not step.has("dropped"):
        return {}
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for batch in step.artifact.batches("dropped"):
        for row in batch.to_pylist():
            grouped[row["rule"]].append(row)
    return dict(sorted(grouped.items(), key=lambda item: (-len(item[1]), item[0])))


def _choose(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Up to three rows: nearest to the threshold, in the middle, farthest; without numbers, the first three ids."""
    if any(row["value"] is None or row["threshold"] is None for row in rows):
        return [("", row) for row in rows[:3]]
    ordered = sorted(rows, key=lambda row: (abs(row["value"] - row["threshold"]), row["id"]))
    if abs(ordered[0]["value"] - ordered[0]["threshold"]) == abs(ordered[-1]["value"] - ordered[-1]["threshold"]):
        return [("", row) for row in ordered[:3]]
    places = {0: PLACES[0], len(ordered) // 2: PLACES[1], len(ordered) - 1: PLACES[2]}
    return [(places[index], ordered[index]) for index in sorted(places)]


def characters_per_token(run: Run) -> float | None:
    """Characters per token of the run's own tokenizer, measured on the documents it packed; None before that."""
    packed = next((s for s in reversed(run.kind("tokens")) if s.has("tokens")), None)
    if packed is None:
        return None
    documents = next((a for a in run.inputs(packed) if a.kind == "documents"), None)
    if documents is None:
        return None
    tokens: dict[str, int] = defaultdict(int)
    for batch in packed.artifact.batches("tokens", columns=["lengths", "documents"], rows=1024):
        for lengths, names in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
            for count, name in zip(lengths, names, strict=True):
                tokens[name] += count
    repeats = _repeats(run, packed)
    lengths_of = run.scan(documents).lengths
    characters = sum(lengths_of.get(name, 0) * repeats.get(name, 1) for name in tokens)
    counted = sum(count for name, count in tokens.items() if name in lengths_of)
    return characters / counted if characters and counted else None


def _repeats(run: Run, packed: Step) -> dict[str, int]:
    """Times each document is packed: held-out documents once."""
    mixture = next((a for a in run.inputs(packed) if a.kind == "mixture"), None)
    if mixture is None:
        return {}
    rows = mixture.read(columns=["id", "split", "repeats"]).to_pylist()
    return {row["id"]: max(1, row["repeats"]) if row["split"] == "train" else 1 for row in rows}
