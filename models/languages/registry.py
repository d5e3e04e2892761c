"""Facts about languages: stop words, and threshold factors relative to English.

Recipes state thresholds for English; for another language, a rule multiplies its threshold by the language's factor for the signal.
Without a factor (null), the rule skips the language's documents. `languages.tsv` has one row per language and script, with its evidence.
The setting `language.rows` names a file of the same form with a user's rows, which may leave out columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

FILE = Path(__file__).with_name("languages.tsv")
SCALED = (
    "words", "mean_word_length", "alphabetic_word_fraction", "stop_word_fraction", "terminated_line_fraction", "short_line_fraction",
    "newline_ratio", "c4_open_sentences", "duplicate_line_fraction", "duplicate_paragraph_fraction", "repeated_line_character_fraction",
    "ngram_coverage", *(f"top_{n}gram_character_fraction" for n in (2, 3, 4)),
    *(f"duplicate_{n}gram_character_fraction" for n in range(5, 11)),
)  # fmt: skip
"""The signals whose thresholds are scaled per language."""
FACTOR = "_factor"
ABSTAINS = "-"


class LanguageRow(BaseModel):
    """The facts about a language in a script. An empty `language` stands for all languages of the script without a row of their own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    language: str = Field("", description="ISO 639 code: two letters where one exists, else three; empty: any other language")
    script: str = Field("", description="ISO 15924 code; empty: any other script")
    codes: tuple[str, ...] = Field((), description="Other codes for this language, from ISO 639-3 or a language identifier")
    family: str = Field("", description="Family of languages")
    group: str = Field("", description="Group of easily confused languages, whose probabilities are summed")
    stop_words: tuple[str, ...] = Field((), description="Frequent words, lower case")
    factors: Mapping[str, float | None] = Field({}, description="Signal → factor for English's threshold; null: the rule skips documents")
    evidence: str = Field("", description="Source of the row")

    @field_validator("stop_words")
    @classmethod
    def _lower(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(word.lower() for word in words)

    @field_validator("factors")
    @classmethod
    def _are_factors(cls, factors: Mapping[str, float | None]) -> Mapping[str, float | None]:
        for name, factor in factors.items():
            if name not in SCALED:
                raise ValueError(f"{name!r} is not a signal with a factor; these are: {', '.join(SCALED)}")
            if factor is not None and not 0 <= factor < 1e6:
                raise ValueError(f"{name} is {factor:g}; a factor lies between 0 and 1,000,000")
        return factors

    @property
    def key(self) -> str:
        return f"{self.language}-{self.script}"


def read_rows(file: str | Path) -> tuple[LanguageRow, ...]:
    """Return the rows of a file of tab-separated columns; if it is invalid, raise ValueError with the file's name and the line or column.

    Columns are the fields of a row and the signals in `SCALED`: a number is a factor, `-` means that the rule abstains. An empty or missing
    field keeps the value of the replaced row. Items of lists are separated by blanks."""
    rows: list[LanguageRow] = []
    names: list[str] = []
    columns = [name for name in (*LanguageRow.model_fields, *SCALED) if name != "factors"]
    try:
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                cells = line.rstrip("\n").split("\t")
                if line.startswith("#") or not any(cells):
                    continue
                if wrong := [] if names else [name for name in cells if name not in columns]:
                    raise ValueError(f"{file}: there is no column {wrong[0]!r}; the columns are {', '.join(columns)}")
                if not names and len(set(cells)) < len(cells):
                    twice = next(name for name in cells if cells.count(name) > 1)
                    raise ValueError(f"{file}: line {number} names the column {twice!r} twice: keep one of them")
                if names and len(cells) > len(names):
                    raise ValueError(f"{file}: line {number} has {len(cells)} cells, the header has {len(names)}")
                if names:
                    rows.append(_row(dict(zip(names, cells, strict=False)), f"{file}: line {number}"))
                names = names or cells
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read as a table of languages: {error}") from error
    return tuple(rows)


def _row(cells: dict[str, str], where: str) -> LanguageRow:
    fields: dict[str, object] = {name: cell for name, cell in cells.items() if name in LanguageRow.model_fields and cell}
    for name in ("codes", "stop_words"):
        if name in fields:
            fields[name] = tuple(str(fields[name]).split())
    factors: dict[str, float | None] = {}
    for name in SCALED:
        cell = cells.get(name, "")
        if cell == ABSTAINS:
            factors[name] = None
        elif cell:
            try:
                factors[name] = float(cell)
            except ValueError:
                raise ValueError(f"{where}: {name} is {cell!r}; a factor is a number, or {ABSTAINS} where the rule abstains") from None
    try:
        return LanguageRow.model_validate(fields | {"factors": factors})
    except ValidationError as error:
        raise ValueError(f"{where}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


@lru_cache(maxsize=1)
def shipped_rows() -> dict[str, LanguageRow]:
    return {row.key: row for row in read_rows(FILE)}


def with_rows(own: Iterable[LanguageRow]) -> dict[str, LanguageRow]:
    """Return the shipped table with a user's rows added or replaced. A row's missing fields come from the shipped row (`row_of`)."""
    table = dict(shipped_rows())
    for row in own:
        before = row_of(table, row.language, row.script)
        fields = {name for name in row.model_fields_set if name != "factors"}
        defaults = {name: getattr(before, name) for name in LanguageRow.model_fields if name not in fields}
        table[row.key] = LanguageRow(**(row.model_dump() | defaults | {"factors": dict(before.factors) | dict(row.factors)}))
    return table


def row_of(table: Mapping[str, LanguageRow], language: str, script: str) -> LanguageRow:
    """Return the row of a language in a script, else the script's row, else the default row, for which nearly all rules abstain."""
    return table.get(f"{language}-{script}") or table.get(f"-{script}") or table.get("-") or LanguageRow(factors=dict.fromkeys(SCALED))


class Names(NamedTuple):
    """Names of languages. `codes`: ISO 639's or an identifier's code → Puna's; `groups`: language → group of easily confused languages."""

    codes: Mapping[str, str]
    groups: Mapping[str, str]

    @classmethod
    def of(cls, own: Iterable[LanguageRow] = ()) -> Names:
        """Return the names of the table that comes with Puna, overridden by the rows `own`."""
        rows = [*shipped_rows().values(), *own]
        codes = {code: row.language for row in rows for code in row.codes} | {row.language: row.language for row in rows if row.language}
        return cls(codes, {row.language: row.group for row in rows if row.group})

    def canonical(self, label: str) -> str:
        """Return Puna's language code for an identifier's label: `eng_Latn`, `eng` and `en` give `en`. An unknown code stays as it is."""
        code = label.removeprefix("__label__").replace("_", "-").split("-")[0]
        return self.codes.get(code, code)


@lru_cache(maxsize=1)
def shipped_names() -> Names:
    return Names.of()


def as_table(entries: Iterable[tuple[str, str, int, LanguageRow]]) -> pa.Table:
    """Return the side table `languages` from entries (language, script, documents, row)."""
    words = ("language", "script", "stop_words", "evidence")
    factors = [pa.field(f"{n}{FACTOR}", pa.float64(), metadata={"unit": "", "meaning": f"threshold of {n} over English's"}) for n in SCALED]
    schema = pa.schema([*((name, pa.string()) for name in words), ("documents", pa.int64()), *factors])
    rows = [
        {
            "language": language, "script": script, "documents": documents, "stop_words": " ".join(row.stop_words) or None,
            "evidence": row.evidence or "no row: rules without a basis abstain",
            **{f"{name}{FACTOR}": row.factors.get(name) for name in SCALED},
        }
        for language, script, documents, row in entries
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=schema)
