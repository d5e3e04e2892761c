"""Decisions of rules about documents, from tables of signals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from puna.models.languages.registry import FACTOR
from puna.stages.curate.rules.expressions import SqlRule, sql_fires, sql_row
from puna.stages.curate.rules.groups import Rule
from puna.storage.schemas import table_schema

Factors = Mapping[str, NDArray[np.float64]]
"""Signal → what its thresholds are multiplied with for each document, float64[n]; NaN: the rule does not judge it."""

DROPPED = table_schema("dropped").schema


def factors_of(languages: pa.Table, table: pa.Table) -> dict[str, NDArray[np.float64]]:
    """Return the factors of documents, by their `language` and `script`, from the columns NAME_factor of the table `languages`.

    A document of a language that is not in the table has the factor 1.
    """
    keys = pc.binary_join_element_wise(languages["language"], languages["script"], "-").combine_chunks()
    results = pc.index_in(pc.binary_join_element_wise(table["language"], table["script"], "-"), keys).fill_null(len(keys))
    rows = np.array(results, np.int64)
    names = [name for name in languages.column_names if name.endswith(FACTOR)]
    return {name.removesuffix(FACTOR): np.r_[numeric(languages[name]), 1.0][rows] for name in names}


def fires(rule: Rule, table: pa.Table, sources: pa.ChunkedArray, factors: Factors | None = None) -> NDArray[np.bool_]:
    """Return a mask of the documents that the rule drops, bool[n]; `table` has its signals, `sources` is each document's source."""
    values = table[rule.drop.signal]
    judged = np.ones(len(sources), np.bool_)
    if rule.kinds:
        # A comparison with NaN, which stands for what was not measured, is false.
        judged = np.any([numeric(table[kind.signal]) >= kind.minimum for kind in rule.kinds], axis=0) == rule.of_kind
    if rule.sources:
        judged &= _among(sources, rule.sources)
    if rule.exempt_sources:
        judged &= ~_among(sources, rule.exempt_sources)
    if isinstance(rule.threshold, tuple):
        words = np.array(["" if v is None else str(v) for v in values.to_pylist()])
        missing = np.array(values.is_null())
        out = np.isin(words, rule.threshold)
        out = out if rule.drop.when == "in" else ~out
    else:
        numbers = numeric(values)
        missing = np.isnan(numbers)
        factor = (factors or {}).get(rule.drop.signal, np.ones(1))
        judged &= ~np.isnan(factor)
        out = numbers < rule.threshold * factor if rule.drop.when == "<" else numbers > rule.threshold * factor
    return judged & np.where(missing, rule.drop.missing == "drop", out)


def _among(values: pa.ChunkedArray, names: Sequence[str]) -> NDArray[np.bool_]:
    return np.asarray(pc.is_in(values, pa.array(names, pa.string())), np.bool_)


def numeric(values: pa.ChunkedArray) -> NDArray[np.float64]:
    """Return a number column as float64[n], null as NaN."""
    return np.array(values.cast(pa.float64()).fill_null(math.nan), np.float64)


def decide(table: pa.Table, rules: Sequence[Rule | SqlRule], languages: pa.Table | None = None) -> pa.Table:
    """Return the dropped documents of `table` (id, source and the rules' signals) as rows of the table `dropped`.

    With `languages` (`table` has `language` and `script` too), thresholds are those of each document's language.
    """
    factors = {} if languages is None else factors_of(languages, table)
    first = np.full(table.num_rows, len(rules), np.int64)
    for index, rule in enumerate(rules):
        gone = sql_fires(rule, table) if isinstance(rule, SqlRule) else fires(rule, table, table["source"], factors)
        first[gone & (first == len(rules))] = index
    results, places = [DROPPED.empty_table()], [np.zeros(0, np.int64)]
    for index in np.unique(first[first < len(rules)]).tolist():
        rule, at = rules[index], np.flatnonzero(first == index)
        columns = rule.columns if isinstance(rule, SqlRule) else (rule.drop.signal,)
        rows = table.select(["id", *columns]).take(pa.array(at))
        results.append(_by_condition(rule, rows) if isinstance(rule, SqlRule) else _by_threshold(rule, rows, factors, at))
        places.append(at)
    return pa.concat_tables(results).take(pa.array(np.argsort(np.concatenate(places))))


def _by_condition(rule: SqlRule, rows: pa.Table) -> pa.Table:
    dropped = [sql_row(rule, row["id"], {name: row[name] for name in rule.columns}) for row in rows.to_pylist()]
    return pa.Table.from_pylist(dropped, schema=DROPPED)


def _by_threshold(rule: Rule, rows: pa.Table, factors: Factors, at: NDArray[np.int64]) -> pa.Table:
    values, count = rows[rule.drop.signal], rows.num_rows
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), None, values)  # NaN stands for what was not measured
    if isinstance(rule.threshold, tuple):
        value = pa.nulls(count, pa.float64())
        detail = pc.coalesce(values.cast(pa.string()), pa.scalar("not measured"))
    else:
        value = values.cast(pa.float64())
        detail = pc.if_else(pc.is_null(values), pa.scalar("not measured"), pa.scalar(None, pa.string()))
    factor = factors[rule.drop.signal][at] if rule.drop.signal in factors else np.ones(count)
    threshold = pa.nulls(count, pa.float64()) if rule.number is None else pa.array(rule.number * factor)
    return pa.table([rows["id"], pa.repeat(rule.name, count), value, threshold, detail], schema=DROPPED)
