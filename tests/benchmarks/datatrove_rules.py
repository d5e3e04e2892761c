"""datatrove's four text filters compared with the rules of `select` at the same thresholds.

One rule is off on both sides: Gopher's share of words with a letter. datatrove counts punctuation as words without a letter, and so drops
most articles with many commas; Puna does not count punctuation.
"""

from __future__ import annotations

import warnings
from typing import Any

import pyarrow as pa

_ALL: dict[str, Any] = {"exempt_sources": ()}
RULES: dict[str, dict[str, Any]] = {
    "gopher_repetition": _ALL,
    "gopher_quality": _ALL
    | dict.fromkeys(("min_alphabetic_words", "min_stop_words", "min_stop_word_fraction", "max_misread"))
    | {"min_english_stop_words": 2},
    "c4": _ALL
    | dict.fromkeys(("min_sentences", "max_lorem_ipsum_lines"))
    | {"min_terminated_sentences": 5, "max_terminated_curly_bracket_lines": 0, "max_terminated_lorem_ipsum_lines": 0},
    "fineweb": _ALL | {"max_repeated_line_characters": 0.01},
}


def measured(texts: list[str]) -> pa.Table:
    """Return the signals of texts; a text's id is its number."""
    from puna.stages.curate.signals.measure import NAMES, measure

    values = measure(pa.array(texts, pa.large_string()), 5, 0.5).values
    ids = [str(number) for number in range(len(texts))]
    return pa.table({"id": ids, "source": ["web"] * len(ids), **{name: values[name] for name in NAMES}})


def dropped(signals: pa.Table, group: str) -> dict[int, str]:
    """Return the texts that a group of rules drops, each with the rule's name."""
    from puna.stages.curate.rules.decide import decide
    from puna.stages.curate.rules.groups import RuleGroup, active_rules
    from puna.stages.curate.select import SelectConfig

    off = [name for name, field in SelectConfig.model_fields.items() if isinstance(field.default, RuleGroup) or field.default is None]
    rows = decide(signals, list(active_rules(SelectConfig(**dict.fromkeys(off) | {group: RULES[group]}))))
    return dict(zip(map(int, rows["id"].to_pylist()), rows["rule"].to_pylist(), strict=True))


def dropped_by_datatrove(texts: list[str]) -> dict[str, dict[int, str]]:
    """Return, for each group, the texts that datatrove's filter drops, each with the filter's reason."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter

    filters = {
        "gopher_repetition": GopherRepetitionFilter(), "gopher_quality": GopherQualityFilter(max_non_alpha_words_ratio=None),
        "c4": C4QualityFilter(), "fineweb": FineWebQualityFilter(),
    }  # fmt: skip
    reasons: dict[str, dict[int, str]] = {name: {} for name in filters}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of no words
        for number, text in enumerate(texts):
            # Texts are filtered one after another, so that the four filters share datatrove's cache of split texts.
            for name, one in filters.items():
                result = one.filter(Document(text=text, id="x"))
                if isinstance(result, tuple):
                    reasons[name][number] = result[1]
    return reasons


def different(texts: list[str]) -> dict[int, tuple[str, str | None, str | None]]:
    """Return the texts that only one side drops, with the group, Puna's rule and datatrove's reason."""
    signals, differences = measured(texts), {}
    for group, theirs in dropped_by_datatrove(texts).items():
        ours = dropped(signals, group)
        differences |= {number: (group, ours.get(number), theirs.get(number)) for number in ours.keys() ^ theirs.keys()}
    return differences
