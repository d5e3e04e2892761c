"""`constraints`: checks of instructions that a program can verify, as in IFEval."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field, JsonValue, model_validator

from puna.stages.contract import did_you_mean
from puna.stages.verifiers.base import BoundedVerifier, Question, Score
from puna.stages.verifiers.registry import register

AT_LEAST, LESS_THAN = "at least", "less than"
Check = Callable[..., bool]
KINDS: dict[str, Check] = {}  # instruction id, `group:name` → its check, whose keyword-only parameters are the instruction's arguments


def kind(name: str) -> Callable[[Check], Check]:
    """Return a decorator that registers the check of the instruction `name`."""

    def register(check: Check) -> Check:
        KINDS[name] = check
        return check

    return register


def compare_count(count: int, relation: str, number: int) -> bool:
    """True if `count` is at least, or less than, `number`. `_check_arguments` rejects any other relation."""
    return count >= number if relation == AT_LEAST else count < number


@lru_cache(maxsize=512)
def pattern(text: str) -> Any:
    """Return a compiled RE2 pattern, which takes linear time on any answer."""
    import re2

    return re2.compile(text)


@kind("keywords:existence")
def has_keywords(answer: str, *, keywords: list[str]) -> bool:
    """True if each keyword occurs, ignoring case, possibly inside a word."""
    return all(word.lower() in answer.lower() for word in keywords)


@kind("keywords:frequency")
def keyword_frequency(answer: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """True if a keyword occurs at least, or less than, `frequency` times, ignoring case, also inside words."""
    return compare_count(answer.lower().count(keyword.lower()), relation, frequency)


@kind("keywords:forbidden_words")
def forbidden_words(answer: str, *, forbidden_words: list[str]) -> bool:
    """True if none of the words occurs as a whole word, ignoring case."""
    return not any(re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) for word in forbidden_words)


@kind("keywords:letter_frequency")
def letter_frequency(answer: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """True if the character `letter`, in either case, occurs at least (or less than: `let_relation`) `let_frequency` times."""
    return compare_count(answer.lower().count(letter.lower()), let_relation, let_frequency)


@kind("language:response_language")
def response_language(answer: str, *, language: str) -> bool:
    """True if `language` (ISO 639-1, region ignored) is the answer's language, or if the answer has no letters."""
    return _language(answer) in (None, language.lower().partition("-")[0])


@kind("change_case:english_capital")
def english_capital(answer: str) -> bool:
    return answer.isupper() and _language(answer) in (None, "en")


@kind("change_case:english_lowercase")
def english_lowercase(answer: str) -> bool:
    return answer.islower() and _language(answer) in (None, "en")


