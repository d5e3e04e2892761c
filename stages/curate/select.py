"""Selection: the one stage that applies rules to documents."""

from __future__ import annotations

from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from puna.stages.contract import Documents, Signals, StageConfig, StageRun, stage
from puna.stages.curate.rules.decide import decide
from puna.stages.curate.rules.groups import (
    C4Rules,
    CodeReasoningRules,
    CodeRules,
    CuratedRules,
    DirtyWordRules,
    DivergenceRules,
    DomainRules,
    FineWebRules,
    GopherQualityRules,
    GopherRepetitionRules,
    LanguageRules,
    NgramCoverageRules,
    QualityRules,
    Rule,
    active_rules,
    check_signals,
)
from puna.stages.curate.rules.sets import RuleSet, filled
from puna.storage import Artifact, PunaError

LINE_RULE = "lines.max_ngram_coverage"


class LineRules(StageConfig):
    """Lines of kept documents that only repeat what the document said before, such as logs (Llama 3, section 3.1.1)."""

    max_ngram_coverage: Annotated[float, Field(ge=0.5, le=1)] = Field(
        0.9, description="Greatest fraction of a line's words inside n-grams seen earlier in the document"
    )
    min_words: int = Field(10, ge=1, description="Shorter lines stay, words")
    exempt_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents keep all lines")


class SelectConfig(StageConfig):
    """Groups of rules; null turns a group off, null in a group turns a rule off."""

    rule_set: RuleSet = Field("puna", description="Whose rules apply where a group or a rule is not given")
    language: LanguageRules | None = Field(None, description="Rules on language identification")
    gopher_repetition: GopherRepetitionRules | None = Field(GopherRepetitionRules(), description="Gopher's repetition rules")
    gopher_quality: GopherQualityRules | None = Field(GopherQualityRules(), description="Gopher's quality rules")
    c4: C4Rules | None = Field(C4Rules(), description="C4's rules")
    fineweb: FineWebRules | None = Field(FineWebRules(), description="FineWeb's rules")
    dirty_words: DirtyWordRules | None = Field(DirtyWordRules(), description="Rules on the adult vocabulary")
    divergence: DivergenceRules | None = Field(DivergenceRules(), description="Rules on the distance from the corpus")
    ngram_coverage: NgramCoverageRules | None = Field(NgramCoverageRules(), description="Rules on repetition within the document")
    curated: CuratedRules | None = Field(CuratedRules(), description="Rules on curated sources")
    code: CodeRules | None = Field(CodeRules(), description="Rules on source code")
    code_reasoning: CodeReasoningRules | None = Field(
        None, description="Who is a page with code or a page that reasons, what does not judge these, and their own rules"
    )
    quality: QualityRules | None = Field(None, description="Rules on the quality classifier's score")
    domains: DomainRules | None = Field(None, description="Rules on the knowledge classifier's category")
    lines: LineRules | None = Field(LineRules(), description="Removal of repeated lines from documents that are kept")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        return filled(given, [name for name in cls.model_fields if name != "rule_set"]) if isinstance(given, dict) else given


@stage(kind="documents", filters="documents")
def select(documents: Documents, signals: list[Signals], config: SelectConfig, run: StageRun) -> None:
    """Apply rules to signals: documents that no rule drops are kept.

    `dropped` says for each other document the first rule, in declared order, that fired, with its value and threshold.
    A document without a signal that a rule reads is an error; one whose signal is null (not measured) is dropped,
    except by rules on measures that do not exist for every document. From kept documents, lines whose words were nearly
    all said before go (`removed_lines`). `rules.sql` gives the same decision as a query.
    """
    if not documents.rows():
        raise PunaError(f"select: {documents.id} has no documents to select from; `dropped` of the stages before says why")
    rules = list(active_rules(config))
    carried = carried_signals(signals)
    check_signals(rules, carried)
    needed: dict[str, list[str]] = {}
    for name in dict.fromkeys(signal for rule in rules for signal in rule.signals):
        needed.setdefault(carried[name], []).append(name)
    sources = [(artifact, needed[artifact.id]) for artifact in signals if artifact.id in needed]
    lines = _line_signals(signals) if config.lines else None
    run.metric("rules", len(rules))
    run.transform(_select, documents, rules, sources, lines, config.lines)


def carried_signals(signals: list[Artifact]) -> dict[str, str]:
    """Signal → id of the artifact that carries it; PunaError where two do."""
    carried: dict[str, str] = {}
    for artifact in signals:
        for name in pq.read_schema(artifact.path("signals.parquet")).names:
            if name == "id":
                continue
            if carried.get(name, artifact.id) != artifact.id:
                raise PunaError(f"signal {name!r} is in both {carried[name]} and {artifact.id}; give one of them")
            carried[name] = artifact.id
    return carried


