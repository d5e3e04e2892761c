"""Groups of rules, which are thresholds on signals. `decide` applies the rules.

A rule drops a document if its signal is below, above, in or not in the threshold. A null threshold turns off its rule, and a null group all
its rules. A group's settings choose the sources that it judges. Rules apply in declared order; the first that fires is recorded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, field_validator

from puna.models.languages.registry import shipped_names
from puna.stages.contract import StageConfig, did_you_mean
from puna.storage import PunaError

Comparison = Literal["<", ">", "in", "not in"]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Fraction | None
Count = Annotated[int, Field(ge=0)] | None
Ratio = Annotated[float, Field(ge=0)] | None
Missing = Literal["drop", "keep"]
OTHER_CODES = {"ae", "bh", "cr", "kv", "na", "pi", "sh"}  # of languages without a row in the table of languages


@dataclass(frozen=True)
class Drop:
    """Metadata that makes a configuration field the threshold of a rule, which drops a document if `SIGNAL WHEN THRESHOLD` is true.
    `missing`: the decision on a document whose signal is null (not measured)."""

    signal: str
    when: Comparison
    missing: Missing = "drop"


def threshold(signal: str, when: Comparison, default: Any, description: str, missing: Missing = "drop") -> Any:
    """Return a field marked with `Drop(signal, when, missing)`, like `Annotated[…, Drop(…)] = Field(default, …)`."""
    field = Field(default, description=description)
    field.metadata.append(Drop(signal, when, missing))
    return field


def below(signal: str, default: float | None, description: str, missing: Missing = "drop") -> Any:
    """Return the field of a rule that drops documents whose `signal` is below the field's value."""
    return threshold(signal, "<", default, description, missing)


def above(signal: str, default: float | None, description: str, missing: Missing = "drop") -> Any:
    """Return the field of a rule that drops documents whose `signal` is above the field's value, or null if `missing` is "drop"."""
    return threshold(signal, ">", default, description, missing)


@dataclass(frozen=True)
class DocumentKind:
    """Documents whose `signal` is at least `minimum`. A document whose signal is null (not measured) is not of this kind."""

    signal: str
    minimum: float


@dataclass(frozen=True)
class Rule:
    """An active rule of a configuration. With `kinds`, it judges only documents of these kinds or, if `of_kind` is false, only others."""

    name: str
    drop: Drop
    threshold: float | tuple[str, ...]
    sources: tuple[str, ...]
    exempt_sources: tuple[str, ...]
    kinds: tuple[DocumentKind, ...] = ()
    of_kind: bool = True

    @property
    def signals(self) -> tuple[str, ...]:
        """Return all signals that the rule reads: the one with the threshold, then those of `kinds`."""
        return (self.drop.signal, *(kind.signal for kind in self.kinds))

    @property
    def number(self) -> float | None:
        """Return the threshold if it is a number, else None."""
        return None if isinstance(self.threshold, tuple) else float(self.threshold)


class RuleGroup(StageConfig):
    """A group of rules, and the sources whose documents the group judges."""

    sources: tuple[str, ...] = Field((), description="Sources whose documents this group judges; empty: all")
    exempt_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents this group does not judge")


RULE_GROUPS: dict[str, type[RuleGroup]] = {}  # name in `select.groups` → rule group of another package or module

G = TypeVar("G", bound=type[RuleGroup])


def rule_group(name: str) -> Callable[[G], G]:
    """Return a decorator that declares a class with `Drop` fields as group `name` of `select.groups`. Raise TypeError if it exists."""

    def declare(group: G) -> G:
        before = RULE_GROUPS.get(name)
        if before is not None and before.__module__ != group.__module__:
            raise TypeError(f"the group of rules {name} is declared twice, in {before.__module__} and in {group.__module__}; rename one")
        RULE_GROUPS[name] = group
        return group

    return declare


class WebRules(RuleGroup):
    """Rules for crawled pages. Gopher, too, applied its rules to web pages only, not to its curated sources."""

    exempt_sources: tuple[str, ...] = Field(("code", "wikipedia"), description="Sources whose documents this group does not judge")


