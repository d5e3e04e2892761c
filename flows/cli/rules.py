"""The command `puna rules`: good text lost and bad text caught by each rule of a recipe, on annotated pages."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import typer
from numpy.typing import NDArray

from puna.flows.cli.clean import RECIPE
from puna.flows.cli.inspect import ModuleOption, import_modules, print_rows
from puna.flows.engine.console import json_text
from puna.flows.engine.recipe import Recipe, Step, read_values
from puna.flows.engine.trace import fields, flow_named, load
from puna.stages.contract import Value, execute
from puna.stages.curate.extract import ExtractConfig, Unreadable, extract, page_text
from puna.stages.curate.rules.decide import SqlRule, factors_of, fires, sql_fires
from puna.stages.curate.rules.groups import Rule, active_rules
from puna.stages.curate.select import SelectConfig
from puna.stages.reading.rows import Fault, format_of, read_rows
from puna.storage import Artifact, PunaError, Store

WORD = re.compile(r"\w+")
GOOD = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}  # values of `good`, as text in lower case
WHEN = datetime(2024, 1, 1, tzinfo=UTC)
MOST_BYTES = 1 << 26  # maximum bytes of a row of annotated pages
ALL = "all"
LINES = "select.lines"

app = typer.Typer()
Mask = NDArray[np.bool_]


class Page(NamedTuple):
    """An annotated page; bytes are decoded as in curation. `truth`: its text's good part; None: `good` says if the whole text is good."""

    body: str | bytes
    html: bool
    truth: str | None = None
    good: bool = True
    type: str = ""
    language: str = ""


class Tally(NamedTuple):
    """Counts of pages and of their good and bad words."""

    pages: int
    good: int
    bad: int


@dataclass(frozen=True)
class RuleRow:
    """The drops of a rule by group of pages (`all`, `type=…`, `language=…`): `alone`, and on pages where it is the `first` to fire."""

    rule: str
    condition: str
    alone: Mapping[str, Tally]
    first: Mapping[str, Tally]


@dataclass(frozen=True)
class Evidence:
    """The drops of a recipe's rules, in order. `whole`: group → tally of all its pages; `unjudged`: rules whose signals are missing."""

    recipe: str
    rows: Sequence[RuleRow]
    whole: Mapping[str, Tally]
    unjudged: Sequence[str]

    def loss(self, group: str = ALL) -> float:
        """Return the share of a group's good words that all rules together drop."""
        return sum(row.first[group].good for row in self.rows if group in row.first) / max(1, self.whole[group].good)


def read_annotated(path: Path) -> list[Page]:
    """Return the annotated pages in a file (Parquet, JSON lines, CSV). Raise PunaError for a wrong row, or if there are no rows."""
    pages: list[Page] = []
    try:
        with path.open("rb") as handle:
            for row in read_rows(handle, f"rules: {path}", format_of(path.name, b"") or "json", MOST_BYTES):
                if isinstance(row, Fault):
                    raise PunaError(f"rules: {path}: row {row.number} {f'{row.field} {row.reason}'.strip()}")
                pages.append(_page(row.fields, f"rules: {path}: row {row.number}"))
    except OSError as error:
        raise PunaError(f"rules: {path} cannot be read: {error.strerror or error}") from error
    if not pages:
        raise PunaError(f"rules: {path} has no rows")
    return pages


def _page(row: Mapping[str, Any], where: str) -> Page:
    html = isinstance(row.get("html"), str | bytes) and bool(row["html"] or not row.get("text"))
    body = row["html"] if html else row.get("text")
    truth, said = row.get("truth"), row.get("good")
    good = GOOD.get(str(said).lower())
    if not isinstance(body, str | bytes):
        raise PunaError(f"{where} needs the field html or text")
    if not isinstance(truth, str) and good is None:
        raise PunaError(f"{where} needs the field truth (the good part of the page's text) or good (true or false, for the whole text); "
            f"truth is {truth!r:.40}, good is {said!r:.40}")  # fmt: skip
    kind, code = (str(row.get(name) or "") for name in ("type", "language"))
    stated = isinstance(truth, str) and bool(truth or not isinstance(good, bool))  # an empty cell beside `good` is no truth
    return Page(body, html, truth if stated else None, bool(good), kind, code)


