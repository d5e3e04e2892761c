"""Named sets of rules: what each toolkit or corpus applies, as groups of `select`."""

from __future__ import annotations

from typing import Any, Literal, get_args

from puna.stages.curate.rules.groups import (
    C4Rules,
    FineWebRules,
    GopherQualityRules,
    GopherRepetitionRules,
    LanguageRules,
    LineRules,
    RuleGroup,
)

RuleSet = Literal["puna", "datatrove", "fineweb", "dolma", "dolma_c4"]

_ALL: dict[str, Any] = {"exempt_sources": ()}
_NOT_GOPHERS: dict[str, Any] = {"min_stop_words": None, "min_stop_word_fraction": None, "max_misread": None}
# Both of dolma's sets keep what is at least as probably English as not.
_ENGLISH = LanguageRules(**_ALL, min_score=0.5, languages=("en",))
_GOPHER = {
    "gopher_repetition": GopherRepetitionRules(**_ALL),
    # Gopher's eight words are English.
    "gopher_quality": GopherQualityRules(**_ALL, **_NOT_GOPHERS, min_english_stop_words=2),
}
RULE_SETS: dict[RuleSet, dict[str, RuleGroup | LineRules]] = {
    # The defaults of the groups themselves.
    "puna": {},
    # The default settings of datatrove 0.10's filters; with `heuristics.words: datatrove` every decision is datatrove's.
    "datatrove": {
        **_GOPHER,
        "c4": C4Rules(
            **_ALL, min_sentences=None, min_terminated_sentences=5, max_lorem_ipsum_lines=None, max_terminated_curly_bracket_lines=0,
            max_terminated_lorem_ipsum_lines=0,
        ),
        "fineweb": FineWebRules(**_ALL, max_repeated_line_characters=0.01),
    },
    # FineWeb's order (Penedo et al. 2024, section 3): C4 without its rule on terminal punctuation.
    "fineweb": {
        "language": LanguageRules(**_ALL, min_score=0.65, languages=("en",)),
        **_GOPHER,
        "c4": C4Rules(**_ALL, max_curly_bracket_lines=0),
        "fineweb": FineWebRules(**_ALL, max_repeated_line_characters=0.01),
    },
    # The Dolma corpus (Soldaini et al. 2024, section 5.2): Gopher's rules with its thresholds for Common Crawl, on signals of
    # `heuristics.words: dolma`. Its configurations of versions 1.5 and 1.6 name the three attributes of top n-grams without
    # the last letter that the tagger gives them; the rules are on here. The corpus lost its lines without final punctuation
    # before these rules: an earlier select with `lines.final_punctuation` alone, on `heuristics.c4_lines`, does the same.
    "dolma": {
        "language": _ENGLISH,
        "gopher_repetition": GopherRepetitionRules(
            **_ALL, min_characters=None, max_duplicate_paragraphs=None, max_duplicate_paragraph_characters=None,
            max_duplicate_line_characters=0.30,
        ),
        "gopher_quality": GopherQualityRules(
            **_ALL, min_mean_word_length=None, max_mean_word_length=None, min_median_word_length=3, max_median_word_length=10,
            max_hash_ratio=None, max_ellipsis_ratio=None, max_symbol_words=0.1, **_NOT_GOPHERS,
            min_english_stop_word_occurrences=2,
        ),
    },
    # C4 as dolma's public configuration `c4-replication` makes it, without its list of words.
    "dolma_c4": {
        "language": _ENGLISH,
        "c4": C4Rules(
            **_ALL, max_lorem_ipsum_lines=None, min_sentences=None, max_any_curly_bracket_lines=0, max_any_lorem_ipsum_lines=0,
            max_any_javascript_lines=0,
        ),
        "lines": LineRules(**_ALL, max_ngram_coverage=None, final_punctuation=True, min_line_words=3),
    },
}  # fmt: skip
assert tuple(RULE_SETS) == get_args(RuleSet)


