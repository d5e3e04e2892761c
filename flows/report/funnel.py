"""The funnel as numbers: rows and characters in, removed by each rule, and left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from puna.flows.report.run import Run, Step, join_rows, lengths, rows_of
from puna.stages.reading.pages import NO_PAGE
from puna.storage import Artifact

FUNNEL_KINDS = ("pages", "documents")
SAMPLED = 500
PLACES = ("closest to the threshold", "in the middle", "farthest from it")
Row = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A dropped row as an example. `place`: its rank (`PLACES`); `decision`: its row of `dropped`; `row`: the input row, if it exists."""

    place: str
    decision: Mapping[str, Any]
    row: Mapping[str, Any] | None


@dataclass
class Rule:
    name: str
    rows: int = 0
    characters: int | None = None
    examples: list[Example] = field(default_factory=list)

    @property
    def no_page(self) -> bool:
        """True if the rule's rows are input records without a page; they do not count as dropped."""
        return self.name in NO_PAGE

    @property
    def look(self) -> str:
        return "again" if self.no_page else "gone"


@dataclass(frozen=True)
class Level:
    """One step of the funnel: `came` rows in, `kept` rows out. `characters_…`: lengths of their texts (of pages, in bytes), if known."""

    step: Step
    came: int
    kept: int
    rules: list[Rule]
    characters_in: int | None
    characters_out: int | None

    @property
    def dropped_rows(self) -> int:
        """Return the number of rows that the rules removed, not counting input records without a page."""
        return sum(rule.rows for rule in self.rules) - self.no_page

    @property
    def no_page(self) -> int:
        return sum(rule.rows for rule in self.rules if rule.no_page)

    @property
    def lost_rows(self) -> int:
        """Return the number of rows that are neither kept nor dropped; 0 in a sound artifact."""
        return self.came - self.kept - self.dropped_rows - self.no_page

    @property
    def removed_characters(self) -> int | None:
        """Return the number of characters removed from kept documents; negative if characters were added, None if unknown."""
        if self.characters_in is None or self.characters_out is None:
            return None
        return self.characters_in - self.characters_out - sum(rule.characters or 0 for rule in self.rules)


def funnel(run: Run) -> list[Level]:
    return [level(run, step) for step in run.kind(*FUNNEL_KINDS)]


def level(run: Run, step: Step) -> Level:
    """Return one step of the funnel, with the step's rules by number of removed rows, and examples from the step's inputs."""
    sources = run.filtered_inputs(step)
    dropped = _dropped_by_rule(step)
    samples = {rule: among.selection() for rule, among in dropped.items()}
    ids = {str(row["id"]) for rows in samples.values() for _, row in rows}
    row_of = {name: row for source in sources for name, row in rows_of(source, ids).items()}
    # Lengths before and after are comparable only if both are in characters.
    comparable = bool(sources) and all(source.kind == step.artifact.kind == "documents" for source in sources)
    removed = _removed_characters(step, sources) if comparable else {}
    rules = []
    for name, among in dropped.items():
        examples = [Example(place, row, row_of.get(row["id"])) for place, row in samples[name]]
        rules.append(Rule(name, among.rows, removed.get(name, 0) if comparable else None, examples))
    kept = step.artifact.rows() if step.artifact.kind in step.artifact.tables else 0
    came = kept + sum(rule.rows for rule in rules)
    if sources and step.artifact.kind in FUNNEL_KINDS:
        came = sum(source.rows() for source in sources)
    characters = sum(source.record().characters for source in sources) if comparable else None
    return Level(step, came, kept, rules, characters, _length(step.artifact))


def _length(artifact: Artifact) -> int | None:
    """Return the number of characters of documents, or of bytes of pages if the stage counted them; else None."""
    total = artifact.record().characters if artifact.kind == "documents" else artifact.manifest.metrics.get("body_bytes")
    return total if isinstance(total, int) else None