@kind("change_case:capital_word_frequency")
def capital_word_frequency(answer: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """True if `capital_frequency` or more words are in capitals (for "less than": fewer). Hyphens, periods and apostrophes join words."""
    return compare_count(sum(word.isupper() for word in re.findall(r"\w+(?:[-.'’]\w+)*", answer)), capital_relation, capital_frequency)


def _language(text: str) -> str | None:
    """Return the code of the text's most likely language (ISO 639-1, else 639-3); None for a text without letters."""
    from puna.models.languages.vote import lid

    text = " ".join(text.split())
    if not any(c.isalpha() for c in text):
        return None
    # The classifier misidentifies text in capitals.
    ((_, label),) = lid().f.predict(text.lower() if text.isupper() else text, 1, 0.0, "strict")
    return str(label).removeprefix("__label__")


@kind("length_constraints:number_sentences")
def number_sentences(answer: str, *, num_sentences: int, relation: str) -> bool:
    """True if the answer has at least, or less than, `num_sentences` sentences."""
    return compare_count(count_sentences(answer), relation, num_sentences)


@kind("length_constraints:number_words")
def number_words(answer: str, *, num_words: int, relation: str) -> bool:
    """True if the answer has at least, or less than, `num_words` words: runs of letters, digits and underscores."""
    return compare_count(len(re.findall(r"\w+", answer)), relation, num_words)


@kind("length_constraints:number_paragraphs")
def number_paragraphs(answer: str, *, num_paragraphs: int) -> bool:
    """True if the answer has exactly `num_paragraphs` paragraphs, separated by ***."""
    parts = [part.strip() for part in answer.split("***")]
    inner = parts[1 if not parts[0] else 0 : len(parts) - (1 if len(parts) > 1 and not parts[-1] else 0)]
    return all(inner) and len(inner) == num_paragraphs


@kind("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(answer: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """True if the answer has `num_paragraphs` paragraphs, separated by empty lines, and the nth begins with `first_word`, ignoring case."""
    paragraphs = [part.strip() for part in answer.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    word = re.match(r"[\"'“‘*_]*([^\s.,?!'\"”’*_]*)", paragraphs[nth_paragraph - 1])
    return word is not None and word.group(1).lower() == first_word.lower()


# Abbreviations that rarely end a sentence.
SHORT = frozenset([
    "al", "approx", "apr", "aug", "capt", "co", "col", "corp", "dec", "dept", "dr", "est", "etc", "feb", "fig", "gen", "gov", "hon", "inc",
    "jan", "jr", "jul", "jun", "lt", "ltd", "mar", "max", "min", "mr", "mrs", "ms", "nov", "oct", "pres", "prof", "rep", "rev", "sen",
    "sep", "sept", "sgt", "sr", "st", "vol", "vs",
])  # fmt: skip
DOTTED = ("e.g", "i.e", "a.m", "p.m", "u.s", "u.k", "ph.d")
CLOSING = "\"'”’)]*_"
END = re.compile(r"([^\s.!?…]{0,20})([.!?…]+[\"'”’)\]*_]*)(?=\s|$)|[。！？]")


def count_sentences(text: str) -> int:
    """Return the number of sentences. They end at . ! ? … or the end, but not at the dot of an abbreviation, initial or list number."""
    count, last = 0, 0
    for match in END.finditer(text):
        word, marks = (match.group(1) or "").lower().lstrip("(\"'“‘*"), match.group(2) or ""
        rest = text[match.end() : match.end() + 40].lstrip()
        if rest and rest[0].islower() and set(marks.rstrip(CLOSING)) <= {".", "…"}:
            continue
        if marks.rstrip(CLOSING) == "." and rest:
            before = (text[max(0, match.start() - 4) : match.start()] + word).lower()
            abbreviated = before.endswith(DOTTED) or word in SHORT
            listed = word.isdigit() and text[: match.start()].rpartition("\n")[2].strip() == ""
            if abbreviated or listed or (len(word) == 1 and word.isalpha() and word != "i"):
                continue
        if any(c.isalnum() for c in text[last : match.end()]):
            count += 1
        last = match.end()
    return count + any(c.isalnum() for c in text[last:])


@kind("detectable_content:number_placeholders")
def number_placeholders(answer: str, *, num_placeholders: int) -> bool:
    """True if there are at least `num_placeholders` placeholders in square brackets."""
    return len(pattern(r"\[[^\n]*?\]").findall(answer)) >= num_placeholders


@kind("detectable_content:postscript")
def postscript(answer: str, *, postscript_marker: str) -> bool:
    """True if `postscript_marker` occurs, ignoring case. In dotted markers (P.S., P.P.S), a space may follow a period."""
    letters = re.fullmatch(r"(?:[A-Za-z]\.)+[A-Za-z]?\.?", postscript_marker)
    parts = [re.escape(c) for c in postscript_marker.replace(".", "")]
    text = r"\.\s?".join(parts) + (r"\." if postscript_marker.endswith(".") else "") if letters else re.escape(postscript_marker)
    return pattern(f"(?i){text}").search(answer) is not None


@kind("detectable_format:number_bullet_lists")
def number_bullet_lists(answer: str, *, num_bullets: int) -> bool:
    """True if exactly `num_bullets` lines begin with the bullet * (not **) or -."""
    lines = [line.strip() for line in answer.splitlines()]
    return sum(line.startswith("-") or (line.startswith("*") and len(line) > 1 and line[1] != "*") for line in lines) == num_bullets


@kind("detectable_format:constrained_response")
def constrained_response(answer: str) -> bool:
    """True if "My answer is yes.", "My answer is no." or "My answer is maybe." occurs."""
    return any(f"My answer is {word}." in answer for word in ("yes", "no", "maybe"))


@kind("detectable_format:number_highlighted_sections")
def number_highlighted_sections(answer: str, *, num_highlights: int) -> bool:
    """True if there are at least `num_highlights` spans between single or double asterisks; a span lies within one line."""
    single = [section for section in re.findall(r"\*([^\n*]*)\*", answer) if section.strip()]
    double = [section for section in re.findall(r"\*\*([^\n*]*)\*\*", answer) if section.strip()]
    return len(single) + len(double) >= num_highlights


@kind("detectable_format:multiple_sections")
def multiple_sections(answer: str, *, section_spliter: str, num_sections: int) -> bool:
    """True if `section_spliter`, followed by a digit (a space may lie between), occurs at least `num_sections` times."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d", answer)) >= num_sections


@kind("detectable_format:json_format")
def json_format(answer: str) -> bool:
    """True if the whole answer is JSON, with or without a Markdown code fence around it."""
    text = answer.strip()
    if (fenced := re.match(r"```(?:json)?\s", text, re.IGNORECASE)) and text.endswith("```"):
        text = text[fenced.end() : -3]
    try:
        json.loads(text.strip())
    except (ValueError, RecursionError):
        return False
    return True


@kind("detectable_format:title")
def title(answer: str) -> bool:
    """True if the answer has a non-empty title in double angle brackets."""
    return any(heading.strip("<> \t") for heading in pattern(r"<<[^\n]+?>>").findall(answer))


