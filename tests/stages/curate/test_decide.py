"""Decisions by rules on signals, compared with one SQL query in DuckDB."""

from __future__ import annotations

import math

import duckdb
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.stages.contract import SIGNALS
from puna.stages.curate import code_reasoning, domains, heuristics, language, quality
from puna.stages.curate.rules.decide import decide
from puna.stages.curate.rules.groups import active_rules
from puna.stages.curate.select import SelectConfig
from puna.storage.schemas import table_schema

SCORING = (code_reasoning, domains, heuristics, language, quality)  # importing these modules declares their signals
OFF = dict.fromkeys(name for name in SelectConfig.model_fields if name not in ("groups", "sql"))


def rules_sql(config):
    """Return a DuckDB query that gives the rows of `dropped` for thresholds, from the tables `documents` and `signals`."""
    rules = list(active_rules(config))
    if not rules:
        return "select id, '' as rule, 0.0::double as value, 0.0::double as threshold, '' as detail from documents where false"
    tests = " ".join(f"when {_condition(rule)} then {index}" for index, rule in enumerate(rules))
    values, thresholds, details, names = [], [], [], []
    for index, rule in enumerate(rules):
        text = isinstance(rule.threshold, tuple)
        names.append(f"when {index} then {_string(rule.name)}")
        values.append(f"when {index} then {'null' if text else _number(rule.drop.signal)}")
        thresholds.append(f"when {index} then {'null' if text else repr(rule.number)}")
        known = f"s.{_name(rule.drop.signal)}" if text else f"case when {_number(rule.drop.signal)} is null then null else '' end"
        details.append(f"when {index} then nullif(coalesce({known}, 'not measured'), '')")
    return (
        f"select id, case n {' '.join(names)} end as rule, case n {' '.join(values)} end::double as value, "
        f"case n {' '.join(thresholds)} end::double as threshold, case n {' '.join(details)} end as detail "
        f"from (select d.id, s.* exclude (id), case {tests} end as n from documents d join signals s on d.id = s.id) s "
        "where n is not null order by id"
    )


def _condition(rule):
    if isinstance(rule.threshold, tuple):
        listed = ", ".join(map(_string, rule.threshold)) or "''"
        # An empty list has no member; '' is not a value of any signal.
        test = f"s.{_name(rule.drop.signal)} {rule.drop.when} ({listed})"
    else:
        test = f"{_number(rule.drop.signal)} {rule.drop.when} {float(rule.threshold)!r}"
    parts = [f"coalesce({test}, {'true' if rule.drop.missing == 'drop' else 'false'})"]
    if rule.kinds:
        kinds = " or ".join(f"coalesce({_number(kind.signal)} >= {float(kind.minimum)!r}, false)" for kind in rule.kinds)
        parts.append(f"({kinds})" if rule.of_kind else f"not ({kinds})")
    if rule.sources:
        parts.append(f"d.source in ({', '.join(map(_string, rule.sources))})")
    if rule.exempt_sources:
        parts.append(f"d.source not in ({', '.join(map(_string, rule.exempt_sources))})")
    return " and ".join(parts)


def _number(signal):
    name = f"s.{_name(signal)}::double"
    return f"(case when isnan({name}) then null else {name} end)"


def _name(name):
    return '"' + name.replace('"', '""') + '"'


def _string(text):
    return "'" + text.replace("'", "''") + "'"


NUMBERS = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.3, 0.65, 3.0, 10.0, 50.0, 1e6, math.nan]))


@settings(deadline=None, max_examples=12)
@given(st.data())
def test_the_decision_is_what_duckdb_finds(data):
    groups = {
        "language": {"languages": ["en", "de"]},
        "code_reasoning": {"min_code": 0.3, "min_reasoning": 0.65},
        "quality": {"min_quality": 0.3},
        "domains": {"excluded": ["sports", "it's"], "min_score": 0.1},
    }
    chosen = SelectConfig(**groups)
    rules = list(active_rules(chosen))
    count = data.draw(st.integers(1, 8))
    columns = {"id": [f"{n}" for n in range(count)]}
    for name in dict.fromkeys(signal for rule in rules for signal in rule.signals):
        kind = SIGNALS[name].field.type
        values = st.sampled_from([None, "en", "de", "it's", "sports"]) if pa.types.is_string(kind) else NUMBERS
        drawn = data.draw(st.lists(values, min_size=count, max_size=count))
        if pa.types.is_integer(kind):
            drawn = [None if v is None or v != v else int(v) for v in drawn]
        columns[name] = pa.array(drawn, kind)
    sources = data.draw(st.lists(st.sampled_from(["web", "code", "wikipedia"]), min_size=count, max_size=count))
    signals_table = table_schema("signals").conform(pa.table(columns))
    documents_table = pa.table({"id": columns["id"], "source": sources})
    expected = decide(signals_table.append_column("source", pa.array(sources)), rules)
    with duckdb.connect() as connection:
        connection.register("documents", documents_table)
        connection.register("signals", signals_table)
        assert connection.sql(rules_sql(chosen)).to_arrow_table().to_pylist() == expected.to_pylist()
        assert connection.sql(rules_sql(SelectConfig(**OFF))).fetchall() == []


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_a_language_has_thresholds_of_its_own(data):
    factors = st.sampled_from([None, 0.5, 1.0, 2.0])
    keys = [("de", "Latn"), ("th", "Thai"), ("sr", "Cyrl"), ("sr", "Latn")]
    languages = pa.table(
        {
            "language": [key[0] for key in keys], "script": [key[1] for key in keys],
            **{f"{name}_factor": pa.array([data.draw(factors) for _ in keys], pa.float64()) for name in ("words", "terminated_line_fraction")},
        }
    )  # fmt: skip
    rules = [rule for rule in active_rules(SelectConfig(code_reasoning=None)) if rule.drop.signal in ("words", "terminated_line_fraction") and rule.name[:7] != "curated"]
    count = data.draw(st.integers(1, 8))
    chosen = [data.draw(st.sampled_from([*keys, ("xx", "Latn")])) for _ in range(count)]
    words = [data.draw(st.sampled_from([None, 24, 25, 49, 50, 99, 100, 150_000, 250_000])) for _ in range(count)]
    ends = [data.draw(st.sampled_from([0.0, 0.06, 0.12, 0.2, 0.3])) for _ in range(count)]
    table = pa.table(
        {
            "id": [f"{n}" for n in range(count)], "source": ["web"] * count, "language": [key[0] for key in chosen],
            "script": [key[1] for key in chosen], "words": pa.array(words, pa.float64()), "terminated_line_fraction": ends,
        }
    )  # fmt: skip
    of = {(row["language"], row["script"]): row for row in languages.to_pylist()}
    expected = []
    for row in table.to_pylist():
        for rule in rules:
            known = of.get((row["language"], row["script"]))
            factor = 1.0 if known is None else known[f"{rule.drop.signal}_factor"]
            value = row[rule.drop.signal]
            if factor is None:  # no factor: the rule abstains, whatever the value
                continue
            if value is None or (value < rule.threshold * factor if rule.drop.when == "<" else value > rule.threshold * factor):
                expected.append((row["id"], rule.name, value, rule.threshold * factor))
                break
    found = decide(table, rules, languages).to_pylist()
    assert [(row["id"], row["rule"], row["value"], row["threshold"]) for row in found] == expected