class Annotations:
    """Annotated pages, with each page's number of `good` and `bad` words (int64[page]). Pages with text are imported as documents."""

    def __init__(self, pages: Sequence[Page], store: Store, config: ExtractConfig) -> None:
        self.pages, self.store = pages, store
        self.texts = [_text(page, config) for page in pages]
        self.readable = np.array([text is not None for text in self.texts])
        counts = [_words(text, page) for text, page in zip(self.texts, pages, strict=True)]
        self.good, self.bad = np.array(counts, np.int64).reshape(-1, 2).T
        rows = [
            {"id": f"{n:032x}", "url": f"https://page.example/{n}", "fetched_at": WHEN, "source": "web", "title": None, "text": text}
            for n, text in enumerate(self.texts) if text is not None
        ]  # fmt: skip
        if not rows:
            raise PunaError("rules: no text can be extracted from any of the annotated pages")
        self.documents = store.import_table("documents", pa.Table.from_pylist(rows))

    def groups(self, languages: Sequence[str]) -> dict[str, Mask]:
        """Return name → bool[page] for groups of pages: all, by type, by language (that of `languages`, per document, if not annotated)."""
        result = {ALL: np.ones(len(self.pages), np.bool_)}
        labels = iter(languages)
        codes = [next(labels) if readable else "" for readable in self.readable]
        facets = {"type": [page.type for page in self.pages], "language": [p.language or c for p, c in zip(self.pages, codes, strict=True)]}
        for what, values in facets.items():
            result |= {f"{what}={value}": np.array(values) == value for value in sorted(set(values)) if value}
        return result

    def tally(self, mask: Mask, groups: Mapping[str, Mask], cut: NDArray[np.int64]) -> dict[str, Tally]:
        """Return the tally of the pages of `mask` by group. `cut`: int64[2, page], good and bad words that were removed before."""
        counts = (mask, self.good - cut[0], self.bad - cut[1])
        return {name: Tally(*(int(of[mask & group].sum()) for of in counts)) for name, group in groups.items()}


def _text(page: Page, config: ExtractConfig) -> str | None:
    if isinstance(page.body, str) and not page.html:
        return page.body
    body = page.body if isinstance(page.body, bytes) else page.body.encode("utf-8", "replace")
    try:
        return page_text(body, "text/html" if page.html else "text/plain", "utf-8", config).text
    except Unreadable:
        return None


def _words(text: str | None, page: Page) -> tuple[int, int]:
    """Return the numbers of good and bad words. If no text was extracted, all words of `truth` are good."""
    words = Counter(WORD.findall(text or ""))
    if page.truth is None:
        return (words.total(), 0) if page.good else (0, words.total())
    truth = Counter(WORD.findall(page.truth))
    good = truth.total() if text is None else (words & truth).total()
    return good, words.total() - good if text is not None else 0