class LanguageRules(RuleGroup):
    """Rules on the identified language. FineWeb keeps documents with a score of at least 0.65."""

    min_score: Share = below("language_score", 0.65, "Minimum probability of the language")
    languages: tuple[str, ...] | None = threshold("language", "not in", None, "Languages to keep (ISO 639 codes: en, eng); null: all")

    @field_validator("languages", mode="before")
    @classmethod
    def _canonical(cls, given: Any) -> Any:
        if not isinstance(given, list | tuple):
            return given
        known = shipped_names().codes.keys() | OTHER_CODES
        # YAML reads `no`, Norwegian, as false. Unknown codes of three letters may be those of the user's own classifier.
        codes = ["no" if one is False else shipped_names().canonical(str(one)) for one in given]
        for code in codes:
            if code not in known and not re.fullmatch("[a-z]{3}", code):
                raise ValueError(f"{code!r} is not the ISO 639 code of a language{did_you_mean(code, sorted(known))}")
        return codes


class GopherRepetitionRules(WebRules):
    """Gopher's repetition rules (Rae et al. 2021, table A1), on fractions of lines, paragraphs or characters."""

    min_characters: Count = below("characters", 1, "Minimum length of the text, in characters; an empty text has no fractions")
    max_duplicate_paragraphs: Share = above("duplicate_paragraph_fraction", 0.30, "Maximum share of paragraphs seen earlier in the text")
    max_duplicate_paragraph_characters: Share = above(
        "duplicate_paragraph_character_fraction", 0.20, "Maximum share of characters in repeated paragraphs"
    )
    max_duplicate_lines: Share = above("duplicate_line_fraction", 0.30, "Maximum share of lines seen earlier in the text")
    max_duplicate_line_characters: Share = above("duplicate_line_character_fraction", 0.20, "Maximum share of characters in repeated lines")
    max_top_2gram: Share = above("top_2gram_character_fraction", 0.20, "Maximum share of characters in the most frequent word 2-gram")
    max_top_3gram: Share = above("top_3gram_character_fraction", 0.18, "Maximum share of characters in the most frequent word 3-gram")
    max_top_4gram: Share = above("top_4gram_character_fraction", 0.16, "Maximum share of characters in the most frequent word 4-gram")
    max_duplicate_5grams: Share = above("duplicate_5gram_character_fraction", 0.15, "Maximum share of characters in 5-grams seen earlier")
    max_duplicate_6grams: Share = above("duplicate_6gram_character_fraction", 0.14, "Maximum share of characters in 6-grams seen earlier")
    max_duplicate_7grams: Share = above("duplicate_7gram_character_fraction", 0.13, "Maximum share of characters in 7-grams seen earlier")
    max_duplicate_8grams: Share = above("duplicate_8gram_character_fraction", 0.12, "Maximum share of characters in 8-grams seen earlier")
    max_duplicate_9grams: Share = above("duplicate_9gram_character_fraction", 0.11, "Maximum share of characters in 9-grams seen earlier")
    max_duplicate_10grams: Share = above("duplicate_10gram_character_fraction", 0.10, "Maximum share of characters in 10-grams seen before")


class GopherQualityRules(WebRules):
    """Gopher's quality rules (Rae et al. 2021, appendix A.1.1)."""

    min_words: Count = below("words", 50, "Minimum number of words")
    max_words: Count = above("words", 100_000, "Maximum number of words")
    min_mean_word_length: Ratio = below("mean_word_length", 3.0, "Minimum mean length of words, in characters", "keep")
    max_mean_word_length: Ratio = above("mean_word_length", 10.0, "Maximum mean length of words, in characters", "keep")
    max_hash_ratio: Ratio = above("hash_ratio", 0.1, "Maximum number of # per word")
    max_ellipsis_ratio: Ratio = above("ellipsis_ratio", 0.1, "Maximum number of ellipses per word")
    max_bullet_lines: Share = above("bullet_line_fraction", 0.9, "Maximum share of lines that start with a bullet")
    max_ellipsis_lines: Share = above("ellipsis_line_fraction", 0.3, "Maximum share of lines that end with an ellipsis")
    min_alphabetic_words: Share = below("alphabetic_word_fraction", 0.8, "Minimum share of words with a letter, ignoring punctuation")
    min_stop_words: Count = below("stop_words", 2, "Minimum number of distinct stop words of the language", missing="keep")
    # The rules below are not Gopher's.
    max_misread: Share = above("misread_fraction", 0.005, "Maximum share of characters that are UTF-8 misread as cp1252, such as Ã© for é")
    # Random words contain few stop words. Measured only if the language has its own list.
    min_stop_word_fraction: Share = below("stop_word_fraction", 0.1, "Minimum share of stop words of the language", missing="keep")
    min_english_stop_words: Count = below("english_stop_words", None, "Minimum number of distinct English stop words; Gopher: 2")