@kind("combination:two_responses")
def two_responses(answer: str) -> bool:
    """True if the answer consists of two different responses, separated by six asterisks."""
    parts = [part.strip() for part in answer.split("******")]
    inner = [part for at, part in enumerate(parts) if part or 0 < at < len(parts) - 1]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


@kind("combination:repeat_prompt")
def repeat_prompt(answer: str, *, prompt_to_repeat: str) -> bool:
    """True if the answer begins with `prompt_to_repeat`, ignoring case."""
    return answer.strip().lower().startswith(prompt_to_repeat.strip().lower())


@kind("startend:end_checker")
def end_checker(answer: str, *, end_phrase: str) -> bool:
    """True if the answer ends with `end_phrase`, ignoring case and double quotation marks around either."""
    return answer.strip().strip('"').lower().endswith(end_phrase.strip().strip('"').lower())


@kind("startend:quotation")
def quotation(answer: str) -> bool:
    """True if the whole answer is in double quotation marks."""
    text = answer.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@kind("punctuation:no_comma")
def no_comma(answer: str) -> bool:
    return "," not in answer


@register
class Constraints(BoundedVerifier):
    """Score 1 if the answer follows all instructions, else 0; with `partial`, the share of instructions that it follows.

    `instruction_id_list` and `kwargs` are the fields of a row in IFEval's file (Zhou et al., arXiv 2311.07911), unchanged. An empty answer
    follows no instruction. For sentences and languages, Puna's rules and classifier differ from IFEval's NLTK and langdetect."""

    name: ClassVar[str] = "constraints"

    instruction_id_list: tuple[str, ...] = Field(
        min_length=1, max_length=100, description="Ids of the instructions; a language prefix (en:) is ignored"
    )
    kwargs: tuple[dict[str, JsonValue], ...] = Field(description="Arguments of each instruction; null values are ignored")
    loose: bool = Field(
        False, description="Also check variants without asterisks, first or last line; one must pass (IFEval's loose accuracy)"
    )
    partial: bool = Field(False, description="Score the share of instructions that are followed")

    @model_validator(mode="after")
    def _instructions_are_known(self) -> Constraints:
        if len(self.kwargs) != len(self.instruction_id_list):
            raise ValueError(f"{len(self.instruction_id_list)} instructions, but {len(self.kwargs)} kwargs")
        for full, arguments in zip(self.instruction_id_list, self.kwargs, strict=True):
            name = _bare(full)
            if name not in KINDS:
                raise ValueError(f"there is no instruction {full!r}{did_you_mean(name, sorted(KINDS))}")
            _check_arguments(name, _arguments(arguments))
        return self

    def score(self, question: Question, answer: str) -> Score:
        texts = _variants(answer) if self.loose else [answer]
        missed = []
        for full, options in zip(self.instruction_id_list, self.kwargs, strict=True):
            check, arguments = KINDS[_bare(full)], _arguments(options)
            if not any(text.strip() and check(text, **arguments) for text in texts):
                missed.append(_bare(full))
        total = len(self.instruction_id_list)
        value = (total - len(missed)) / total if self.partial else float(not missed)
        return Score(value, f"not followed: {', '.join(missed)}" if missed else "")


def _bare(name: str) -> str:
    """Return an id without its language prefix: en:punctuation:no_comma gives punctuation:no_comma."""
    return name.partition(":")[2] if name.count(":") == 2 else name


def _arguments(arguments: dict[str, JsonValue]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _check_arguments(name: str, given: dict[str, Any]) -> None:
    """Raise ValueError unless the arguments `given` have the names and types that the instruction `name` needs, and are not empty or 0."""
    types = {p.name: str(p.annotation) for p in inspect.signature(KINDS[name]).parameters.values() if p.kind is p.KEYWORD_ONLY}
    if wrong := sorted(set(types) ^ set(given)):
        raise ValueError(f"instruction {name}: {'unknown' if wrong[0] in given else 'missing'} argument {wrong[0]!r}")
    for argument, value in given.items():
        kinds = {"int": int, "str": str, "list[str]": list}[types[argument]]
        members = value if isinstance(value, list) else []
        if not isinstance(value, kinds) or isinstance(value, bool) or not value or not all(isinstance(v, str) for v in members):
            raise ValueError(f"instruction {name}: {argument}={value!r} is not of type {types[argument]}")
        if argument.endswith("relation") and value not in (AT_LEAST, LESS_THAN):
            raise ValueError(f"instruction {name}: {argument}={value!r}; write {AT_LEAST!r} or {LESS_THAN!r}")


def _variants(answer: str) -> list[str]:
    """Return the eight variants of the answer, with and without asterisks, first line and last line (section 4.2 of the paper)."""
    lines = answer.split("\n")
    cut = [answer, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip()]
    return [*cut, *(text.replace("*", "") for text in cut)]