def _removed_characters(step: Step, sources: list[Artifact]) -> dict[str, int]:
    """Return rule → number of characters in the documents that the rule dropped."""
    removed: dict[str, int] = defaultdict(int)
    for source in sources if step.has("dropped") else ():
        for rows, dropped in lengths(source, step.artifact.beside(["id", "rule"], "dropped")):
            sums = join_rows(dropped, rows).group_by("rule").aggregate([("characters", "sum")])
            for rule, characters in zip(sums["rule"].to_pylist(), sums["characters_sum"].to_pylist(), strict=True):
                removed[rule] += characters
    return removed


def _dropped_by_rule(step: Step) -> dict[str, Among]:
    """Return rule → number and examples of the rule's dropped rows, the largest number first."""
    by_rule: dict[str, Among] = defaultdict(Among)
    for batch in step.artifact.batches("dropped") if step.has("dropped") else ():
        rows = pa.Table.from_batches([batch])
        for rule in pc.unique(rows["rule"]).to_pylist():
            own = rows.filter(pc.equal(rows["rule"], rule))
            distance = pc.abs(pc.subtract(own["value"], own["threshold"]))
            by_rule[rule].add(own, distance.to_numpy())
    return dict(sorted(by_rule.items(), key=lambda item: (-item[1].rows, item[0])))


def characters_per_token(run: Run) -> float | None:
    """Return the characters per token of the documents that the run packed; None without packed documents."""
    packed = next((s for s in reversed(run.kind("tokens")) if s.has("tokens")), None)
    documents = next((a for a in run.inputs(packed) if a.kind == "documents"), None) if packed else None
    tokens = packed.metrics.get("tokens") if packed else None
    if packed is None or documents is None or not isinstance(tokens, int) or not tokens:
        return None
    mixture = next((a for a in run.inputs(packed) if a.kind == "mixture"), None)
    if mixture is None:
        return documents.record().characters / tokens
    characters = 0
    for rows, parts in lengths(documents, mixture.beside(["id", "split", "repeats"])):
        read = join_rows(rows, parts.filter(pc.equal(parts["split"], "train")))
        characters += pc.sum(pc.multiply(read["characters"].cast(pa.int64()), read["repeats"])).as_py() or 0
    return characters / tokens if characters else None


class Among:
    """A streaming selection of three example rows: with the smallest, median and largest number. Rows come in the order of their ids; the
    median is that of the first `SAMPLED` rows, which are a random sample, since ids are hashes."""

    def __init__(self) -> None:
        self.rows = 0
        self._numbered = True
        self._first: list[pa.Table] = []
        self._numbers: list[float] = []
        self._least: tuple[float, Row] | None = None
        self._most: tuple[float, Row] | None = None

    def add(self, rows: pa.Table, numbers: NDArray[np.float64]) -> None:
        """Add rows with their `numbers` (float64[row]; NaN for a row without a number)."""
        if not len(rows):
            return
        room = SAMPLED - len(self._numbers)
        if room > 0:
            self._first.append(rows.slice(0, room))
            self._numbers += numbers[:room].tolist()
        self.rows += len(rows)
        self._numbered = self._numbered and not np.isnan(numbers).any()
        if self._numbered:
            low, high = int(numbers.argmin()), len(numbers) - 1 - int(numbers[::-1].argmax())
            if self._least is None or numbers[low] < self._least[0]:
                self._least = (float(numbers[low]), _row(rows, low))
            if self._most is None or numbers[high] >= self._most[0]:
                self._most = (float(numbers[high]), _row(rows, high))

    def selection(self) -> list[tuple[str, Row]]:
        """Return up to three rows with their ranks (`PLACES`). If a row has no number or all numbers are equal, omit the ranks."""
        first = pa.concat_tables(self._first)
        if not self._numbered or self._least is None or self._most is None or self._least[0] == self._most[0]:
            return [("", row) for row in first.slice(0, 3).to_pylist()]
        ends = [(PLACES[0], self._least[1]), (PLACES[2], self._most[1])]
        if self.rows > 2:
            order = sorted(range(len(first)), key=lambda at: self._numbers[at])
            ends.insert(1, (PLACES[1], _row(first, order[len(order) // 2])))
        return ends


def _row(rows: pa.Table, at: int) -> Row:
    row: Row = rows.slice(at, 1).to_pylist()[0]
    return row