class C4Rules(WebRules):
    """C4's rules (Raffel et al. 2020) as in FineWeb, which leaves out the rule on terminal punctuation."""

    max_curly_bracket_lines: Count = above("c4_open_curly_bracket_lines", None, "Maximum number of lines with '{'; C4: 0, no code")
    max_lorem_ipsum_lines: Count = above("c4_open_lorem_ipsum_lines", 0, "Maximum number of lines with 'lorem ipsum'")
    max_terminated_curly_bracket_lines: Count = above("c4_curly_bracket_lines", None, "Maximum terminated lines with '{'; C4: 0")
    max_terminated_lorem_ipsum_lines: Count = above("c4_lorem_ipsum_lines", None, "Maximum terminated lines with 'lorem ipsum'; C4: 0")
    min_sentences: Count = below("c4_open_sentences", 5, "Minimum number of sentences in the lines that C4 keeps", "keep")
    min_terminated_sentences: Count = below("c4_sentences", None, "Minimum sentences in lines with terminal punctuation; C4: 5", "keep")


class FineWebRules(WebRules):
    """FineWeb's own rules (Penedo et al. 2024, section 3.5)."""

    min_lines: Count = below("lines", 1, "Minimum number of lines that are not blank")
    min_terminated_lines: Share = below("terminated_line_fraction", 0.12, "Minimum share of lines that end a sentence")
    max_short_lines: Share = above("short_line_fraction", 0.67, "Maximum share of lines of at most 30 characters", "keep")
    max_repeated_line_characters: Share = above("repeated_line_character_fraction", 0.1, "Maximum share of characters in repeated lines")
    max_newline_ratio: Ratio = above("newline_ratio", 0.3, "Maximum number of newlines per word")


class DirtyWordRules(RuleGroup):
    """Rules against adult pages that domain lists miss (Llama 3, section 3.1.1)."""

    max_ratio: Share = above("dirty_word_ratio", 0.02, "Maximum share of words from the adult vocabulary")
    max_words: Count = above("dirty_words", None, "Maximum number of words from the adult vocabulary")


class DivergenceRules(RuleGroup):
    """Rules against documents with too many outlier tokens (Llama 3, section 3.1.1)."""

    # Not measured for languages with too few words in the corpus.
    max_excess: float | None = above("token_kl_excess", 5.0, "Maximum divergence from the corpus minus that of random text, nats", "keep")


class NgramCoverageRules(RuleGroup):
    """Rules against documents that mostly repeat themselves, such as logs and generated listings (Llama 3, section 3.1.1)."""

    max_coverage: Share = above("ngram_coverage", 0.5, "Maximum share of words inside n-grams seen earlier in the document")


class NoticeRules(WebRules):
    """Rules against terms of use, privacy and cookie policies, and error notices in place of a page (JavaScript required, page not found).
    The rules count phrases of terms and policies in seven European languages, and of notices in English. The thresholds are Puna's own."""

    max_legal: Share = above("legal_phrase_ratio", 0.04, "Maximum share of words in phrases of terms and policies, like `we may disclose`")
    max_notice: Share = above("notice_ratio", 0.5, "Maximum share of words in notices like `please enable javascript`")


class CuratedRules(RuleGroup):
    """Rules for curated sources, which only drop stubs."""

    sources: tuple[str, ...] = Field(("wikipedia",), description="Sources whose documents this group judges; empty: all")
    min_words: Count = below("words", 20, "Minimum number of words")


class CodeRules(RuleGroup):
    """Rules for source code, against generated, minified and data files (StarCoder, Li et al. 2023, section 3.1)."""

    sources: tuple[str, ...] = Field(("code",), description="Sources whose documents this group judges; empty: all")
    exempt_sources: tuple[str, ...] = Field((), description="Sources whose documents this group does not judge")
    max_line_length: Count = above("max_line_length", 1000, "Maximum length of a line, in characters")
    max_mean_line_length: Ratio = above("mean_line_length", 100.0, "Maximum mean length of lines, in characters")
    min_alphanumeric: Share = below("alphanumeric_fraction", 0.25, "Minimum share of letters and digits among the characters")
    min_words: Count = below("words", 10, "Minimum number of words")


Prose = Literal["gopher_repetition", "gopher_quality", "c4", "fineweb", "divergence", "ngram_coverage", "quality"]
"""Names of the rule groups for prose, which do not fit code: its lines are short, repeat, and do not end in full stops."""