def filled(given: dict[str, Any], groups: list[str]) -> dict[str, Any]:
    """The fields of a configuration with those of its rule set for what is not given; `groups`: names of all groups.

    A group of which some fields are given keeps the set's for the others.
    """
    chosen = RULE_SETS.get(given.get("rule_set", "puna"))
    if not chosen:
        return given
    # What another toolkit decides, it decides with the same thresholds for all languages.
    out: dict[str, Any] = dict.fromkeys(groups) | dict(chosen) | {"per_language": False} | given
    for name, group in chosen.items():
        if isinstance(given.get(name), dict):
            out[name] = group.model_dump() | given[name]
    return out


# What datatrove calls the reason of each rule of its set.
DATATROVE_REASONS: dict[str, str] = {
    "gopher_repetition.min_characters": "empty",
    "gopher_repetition.max_duplicate_paragraphs": "dup_para_frac",
    "gopher_repetition.max_duplicate_paragraph_characters": "dup_para_char_frac",
    "gopher_repetition.max_duplicate_lines": "dup_line_frac",
    "gopher_repetition.max_duplicate_line_characters": "dup_line_char_frac",
    **{f"gopher_repetition.max_top_{n}gram": f"top_{n}_gram" for n in (2, 3, 4)},
    **{f"gopher_repetition.max_duplicate_{n}grams": f"duplicated_{n}_n_grams" for n in range(5, 11)},
    "gopher_quality.min_words": "gopher_short_doc",
    "gopher_quality.max_words": "gopher_long_doc",
    "gopher_quality.min_mean_word_length": "gopher_below_avg_threshold",
    "gopher_quality.max_mean_word_length": "gopher_above_avg_threshold",
    "gopher_quality.max_hash_ratio": "gopher_too_many_hashes",
    "gopher_quality.max_ellipsis_ratio": "gopher_too_many_ellipsis",
    "gopher_quality.max_bullet_lines": "gopher_too_many_bullets",
    "gopher_quality.max_ellipsis_lines": "gopher_too_many_end_ellipsis",
    "gopher_quality.min_alphabetic_words": "gopher_below_alpha_threshold",
    "gopher_quality.min_english_stop_words": "gopher_enough_stop_words",
    "c4.max_curly_bracket_lines": "curly_bracket",
    "c4.max_lorem_ipsum_lines": "lorem_ipsum",
    "c4.max_terminated_curly_bracket_lines": "curly_bracket",
    "c4.max_terminated_lorem_ipsum_lines": "lorem_ipsum",
    "c4.min_sentences": "too_few_sentences",
    "c4.min_terminated_sentences": "too_few_sentences",
    "fineweb.min_lines": "empty",
    "fineweb.min_terminated_lines": "line_punct_ratio",
    "fineweb.max_short_lines": "short_line_ratio",
    "fineweb.max_repeated_line_characters": "char_dup_ratio",
    "fineweb.max_newline_ratio": "list_ratio",
}

# What dolma's taggers gopher_v2 and c4_v2 call the attribute that each rule of its sets reads.
DOLMA_ATTRIBUTES: dict[str, str] = {
    "gopher_repetition.max_duplicate_lines": "fraction_of_duplicate_lines",
    "gopher_repetition.max_duplicate_line_characters": "fraction_of_characters_in_duplicate_lines",
    **{f"gopher_repetition.max_top_{n}gram": f"fraction_of_characters_in_most_common_{n}grams" for n in (2, 3, 4)},
    **{f"gopher_repetition.max_duplicate_{n}grams": f"fraction_of_characters_in_duplicate_{n}grams" for n in range(5, 11)},
    "gopher_quality.min_words": "word_count",
    "gopher_quality.max_words": "word_count",
    "gopher_quality.min_median_word_length": "median_word_length",
    "gopher_quality.max_median_word_length": "median_word_length",
    "gopher_quality.max_symbol_words": "symbol_to_word_ratio",
    "gopher_quality.max_bullet_lines": "fraction_of_lines_starting_with_bullet_point",
    "gopher_quality.max_ellipsis_lines": "fraction_of_lines_ending_with_ellipsis",
    "gopher_quality.min_alphabetic_words": "fraction_of_words_with_alpha_character",
    "gopher_quality.min_english_stop_word_occurrences": "required_word_count",
    "c4.max_any_curly_bracket_lines": "has_curly_brace",
    "c4.max_any_lorem_ipsum_lines": "has_lorem_ipsum",
    "c4.max_any_javascript_lines": "has_javascript",
}