def signals_of(artifact: Artifact, ids: pa.ChunkedArray, columns: list[str]) -> pa.Table:
    """Columns of the signals of the documents `ids`, in their order; PunaError where a document has none."""
    if len(ids) == 0:
        return artifact.read(columns=columns).slice(0, 0)
    bounds = pc.min_max(ids)
    found = pq.read_table(
        artifact.path("signals.parquet"),
        columns=["id", *columns],
        filters=(pc.field("id") >= bounds["min"]) & (pc.field("id") <= bounds["max"]),
    )
    where = pc.index_in(ids, found["id"].combine_chunks())
    if where.null_count:
        missing = ids.filter(pc.is_null(where))[0].as_py()
        raise PunaError(
            f"document {missing} has no signals in {artifact.id} ({artifact.manifest.stage}); score the documents that are selected from"
        )
    return found.select(columns).take(where)


def _line_signals(signals: list[Artifact]) -> Artifact:
    carrying = [artifact for artifact in signals if "line_signals" in artifact.tables]
    if len(carrying) != 1:
        raise PunaError(
            f"lines.max_ngram_coverage reads the table 'line_signals', which {len(carrying)} inputs carry; "
            "give the signals of one heuristics stage, or set lines=null"
        )
    return carrying[0]


def _select(
    documents: pa.Table,
    rules: list[Rule],
    sources: list[tuple[Artifact, list[str]]],
    lines: Artifact | None,
    line_rules: LineRules | None,
) -> dict[str, pa.Table]:
    """One part: the kept documents, the dropped ones' rules, the removed lines."""
    table = documents.select(["id", "source"])
    for artifact, columns in sources:
        found = signals_of(artifact, documents["id"], columns)
        for name in columns:
            table = table.append_column(name, found[name])
    dropped = decide(table, rules)
    kept = documents.filter(pc.invert(pc.is_in(documents["id"], dropped["id"].combine_chunks())))
    made = {"documents": kept, "dropped": dropped}
    if lines is not None and line_rules is not None:
        made["documents"], made["removed_lines"] = remove_lines(kept, lines, line_rules)
    return made


def remove_lines(documents: pa.Table, lines: Artifact, rules: LineRules) -> tuple[pa.Table, pa.Table]:
    """Documents without their repeated lines, and the rows of `removed_lines`."""
    schema = pa.schema([("id", pa.string()), ("line", pa.int32()), ("text", pa.string()), ("rule", pa.string()), ("value", pa.float64())])
    judged = documents.filter(pc.invert(pc.is_in(documents["source"], pa.array(rules.exempt_sources, pa.string()))))
    if not judged.num_rows:
        return documents, schema.empty_table()
    bounds = pc.min_max(judged["id"])
    repeated = pq.read_table(
        lines.path("line_signals.parquet"),
        filters=(pc.field("id") >= bounds["min"])
        & (pc.field("id") <= bounds["max"])
        & (pc.field("words") >= rules.min_words)
        & (pc.field("ngram_coverage") > rules.max_ngram_coverage),
    )
    found: dict[str, dict[int, float]] = {}
    for row in repeated.filter(pc.is_in(repeated["id"], judged["id"].combine_chunks())).to_pylist():
        found.setdefault(row["id"], {})[row["line"]] = row["ngram_coverage"]
    texts, removed = [], []
    for identity, text in zip(documents["id"].to_pylist(), documents["text"].to_pylist(), strict=True):
        gone = found.get(identity, {})
        kept, out = without_lines(text, set(gone)) if gone else (text, {})
        removed += [{"id": identity, "line": n, "text": line, "rule": LINE_RULE, "value": gone[n]} for n, line in out.items()]
        texts.append(kept)
    at = documents.schema.get_field_index("text")
    return documents.set_column(at, documents.schema.field(at), pa.array(texts, pa.string())), pa.Table.from_pylist(removed, schema=schema)


def without_lines(text: str, gone: set[int]) -> tuple[str, dict[int, str]]:
    """The text without the lines of these numbers, and the removed lines.

    As in `line_dedup`, a line takes the blank lines after it along where what stays before it is nothing or ends in a blank
    line.
    """
    lines, kept, removed, at = text.split("\n"), [], {}, 0
    while at < len(lines):
        stop = at + 1
        if at not in gone:
            kept.append(lines[at])
        else:
            while stop < len(lines) and stop not in gone and not lines[stop].strip() and not (kept and kept[-1].strip()):
                stop += 1
            removed[at] = "\n".join(lines[at:stop])
        at = stop
    return "\n".join(kept), removed