def evidence(pages: Annotations, recipe: str, changes: Sequence[str] = ()) -> Evidence:
    """Apply each rule of a recipe's selections to the pages, alone and after others. Skip rules of classifiers that the recipe trains. A
    recipe file without `base` inherits from `clean`, as in `puna clean`."""
    loaded = load(recipe, list(changes), "curate", RECIPE)
    steps = fields(flow_named("curate"))
    signals, artifacts = _signals(pages, loaded, steps)
    groups = pages.groups(signals["language"].to_pylist() if "language" in artifacts else [""] * signals.num_rows)
    gone, rows, unjudged = ~pages.readable, [], []
    none = cut = np.zeros((2, len(pages.pages)), np.int64)
    if gone.any():
        tally = pages.tally(gone, groups, none)
        rows.append(RuleRow("extract", "no text", tally, tally))
    for step in ("select", "select_model"):
        for config in loaded.configs(steps[step]):
            assert isinstance(config, SelectConfig)
            config, lacking = _at_hand(config, signals.column_names)
            unjudged += [f"{step}.{name}" for name in lacking]
            languages = artifacts.get("language") if config.per_language else None
            factors = factors_of(languages.read("languages"), signals) if languages is not None else {}
            rules: list[Rule | SqlRule] = [*active_rules(config), *config.expressions()]
            for rule in rules:
                if isinstance(rule, SqlRule):
                    fired, condition = sql_fires(rule, signals), rule.expression
                else:
                    fired = fires(rule, signals, signals["source"], factors)
                    condition = f"{rule.drop.signal} {rule.drop.when} {rule.threshold}"
                mask = np.zeros(len(gone), np.bool_)
                mask[pages.readable] = fired
                if mask.any():
                    alone, first = pages.tally(mask, groups, none), pages.tally(mask & ~gone, groups, cut)
                    rows.append(RuleRow(f"{step}.{rule.name}", condition, alone, first))
                gone = gone | mask
            if config.lines is not None and step == "select":
                inputs: dict[str, Value] = {"documents": pages.documents, "signals": [*artifacts.values()]}
                before, lines = cut, _cut(pages, execute(steps[step].stage, config, inputs, pages.store))
                cut = np.maximum(cut, np.where(gone, 0, lines))
                if (cut > before).any():
                    tally = {name: Tally(0, *(cut - before)[:, group].sum(1).tolist()) for name, group in groups.items()}
                    rows.append(RuleRow(LINES, "lines that repeat earlier ones", tally, tally))
    return Evidence(loaded.name, rows, pages.tally(groups[ALL], groups, none), unjudged)


def _signals(pages: Annotations, recipe: Recipe, steps: Mapping[str, Step]) -> tuple[pa.Table, dict[str, Artifact]]:
    """Return a table of the documents' id, source and signals, and the artifacts of the signals by the recipe's step."""
    artifacts: dict[str, Artifact] = {}
    signals = pages.documents.read(columns=["id", "source"])
    for name in ("language", "heuristics", "quality", "harm"):
        if name == "quality" and recipe.configs(steps["train_quality"]):
            continue
        for config in recipe.configs(steps[name]):
            inputs: dict[str, Value] = {"documents": pages.documents}
            if name != "language":
                inputs["language"] = artifacts.get("language")
            artifacts[name] = execute(steps[name].stage, config, inputs, pages.store)
            own = artifacts[name].read()
            for column in own.column_names[1:]:
                signals = signals.append_column(column, own[column])
    return signals, artifacts


def _at_hand(config: SelectConfig, columns: Sequence[str]) -> tuple[SelectConfig, list[str]]:
    """Return the configuration without groups of rules that need a signal outside `columns`, and the names of the rules left out."""
    lacking: list[str] = []
    if (apart := config.code_reasoning) is not None:
        scores = {"min_code": "code_score", "min_reasoning": "reasoning_score"}
        off = {name: None for name, signal in scores.items() if getattr(apart, name) is not None and signal not in columns}
        lacking += [f"code_reasoning.{name}" for name in off]
        config = config.model_copy(update={"code_reasoning": apart.model_copy(update=off)})
    rules = list(active_rules(config))
    groups: dict[str, None] = {rule.name.partition(".")[0]: None for rule in rules if rule.drop.signal not in columns}
    lacking += [rule.name for rule in rules if rule.name.partition(".")[0] in groups]
    return config.model_copy(update=groups), lacking


def _cut(pages: Annotations, selected: Artifact) -> NDArray[np.int64]:
    """Return the numbers of good and bad words (int64[2, page]) in lines that were removed from documents that the selection keeps."""
    changed = set(selected.read("removed_lines", ["id"])["id"].to_pylist())
    cut = np.zeros((2, len(pages.pages)), np.int64)
    for row in selected.read(columns=["id", "text"]).to_pylist():
        if row["id"] in changed:
            number = int(row["id"], 16)
            good, bad = _words(row["text"], pages.pages[number])
            cut[:, number] = pages.good[number] - good, pages.bad[number] - bad
    return cut