class CodeReasoningRules(WebRules):
    """Rules for pages with code or reasoning (Llama 3, section 3.1.3), identified by code lines and by the scores of `code_reasoning`.
    Rules for prose do not fit such pages, so the groups in `spared_by` skip them. The rules below apply only to such pages."""

    min_code_lines: int | None = Field(8, ge=1, description="Minimum number of code lines of a page with code; null: not used")
    min_code: Fraction | None = Field(None, description="Minimum probability of code of a page with code; null: not used")
    min_reasoning: Fraction | None = Field(None, description="Minimum probability of reasoning of a page with reasoning; null: not used")
    spared_by: tuple[Prose, ...] = Field(get_args(Prose), description="Rule groups that skip these pages")
    min_words: Count = below("words", 50, "Minimum number of words of such a page")
    min_alphabetic_words: Share = below("alphabetic_word_fraction", 0.5, "Minimum share of words with a letter; operators count as words")
    max_repeated_line_characters: Share = above("repeated_line_character_fraction", 0.5, "Maximum share of characters in repeated lines")

    @property
    def kinds(self) -> tuple[DocumentKind, ...]:
        """Return the kinds of page that these rules judge. A page of any of these kinds counts as code or reasoning."""
        bounds = (("code_lines", self.min_code_lines), ("code_score", self.min_code), ("reasoning_score", self.min_reasoning))
        return tuple(DocumentKind(signal, minimum) for signal, minimum in bounds if minimum is not None)


class QualityRules(WebRules):
    """Rules on the quality of documents. `exempt_sources` should name the sources that served as good examples for the classifier."""

    min_quality: Share = below("quality", None, "Minimum probability of good quality", "keep")
    min_rank: Share = below("quality_rank", 0.1, "Minimum quality rank: 0.1 drops the worst tenth", "keep")


class HarmRules(WebRules):
    """Rules on harm by category, for documents whose language the stage `harm` scores. The thresholds are Puna's own."""

    max_hate: Share = above("harm_hate", 0.8, "Maximum probability of hate", "keep")
    max_violence: Share = above("harm_violence", 0.8, "Maximum probability of violence", "keep")
    max_sexual: Share = above("harm_sexual", 0.8, "Maximum probability of sexual acts", "keep")
    max_self_harm: Share = above("harm_self_harm", 0.8, "Maximum probability of self-harm", "keep")


class DomainRules(RuleGroup):
    """Rules on the knowledge type of documents."""

    excluded: tuple[str, ...] | None = threshold("domain", "in", None, "Knowledge types to drop")
    min_score: Share = below("domain_score", None, "Minimum probability of the knowledge type")


class LineRules(StageConfig):
    """Rules for lines of kept documents: repetitions (Llama 3, section 3.1.1), and the lines that C4 removes (Raffel et al. 2020)."""

    max_ngram_coverage: Annotated[float, Field(ge=0.5, le=1)] | None = Field(0.9, description="Maximum share of words in repeated n-grams")
    min_words: int = Field(30, ge=1, description="Minimum number of words in a line judged by its n-grams")
    final_punctuation: bool = Field(False, description="Remove lines that end in an ellipsis or not in . ? ! or a double quote; C4: true")
    min_line_words: int = Field(0, ge=0, description="Minimum number of words in a line, split at white space; C4: 3")
    exempt_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents keep all lines")


def active_rules(config: StageConfig) -> Iterator[Rule]:
    """Yield the active rules of a configuration: first those of its rule-group fields, in declared order, then those of its `groups`."""
    groups = {name: group for name in type(config).model_fields if isinstance(group := getattr(config, name), RuleGroup)}
    groups |= getattr(config, "groups", {})
    apart = next((group for group in groups.values() if isinstance(group, CodeReasoningRules)), None)
    for group_name, group in groups.items():
        kinds = apart.kinds if apart is not None and (group is apart or group_name in apart.spared_by) else ()
        if group is apart and not kinds:
            continue
        for name, field in type(group).model_fields.items():
            threshold = getattr(group, name)
            for mark in field.metadata:
                if isinstance(mark, Drop) and threshold is not None:
                    yield Rule(f"{group_name}.{name}", mark, threshold, group.sources, group.exempt_sources, kinds, group is apart)


def check_signals(rules: list[Rule], carried: dict[str, str]) -> None:
    """Raise PunaError if a rule reads a signal that no input contains. `carried`: signal → artifact."""
    for rule in rules:
        for signal in rule.signals:
            if signal not in carried:
                off = rule.name if signal == rule.drop.signal else "code_reasoning"
                raise PunaError(f"rule {rule.name} reads the signal {signal!r}, which no input contains "
                    f"(they contain {', '.join(sorted(carried)) or 'none'}); give the stage that writes it, or set {off}=null")  # fmt: skip
