"""What rules decide about documents, from tables of signals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.stages.curate.rules.expressions import SqlRule, sql_fires, sql_row
from puna.stages.curate.rules.groups import Rule


def fires(rule: Rule, table: pa.Table, sources: NDArray[Any]) -> NDArray[np.bool_]:
    """Which documents the rule drops, bool[n]; `table` has its signals, `sources` is each document's source."""
    values = table[rule.drop.signal]
    judged = np.ones(len(sources), np.bool_)
    if rule.kinds:
        # A comparison with NaN, which stands for what was not measured, is false.
        judged = np.any([numeric(table[kind.signal]) >= kind.least for kind in rule.kinds], axis=0) == rule.of_kind
    if rule.sources:
        judged &= np.isin(sources, rule.sources)
    if rule.exempt_sources:
        judged &= ~np.isin(sources, rule.exempt_sources)
    if isinstance(rule.threshold, tuple):
        words = np.array(["" if v is None else str(v) for v in values.to_pylist()])
        missing = np.array(values.is_null())
        out = np.isin(words, rule.threshold)
        out = out if rule.drop.when == "in" else ~out
    else:
        numbers = numeric(values)
        missing = np.isnan(numbers)
        out = numbers < rule.threshold if rule.drop.when == "<" else numbers > rule.threshold
    return judged & np.where(missing, rule.drop.missing == "drop", out)


def numeric(values: pa.ChunkedArray) -> NDArray[np.float64]:
    """A number column as float64[n], null as NaN."""
    return np.array(values.cast(pa.float64()).fill_null(math.nan), np.float64)


def decide(table: pa.Table, rules: Sequence[Rule | SqlRule]) -> pa.Table:
    """The dropped documents of `table` (id, source and the rules' signals) as rows of the table `dropped`."""
    sources = np.array(table["source"].to_pylist(), dtype=object).astype("U")
    first = np.full(table.num_rows, len(rules), np.int64)
    for index, rule in enumerate(rules):
        gone = sql_fires(rule, table) if isinstance(rule, SqlRule) else fires(rule, table, sources)
        first[gone & (first == len(rules))] = index
    ids = table["id"].to_pylist()
    rows = []
    for at in np.flatnonzero(first < len(rules)):
        rule = rules[first[at]]
        if isinstance(rule, SqlRule):
            rows.append(sql_row(rule, ids[at], {name: table[name][int(at)].as_py() for name in rule.columns}))
            continue
        value = table[rule.drop.signal][int(at)].as_py()
        # Python and Arrow agree on NaN as a number; a threshold on it means "not measured".
        value = None if isinstance(value, float) and math.isnan(value) else value
        text = isinstance(rule.threshold, tuple)
        rows.append(
            {
                "id": ids[at],
                "rule": rule.name,
                "value": None if text or value is None else float(value),
                "threshold": rule.number,
                "detail": "not measured" if value is None else (str(value) if text else None),
            }
        )
    schema = pa.schema(
        [("id", pa.string()), ("rule", pa.string()), ("value", pa.float64()), ("threshold", pa.float64()), ("detail", pa.string())]
    )
    return pa.Table.from_pylist(rows, schema=schema)