def columns_of(result: Evidence, by: str) -> list[dict[str, Any]]:
    """Return a row per rule (pages, shares of good and bad words, lost good words by group `by=…`), and a last row for all rules."""
    whole = result.whole

    def share(tally: Mapping[str, Tally], field: str, group: str = ALL) -> float:
        return int(getattr(tally[group], field)) / max(1, int(getattr(whole[group], field)))

    names = [group for group in whole if group.startswith(f"{by}=")]
    rows: list[dict[str, Any]] = [{
        "rule": row.rule, "drops": row.condition, "pages": row.alone[ALL].pages, "good_lost": share(row.alone, "good"),
        "bad_caught": share(row.alone, "bad"), "first_pages": row.first[ALL].pages, "first_good_lost": share(row.first, "good"),
        "first_bad_caught": share(row.first, "bad"),
        **{name.partition("=")[2]: share(row.alone, "good", name) for name in names},
    } for row in result.rows]  # fmt: skip
    dropped, caught = (sum(getattr(row.first[ALL], field) for row in result.rows) for field in ("pages", "bad"))
    total = {"rule": "all rules", "drops": "", "pages": dropped, "good_lost": result.loss(), "bad_caught": caught / max(1, whole[ALL].bad)}
    total |= {name.partition("=")[2]: result.loss(name) for name in names}
    return [*rows, total]


def summary(result: Evidence) -> dict[str, float]:
    """Return the share of good words that all rules together drop, over all pages and by group of pages."""
    return {"good_words_lost" if group == ALL else f"good_words_lost {group}": result.loss(group) for group in result.whole}


@app.command()
def rules(
    on: Annotated[Path, typer.Option("--on", metavar="FILE", help="Annotated pages: Parquet, JSON lines or CSV (see below)")],
    recipe: Annotated[str, typer.Option("--recipe", help="Recipe whose rules are judged: a name or a YAML file (base: clean)")] = "clean",
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the recipe")] = None,
    by: Annotated[str, typer.Option("--by", help="Groups of pages to show as columns: type or language")] = "type",
    modules: ModuleOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: rows, summary, rules that could not be judged")] = False,
) -> None:
    """Show how much good text each rule loses and how much bad text it catches on pages that you annotated.

    A row of FILE has `html` or `text`, and `truth` (the good part of the page's text, empty if there is none) or `good` (true or false, of
    the whole page). It may have `type` and `language`. Bytes are decoded as in curation. `pages` counts the pages that a rule drops.
    `good_lost` and `bad_caught` are shares of words, for each rule alone; `first_…` counts only pages and words that no earlier rule drops.
    The column of a type or language is the share of its good words that is lost."""
    if by not in ("type", "language"):
        raise PunaError(f"--by {by}: takes type or language")
    import_modules(modules)
    pages = read_annotated(on)
    config = load(recipe, list(changes or ()), "curate", RECIPE).one("extract", extract, ExtractConfig)
    with tempfile.TemporaryDirectory() as folder:
        result = evidence(Annotations(pages, Store.open(folder), config), recipe, changes or ())
    rows = columns_of(result, by)
    if as_json:
        return typer.echo(json_text({"rows": rows, "summary": summary(result), "unjudged": result.unjudged}))
    print_rows([{name: f"{value:.4f}" if isinstance(value, float) else value for name, value in row.items()} for row in rows], False)
    whole = result.whole[ALL]
    layer = read_values(recipe, [], RECIPE)[1][0]
    base = layer.values.get("base", RECIPE if layer.where else None)
    heir = f"{recipe} (base: {base})" if base else recipe
    typer.echo(f"Judged {heir} on {whole.pages:,} pages with {whole.good:,} good and {whole.bad:,} bad words.")
    for name in result.unjudged:
        typer.echo(f"not judged: {name}, whose classifier the recipe trains or whose step it leaves out")
