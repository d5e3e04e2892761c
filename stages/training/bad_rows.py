"""Handling of rows that cannot become examples: drop them with a reason, or stop the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import Field

from puna.stages.contract import StageConfig, StageRun
from puna.stages.conversations import BadRow
from puna.storage import PunaError

T = TypeVar("T")
Row = dict[str, Any]


class BadRowsConfig(StageConfig):
    """Settings of a stage that renders rows with a chat template."""

    bad_rows: Literal["drop", "refuse"] = Field(
        "drop",
        description="A row that the chat template rejects, or that is too long: drop it, with its reason in `dropped`, or refuse the run",
    )


class Limit(NamedTuple):
    """A limit of `tokens` for a row, from the setting `field`. `what`: the measured part of the row; `remedy`: how to keep a longer row."""

    tokens: int
    field: str
    what: str = "the conversation"
    remedy: str = "raise it"


class BadRows:
    """A collector of the rows that a stage drops while it renders its input; `dropped` has them as rows of the table `dropped`.

    Rules include `chat_template` (the template rejects the row; the detail names the message), `not_messages` (a column contains no
    conversation) and `too_long` (value and threshold in tokens)."""

    def __init__(self, config: BadRowsConfig, stage: str) -> None:
        self._refuse, self._stage = config.bad_rows == "refuse", stage
        self.dropped: list[Row] = []

    def examples(
        self, rows: Iterable[Row], make: Callable[[Row], T], size: Callable[[T], int], limit: Limit,
        *others: tuple[Callable[[T], int], Limit],
    ) -> list[tuple[Row, T]]:  # fmt: skip
        """Return (row, example) for each usable row. Drop rows that `make` rejects or whose size exceeds a limit; see `drop`."""
        results = []
        for row, example in self.render(rows, make):
            over = next(((n, bound) for count, bound in ((size, limit), *others) if (n := count(example)) > bound.tokens), None)
            if over is None:
                results.append((row, example))
            else:
                tokens, bound = over
                reason = f"{bound.what} has {tokens} tokens, but {bound.field}={bound.tokens}; {bound.remedy} to keep the row"
                self.drop(row, "too_long", f"row {row['id']}: {reason}", tokens, bound.tokens)
        return results

    def render(self, rows: Iterable[Row], make: Callable[[Row], T]) -> Iterator[tuple[Row, T]]:
        """Yield (row, example) for each row that `make` accepts, whatever its size. Drop the other rows; see `drop`."""
        for row in rows:
            try:
                example = make(row)
            except BadRow as error:
                self.drop(row, error.rule, str(error))
            else:
                yield row, example

    def drop(self, row: Row, rule: str, detail: str, value: float | None = None, threshold: float | None = None) -> None:
        """Add a row to `dropped`; raise PunaError instead if the stage is set to refuse bad rows."""
        if self._refuse:
            raise PunaError(f"{self._stage}: {detail} (bad_rows=drop leaves such rows out)")
        self.dropped.append({"id": row["id"], "rule": rule, "value": value, "threshold": threshold, "detail": detail})

    def check_left(self, left: int, what: str) -> None:
        if left:
            return
        counts = ", ".join(f"{count} {rule}" for rule, count in sorted(Counter(row["rule"] for row in self.dropped).items()))
        reason = f" ({counts}). The first: {self.dropped[0]['detail']}" if self.dropped else ": there are none"
        raise PunaError(f"{self._stage}: none of the {what} can be used{reason}")

    def write(self, run: StageRun) -> None:
        """Write the table `dropped`, and counts of all dropped rows as metrics, for stages whose output rows are not their input rows."""
        # Two inputs may have rows with the same id: the table has one row per id and rule, while metrics count both.
        run.write_rows(list({(row["id"], row["rule"]): row for row in reversed(self.dropped)}.values()), "dropped")
        run.metric("dropped_rows", len(self.dropped))
        for rule, count in sorted(Counter(row["rule"] for row in self.dropped).items()):
            run.metric(f"dropped_{rule}", count)
