"""Every signal that a scoring stage may write: a column of the `signals` table, with type, unit and meaning."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

F, I, S = pa.float64(), pa.int64(), pa.string()


class Signal(NamedTuple):
    """One number (or word) about a document."""

    type: pa.DataType
    unit: str
    meaning: str


SIGNALS: dict[str, Signal] = {
    "language": Signal(S, "ISO 639 code", "most probable language"),
    "language_score": Signal(F, "probability", "probability of that language"),
    "characters": Signal(I, "characters", "length of the text"),
    "lines": Signal(I, "lines", "lines that are not blank"),
    "words": Signal(I, "words", "words with a character that is neither punctuation nor symbol (Gopher)"),
    "mean_word_length": Signal(F, "characters per word", "mean length of those words (Gopher)"),
    "hash_ratio": Signal(F, "per word", "'#' characters per word (Gopher)"),
    "ellipsis_ratio": Signal(F, "per word", "'...' and '…' per word (Gopher)"),
    "bullet_line_fraction": Signal(F, "fraction of lines", "lines that start with a bullet (Gopher)"),
    "ellipsis_line_fraction": Signal(F, "fraction of lines", "lines that end with an ellipsis (Gopher)"),
    "alphabetic_word_fraction": Signal(F, "fraction of words", "words with an alphabetic character (Gopher)"),
    "stop_words": Signal(I, "distinct words", "distinct stop words of the language that has most of them"),
    "median_word_length": Signal(F, "characters per word", "median length of the words between white space (Gopher as dolma measures it)"),
    "symbol_word_fraction": Signal(F, "fraction of words", "words between white space with '#' or '…' (Gopher as dolma measures it)"),
    "english_stop_word_occurrences": Signal(I, "words", "words that are one of Gopher's eight English stop words (dolma)"),
    "english_stop_words": Signal(I, "distinct words", "distinct words of Gopher's eight English stop words"),
    "duplicate_line_fraction": Signal(F, "fraction of lines", "lines seen earlier in the document (Gopher)"),
    "duplicate_paragraph_fraction": Signal(F, "fraction of paragraphs", "paragraphs seen earlier in the document (Gopher)"),
    "duplicate_line_character_fraction": Signal(F, "fraction of characters", "characters in lines seen earlier (Gopher)"),
    "duplicate_paragraph_character_fraction": Signal(F, "fraction of characters", "characters in paragraphs seen earlier (Gopher)"),
    "duplicate_10gram_character_fraction": Signal(F, "fraction of characters", "characters in 10-grams seen earlier (Gopher)"),
    "c4_sentences": Signal(I, "sentences", "sentences in the lines that C4 keeps"),
    "c4_lorem_ipsum_lines": Signal(I, "lines", "lines with 'lorem ipsum' that pass C4's earlier line rules"),
    "c4_curly_bracket_lines": Signal(I, "lines", "lines with '{', before any with 'lorem ipsum', that pass C4's earlier line rules"),
    "c4_open_sentences": Signal(I, "sentences", "as c4_sentences, without the rule on terminal punctuation (FineWeb's order)"),
    "c4_open_lorem_ipsum_lines": Signal(I, "lines", "as c4_lorem_ipsum_lines, without the rule on terminal punctuation"),
    "c4_open_curly_bracket_lines": Signal(I, "lines", "as c4_curly_bracket_lines, without the rule on terminal punctuation"),
    "unpunctuated_lines": Signal(I, "lines", "lines, blank ones too, that do not end in '.', '?', '!' or '\"' (C4 as dolma measures it)"),
    "few_word_lines": Signal(I, "lines", "lines, blank ones too, of fewer than three words (C4 as dolma measures it)"),
    "curly_bracket_lines": Signal(I, "lines", "lines with '{' (C4 as dolma measures it)"),
    "lorem_ipsum_lines": Signal(I, "lines", "lines with 'lorem ipsum' (C4 as dolma measures it)"),
    "javascript_lines": Signal(I, "lines", "lines with 'javascript' (C4 as dolma measures it)"),
    "terminated_line_fraction": Signal(F, "fraction of lines", "lines that end in a sentence terminator (FineWeb)"),
    "short_line_fraction": Signal(F, "fraction of lines", "lines of at most 30 characters (FineWeb)"),
    "newline_ratio": Signal(F, "per word", "newlines per word (FineWeb)"),
    "repeated_line_character_fraction": Signal(F, "fraction of characters", "characters in non-blank lines seen earlier (FineWeb)"),
    "ngram_coverage": Signal(F, "fraction of words", "words inside n-grams seen earlier in the document, digits alike"),
    "dirty_words": Signal(I, "words", "words of the adult vocabulary"),
    "dirty_word_ratio": Signal(F, "fraction of words", "share of words of the adult vocabulary"),
    "token_kl": Signal(F, "nats", "Kullback-Leibler divergence of the document's word distribution from the corpus's"),
    "token_kl_excess": Signal(F, "nats", "token_kl less what a random sample of the corpus of the same length shows"),
    "mean_line_length": Signal(F, "characters", "mean line length"),
    "max_line_length": Signal(I, "characters", "longest line"),
    "alphanumeric_fraction": Signal(F, "fraction of characters", "letters and digits among the characters"),
    "judgement": Signal(F, "grade", "a judge's grade of the document's quality"),
    "code_judgement": Signal(F, "grade", "a judge's grade of the document as a page with code"),
    "reasoning_judgement": Signal(F, "grade", "a judge's grade of the document as a page of deduction in mathematics or science"),
    "code_line_fraction": Signal(F, "fraction of lines", "lines, in the characters read, that read as code"),
    "formulas": Signal(I, "marks", "commands of TeX and characters of formulas in the characters read"),
    "reasoning_words": Signal(I, "distinct words", "distinct words of deduction and calculation in the characters read"),
    "code_score": Signal(F, "probability", "out-of-fold probability that the document is a page with code"),
    "reasoning_score": Signal(F, "probability", "out-of-fold probability that the document reasons in mathematics or science"),
    "quality": Signal(F, "probability", "out-of-fold probability that the document is like the positive sources"),
    "quality_rank": Signal(F, "fraction of documents", "share of the scored documents with a lower quality"),
    "domain": Signal(S, "", "knowledge type"),
    "domain_score": Signal(F, "probability", "out-of-fold probability of that knowledge type"),
    "domain_seed": Signal(S, "", "knowledge type that the seed lexicon gave, when it was confident"),
    **{f"top_{n}gram_character_fraction": Signal(F, "fraction of characters", f"most frequent {n}-gram (Gopher)") for n in (2, 3, 4)},
    **{
        f"duplicate_{n}gram_character_fraction": Signal(F, "fraction of characters", f"{n}-grams seen earlier (Gopher)")
        for n in range(5, 11)
    },
}
