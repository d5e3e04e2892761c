"""`select`: removal of documents, and of lines in kept documents, by rules on signals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, SerializeAsAny, field_validator

from puna.stages import plugins
from puna.stages.contract import FAILURE, SIGNALS, Documents, Facts, Signals, StageConfig, StageRun, did_you_mean, stage
from puna.stages.contract.signals import align_signals, label_of
from puna.stages.curate.rules import groups as rules
from puna.stages.curate.rules.decide import SqlRule, abstentions, check_columns, decide, parse
from puna.stages.curate.rules.groups import RULE_GROUPS, Drop, LineRules, Rule, RuleGroup, active_rules, check_signals
from puna.storage import Artifact, PunaError
from puna.storage.schemas import table_schema

FAILED = Rule("failed", Drop(FAILURE, "not in", "keep"), ("",), (), ())  # drops documents that a stage failed to measure
LINE_TABLES = {
    "line_signals": ("lines.max_ngram_coverage", "give the signals of one heuristics stage"),
    "c4_lines": ("lines.final_punctuation or min_line_words", "give the signals of one heuristics stage with c4_lines=true"),
}
"""Table of lines → the settings that need it, and what to do if it is missing."""


class SelectConfig(StageConfig):
    """Groups of rules and how they apply. A null group is off; a null threshold turns off its rule."""

    language: rules.LanguageRules | None = Field(None, description="Rules on language identification")
    gopher_repetition: rules.GopherRepetitionRules | None = Field(rules.GopherRepetitionRules(), description="Gopher's repetition rules")
    gopher_quality: rules.GopherQualityRules | None = Field(rules.GopherQualityRules(), description="Gopher's quality rules")
    c4: rules.C4Rules | None = Field(rules.C4Rules(), description="C4's rules")
    fineweb: rules.FineWebRules | None = Field(rules.FineWebRules(), description="FineWeb's rules")
    dirty_words: rules.DirtyWordRules | None = Field(rules.DirtyWordRules(), description="Rules on the adult vocabulary")
    divergence: rules.DivergenceRules | None = Field(rules.DivergenceRules(), description="Rules on the divergence from the corpus")
    ngram_coverage: rules.NgramCoverageRules | None = Field(rules.NgramCoverageRules(), description="Rules on repetition within a document")
    notices: rules.NoticeRules | None = Field(rules.NoticeRules(), description="Rules on legal pages, and on notices in place of a page")
    curated: rules.CuratedRules | None = Field(rules.CuratedRules(), description="Rules for curated sources")
    code: rules.CodeRules | None = Field(rules.CodeRules(), description="Rules for source code")
    code_reasoning: rules.CodeReasoningRules | None = Field(rules.CodeReasoningRules(), description="Rules on pages with code or reasoning")
    quality: rules.QualityRules | None = Field(None, description="Rules on the quality classifier's score")
    harm: rules.HarmRules | None = Field(None, description="Rules on harm by category")
    domains: rules.DomainRules | None = Field(None, description="Rules on the knowledge type")
    lines: LineRules | None = Field(LineRules(), description="Removal of lines from kept documents")
    per_language: bool | None = Field(True, description="Scale thresholds by the document's language, if signals from `language` are given")
    groups: dict[str, SerializeAsAny[RuleGroup]] = Field({}, description="Rule groups from other packages or your own module, by name")
    sql: dict[str, str] = Field({}, description="SQL rules by name: conditions on signals and `source` that drop a document if true")

    @field_validator("groups", mode="before")
    @classmethod
    def _of_their_classes(cls, given: Any) -> Any:
        plugins.offers("puna.rules")
        if not isinstance(given or {}, Mapping):
            raise ValueError("give groups by name with their thresholds: {NAME: {threshold: value}}, or {NAME: {}} for the defaults")
        result = {}
        for name, values in (given or {}).items():
            if name not in RULE_GROUPS:
                raise ValueError(f"{name!r} is not a rule group of an installed package or module{did_you_mean(name, sorted(RULE_GROUPS))}")
            result[name] = values if isinstance(values, RuleGroup) else RULE_GROUPS[name].model_validate(values or {})
        return result

    @field_validator("sql", mode="before")
    @classmethod
    def _expressions(cls, given: Any) -> Any:
        if not isinstance(given or {}, Mapping):
            raise ValueError("give rules by name with their conditions: {NAME: 'words < 50'}")
        for name, expression in (given or {}).items():
            try:
                parse(name, str(expression))
            except PunaError as error:
                raise ValueError(str(error)) from error
        return given or {}

    def reaches(self) -> list[tuple[str, str]]:
        return [(RULE_GROUPS[name].__module__, RULE_GROUPS[name].__qualname__) for name in self.groups]

    def expressions(self) -> list[SqlRule]:
        return [parse(name, expression) for name, expression in self.sql.items()]


def needs(config: SelectConfig, facts: Facts) -> list[str]:
    """Return a message about the first missing signal or invalid rule, or about each missing or repeated table of lines."""
    inputs = facts.inputs.get("signals", ())
    if any(item.tables is None for item in inputs):
        return []
    carried = {column: "" for item in inputs for column in (item.tables or {}).get("signals", ())}
    try:
        check_signals(list(active_rules(config)), carried)
        check_columns(config.expressions(), {name: SIGNALS[name].field.type if name in SIGNALS else None for name in carried})
    except PunaError as error:
        return [str(error)]
    return _lines_lacking(config.lines, [item.tables or {} for item in inputs])


@stage(kind="documents", filters="documents", needs=needs)
def select(documents: Documents, signals: list[Signals], config: SelectConfig, run: StageRun) -> None:
    """Apply rules to signals, and keep the documents that no rule drops.

    Documents that could not be measured are dropped first, as `failed`. Then rules apply in order: the declared thresholds, `groups`,
    `sql`. `dropped` has the first rule that fires, with value and threshold. With signals from the stage `language`, a threshold is
    multiplied by its factor for the document's language (table `languages`). If that factor is null, the rule skips the document, which is
    counted in abstained_RULE. Every document must have a row of signals. A null signal drops the document, unless the rule allows null.
    Kept documents lose lines that repeat earlier text and, if configured, lines that C4 removes (`removed_lines`). A document that loses
    all its lines is dropped."""
    if not documents.rows():
        run.transform(_select, documents)  # the signals of an empty corpus lack the columns that rules read
        return
    thresholds, expressions = list(active_rules(config)), config.expressions()
    carried = carried_signals(signals)
    check_signals(thresholds, carried)
    check_columns(expressions, {field.name: field.type for item in signals for field in item.schema() if field.name != "id"})
    rules: list[Rule | SqlRule] = [*([FAILED] if FAILURE in carried else []), *thresholds, *expressions]
    needed: dict[str, list[str]] = {}
    for name in dict.fromkeys(signal for rule in rules for signal in rule.signals):
        needed.setdefault(carried[name], []).append(name)
    languages = next((item for item in signals if "languages" in item.tables), None) if config.per_language else None
    factors = None
    if languages is not None:
        of_language = needed.setdefault(languages.id, [])
        of_language += [name for name in ("language", "script") if name not in of_language]
        factors = languages.read("languages")
    sources = [artifact for artifact in signals if artifact.id in needed]
    beside = [artifact.beside(["id", *needed[artifact.id]]) for artifact in sources]
    if problems := _lines_lacking(config.lines, [artifact.tables for artifact in signals]):
        raise PunaError(problems[0])
    read = _lines_read(config.lines)
    lines = [next(a for a in signals if name in a.tables).beside(table=name) if name in read else None for name in LINE_TABLES]
    run.metric("rules", len(thresholds) + len(expressions))
    labels = [label_of(artifact) for artifact in sources]
    abstained = sum(map(Counter, run.transform(_select, documents, rules, factors, config.lines, *lines, labels, *beside)), Counter[str]())
    for name, count in sorted(abstained.items()):
        run.metric(f"abstained_{name}", count)


def carried_signals(signals: list[Artifact]) -> dict[str, str]:
    """Return signal → id of its artifact. Raise PunaError if two artifacts contain the same signal."""
    carried: dict[str, str] = {}
    for artifact in signals:
        for name in artifact.columns("signals"):
            if name != "id" and carried.setdefault(name, artifact.id) != artifact.id:
                raise PunaError(f"signal {name!r} is in both {carried[name]} and {artifact.id}; give one of them")
    return carried


def _lines_lacking(rules: LineRules | None, carried: Sequence[Collection[str]]) -> list[str]:
    problems = []
    for name in _lines_read(rules):
        count = sum(name in tables for tables in carried)
        if count != 1:
            rule, off = LINE_TABLES[name]
            problems.append(f"{rule} reads the table {name!r}, which {count} inputs contain; {off}, or set lines=null")
    return problems


def _lines_read(rules: LineRules | None) -> list[str]:
    if rules is None:
        return []
    flags = (rules.max_ngram_coverage is not None, rules.final_punctuation or rules.min_line_words > 0)
    return [name for name, read in zip(LINE_TABLES, flags, strict=True) if read]


def _select(
    documents: pa.Table, rules: list[Rule | SqlRule], languages: pa.Table | None, line_rules: LineRules | None, covered: pa.Table | None,
    c4: pa.Table | None, named: list[str], *signals: pa.Table,
) -> tuple[dict[str, pa.Table], dict[str, int]]:  # fmt: skip
    table = documents.select(["id", "source"])
    for name, of in zip(named, signals, strict=True):
        results = align_signals(of, documents["id"], name)
        for column in results.column_names[1:]:
            table = table.append_column(column, results[column])
    dropped, abstained = decide(table, rules, languages), {} if languages is None else abstentions(rules, table, languages)
    selection = documents.filter(pc.invert(pc.is_in(documents["id"], dropped["id"].combine_chunks())))
    tables = {"documents": selection, "dropped": dropped}
    if line_rules is not None:
        shorter, tables["removed_lines"] = remove_lines(selection, _lines_that_go(covered, c4, line_rules), line_rules)
        left = pc.or_(pc.not_equal(pc.utf8_trim_whitespace(shorter["text"]), ""), pc.equal(shorter["text"], selection["text"]))
        tables["documents"] = shorter.filter(left)
        empty = shorter.filter(pc.invert(left))["id"].to_pylist()
        gone = [{"id": identity, "rule": "lines", "detail": "no line was left"} for identity in empty]
        tables["dropped"] = pa.concat_tables([dropped, pa.Table.from_pylist(gone, schema=dropped.schema)]).sort_by("id")
    return tables, abstained


def _lines_that_go(covered: pa.Table | None, c4: pa.Table | None, rules: LineRules) -> dict[str, dict[int, tuple[str, float]]]:
    result: dict[str, dict[int, tuple[str, float]]] = {}
    if c4 is not None:
        short = pc.field("words") < rules.min_line_words
        for row in c4.filter(short | ~pc.field("final_punctuation") if rules.final_punctuation else short).to_pylist():
            open_ended = rules.final_punctuation and not row["final_punctuation"]
            rule = ("final_punctuation", 0.0) if open_ended else ("min_line_words", float(row["words"]))
            result.setdefault(row["id"], {})[row["line"]] = rule
    if covered is not None:
        repeated = (pc.field("words") >= rules.min_words) & (pc.field("ngram_coverage") > rules.max_ngram_coverage)
        for row in covered.filter(repeated).to_pylist():
            result.setdefault(row["id"], {})[row["line"]] = ("max_ngram_coverage", row["ngram_coverage"])
    return result


def remove_lines(documents: pa.Table, lines: dict[str, dict[int, tuple[str, float]]], rules: LineRules) -> tuple[pa.Table, pa.Table]:
    """Return documents without `lines` (id → line number → rule and value), except in exempt sources; and the rows of `removed_lines`."""
    texts, removed = [], []
    for identity, text, source in zip(*(documents[name].to_pylist() for name in ("id", "text", "source")), strict=True):
        gone = {} if source in rules.exempt_sources else lines.get(identity, {})
        new_text, out = without_lines(text, set(gone)) if gone else (text, {})
        for number, line in out.items():
            rule, value = gone[number]
            removed.append({"id": identity, "line": number, "text": line, "rule": f"lines.{rule}", "value": value})
        texts.append(new_text)
    at = documents.schema.get_field_index("text")
    shorter = documents.set_column(at, documents.schema.field(at), pa.array(texts, pa.string()))
    return shorter, pa.Table.from_pylist(removed, schema=table_schema("removed_lines").schema)


def without_lines(text: str, gone: set[int]) -> tuple[str, dict[int, str]]:
    """Return the text without the lines whose numbers (from 0) are in `gone`, and the removed text by line number. As in `line_dedup`,
    blank lines after a removed line are also removed if the kept text before them is empty or ends in a blank line."""
    lines, rest, removed, at = text.split("\n"), [], {}, 0
    while at < len(lines):
        stop = at + 1
        if at not in gone:
            rest.append(lines[at])
        else:
            while stop < len(lines) and stop not in gone and not lines[stop].strip() and not (rest and rest[-1].strip()):
                stop += 1
            removed[at] = "\n".join(lines[at:stop])
        at = stop
    return "\n".join(rest), removed
