"""Rules as SQL: the decision of `puna.stages.curate.rules.decide` replayed over stored signals."""

from __future__ import annotations

from puna.stages.contract import StageConfig
from puna.stages.curate.rules.groups import Rule, active_rules


def rules_sql(config: StageConfig, documents: str = "documents", signals: str = "signals") -> str:
    """A DuckDB query that gives the rows of `dropped` for thresholds: the decision of `decide`, from the tables themselves.

    `documents`: a relation with id and source. `signals`: one with id and every signal the rules read; join several
    artifacts' tables by id first.
    """
    rules = list(active_rules(config))
    if not rules:
        return f"select id, '' as rule, 0.0::double as value, 0.0::double as threshold, '' as detail from {documents} where false"
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
        f"from (select d.id, s.* exclude (id), case {tests} end as n from {documents} d join {signals} s on d.id = s.id) s "
        "where n is not null order by id"
    )


def _condition(rule: Rule) -> str:
    if isinstance(rule.threshold, tuple):
        listed = ", ".join(map(_string, rule.threshold)) or "''"
        # An empty list has no member; '' is no signal's value.
        test = f"s.{_name(rule.drop.signal)} {rule.drop.when} ({listed})"
    else:
        test = f"{_number(rule.drop.signal)} {rule.drop.when} {float(rule.threshold)!r}"
    parts = [f"coalesce({test}, {'true' if rule.drop.missing == 'drop' else 'false'})"]
    if rule.kinds:
        kinds = " or ".join(f"coalesce({_number(kind.signal)} >= {float(kind.least)!r}, false)" for kind in rule.kinds)
        parts.append(f"({kinds})" if rule.of_kind else f"not ({kinds})")
    if rule.sources:
        parts.append(f"d.source in ({', '.join(map(_string, rule.sources))})")
    if rule.exempt_sources:
        parts.append(f"d.source not in ({', '.join(map(_string, rule.exempt_sources))})")
    return " and ".join(parts)


def _number(signal: str) -> str:
    name = f"s.{_name(signal)}::double"
    return f"(case when isnan({name}) then null else {name} end)"


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _string(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
