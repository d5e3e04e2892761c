"""Training prompts like IFEval's: a short request with one or two instructions that a program can verify, of all 25 kinds.

Requests, subjects and wordings are written for this file. A prompt that shares eight words in a row with a test prompt is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

SUBJECTS = [
    "bicycles", "coffee", "rain", "a small library", "honey bees", "an old lighthouse", "tomato soup", "night trains", "chess",
    "a lost umbrella", "wool socks", "the moon", "garden snails", "paper maps", "a village market", "swimming", "a broken clock",
    "baking bread", "wild geese", "school uniforms", "a jar of buttons", "kites", "public parks", "a rusty key", "piano lessons",
    "winter coats", "a goldfish", "camping", "street musicians", "lemon cake", "a wooden boat", "libraries at night", "crossword puzzles",
    "a stone bridge", "green tea", "morning walks", "a lazy dog", "handwritten letters", "tall trees", "a new hat", "potatoes", "thunder",
    "a corner shop", "folding chairs", "apple orchards", "a mountain hut", "soap bubbles", "ferry boats", "pickled onions",
    "a busy kitchen", "telescopes", "roller skates", "an empty theatre", "ladybirds", "snow shovels", "a birthday card", "cheese",
    "river stones", "a train ticket", "candles",
]  # fmt: skip
REQUESTS = (
    "Write one sentence about {}.", "Write a short poem of two lines about {}.", "Give one piece of advice about {}.",
    "Write a slogan for {}.", "Describe {} to a child.", "Write a brief note to a friend about {}.", "Tell a very short joke about {}.",
    "Say in a few words why people like {}.", "Write a short message that mentions {}.", "Make up a short riddle about {}.",
    "Name a good thing and a bad thing about {}.", "Write the first line of a story about {}.",
)  # fmt: skip
WORDS = [
    "silver", "quiet", "yellow", "seldom", "window", "gentle", "basket", "ribbon", "travel", "corner", "autumn", "pocket", "marble",
    "wander", "button", "harvest", "candle", "brother", "simple", "market", "garden", "lantern", "pepper", "cotton", "velvet",
]  # fmt: skip
LANGUAGES = {"French": "fr", "German": "de", "Spanish": "es", "Italian": "it", "Portuguese": "pt"}
ENDINGS = ("That is all.", "And so it goes.", "Think about it.", "See you soon.", "What a day!")
Made = tuple[str, dict[str, Any]]
Maker = Callable[[Random, str], Made]
"""A function that returns the text of an instruction and its arguments, given the request, which one kind repeats."""


def _one(random: Random, *texts: str) -> str:
    return random.choice(texts)


def _existence(random: Random, _: str) -> Made:
    words = random.sample(WORDS, random.randint(1, 2))
    named = " and ".join(f'"{word}"' for word in words)
    return _one(random, f"Use {named} somewhere in it.", f"It has to contain {named}."), {"keywords": words}


def _frequency(random: Random, _: str) -> Made:
    word, count = random.choice(WORDS), random.randint(2, 3)
    text = _one(random, f'Mention "{word}" {count} times or more.', f'"{word}" must occur no fewer than {count} times.')
    return text, {"keyword": word, "frequency": count, "relation": "at least"}


def _forbidden(random: Random, _: str) -> Made:
    words = random.sample(["the", "and", "is", "very", "good", "like", "of"], 2)
    text = f'Leave out the words "{words[0]}" and "{words[1]}".' if random.random() < 0.5 else f"Never say {words[0]} or {words[1]}."
    return text, {"forbidden_words": words}


def _letters(random: Random, _: str) -> Made:
    letter, count = random.choice("bgkmpvwyz!"), random.randint(2, 4)
    text = _one(random, f"Let {letter} occur {count} or more times.", f"There must be no fewer than {count} of the sign {letter} in it.")
    return text, {"letter": letter, "let_frequency": count, "let_relation": "at least"}


def _language(random: Random, _: str) -> Made:
    name = random.choice(list(LANGUAGES))
    text = _one(random, f"Answer in {name} only.", f"Reply entirely in {name}; other languages are forbidden.")
    return text, {"language": LANGUAGES[name]}


def _upper(random: Random, _: str) -> Made:
    return _one(
        random, "USE CAPITALS FOR EVERY LETTER, in English.", "Reply in English with capital letters throughout.", "Only uppercase, please."
    ), {}


def _lower(random: Random, _: str) -> Made:
    return _one(
        random, "Reply in English with small letters throughout.", "No letter may be uppercase.", "Write it all in lowercase English."
    ), {}


def _capital_words(random: Random, _: str) -> Made:
    count = random.randint(1, 3)
    text = _one(random, f"Put {count} or more words in CAPITALS.", f"Emphasise no fewer than {count} words by uppercase.")
    return text, {"capital_frequency": count, "capital_relation": "at least"}


def _sentences(random: Random, _: str) -> Made:
    count = random.randint(2, 4)
    if random.random() < 0.6:
        return f"Keep it under {count} sentences.", {"num_sentences": count, "relation": "less than"}
    return f"Write {count} or more sentences.", {"num_sentences": count, "relation": "at least"}


def _words(random: Random, _: str) -> Made:
    if random.random() < 0.6:
        count = random.randrange(15, 45, 5)
        return _one(random, f"Stay below {count} words.", f"Use fewer than {count} words."), {"num_words": count, "relation": "less than"}
    count = random.randrange(15, 40, 5)
    return _one(random, f"Use {count} words or more.", f"It must not be shorter than {count} words."), {
        "num_words": count,
        "relation": "at least",
    }


def _paragraphs(random: Random, _: str) -> Made:
    count = random.randint(2, 3)
    return f"Write {count} paragraphs and put *** between them.", {"num_paragraphs": count}


def _nth(random: Random, _: str) -> Made:
    at, word = random.randint(1, 2), random.choice(WORDS)
    text = f'Write 2 paragraphs with an empty line between them. Paragraph {at} starts with "{word}".'
    return text, {"num_paragraphs": 2, "nth_paragraph": at, "first_word": word}


def _placeholders(random: Random, _: str) -> Made:
    count = random.randint(1, 3)
    text = _one(
        random,
        f"Include {count} or more placeholders in square brackets, like [date].",
        f"Leave {count} or more blanks such as [name] to fill in.",
    )
    return text, {"num_placeholders": count}


def _postscript(random: Random, _: str) -> Made:
    marker = random.choice(["P.S.", "P.P.S"])
    return _one(random, f"Finish with a postscript that starts with {marker}", f"Add a remark after {marker} at the bottom."), {
        "postscript_marker": marker
    }


def _bullets(random: Random, _: str) -> Made:
    count = random.randint(2, 3)
    text = _one(
        random,
        f"Give it as a list of {count} lines, each after * and a space.",
        f"Use {count} bullets, no more and no fewer, like: * this one",
    )
    return text, {"num_bullets": count}


def _chosen(random: Random, _: str) -> Made:
    return _one(random, "Say My answer is yes. or My answer is no. in it.", 'Put "My answer is maybe." or the same with yes in it.'), {}


def _highlights(random: Random, _: str) -> Made:
    count = random.randint(1, 3)
    text = _one(random, f"Put {count} or more parts between asterisks, *like this*.", f"Mark {count} or more phrases with markdown, *so*.")
    return text, {"num_highlights": count}


def _sections(random: Random, _: str) -> Made:
    word = random.choice(["Part", "SECTION", "Step", "Section"])
    return f"Split it in two and head the halves {word} 1 and {word} 2.", {"section_spliter": word, "num_sections": 2}


def _json(random: Random, _: str) -> Made:
    return _one(random, "Give the reply as one JSON object.", "Output valid JSON and nothing besides."), {}


def _title(random: Random, _: str) -> Made:
    return _one(random, "Give it a title in double angle brackets, like <<a fine day>>.", "Begin with a heading between << and >>."), {}


def _two(random: Random, _: str) -> Made:
    return _one(
        random, "Give two different versions with ****** between them.", "Answer twice, differently, parted by six asterisks: ******"
    ), {}


def _repeat(random: Random, request: str) -> Made:
    text = _one(
        random,
        f'Start by copying this sentence exactly: "{request}" Then do it.',
        "Before you answer copy the sentence before this one exactly.",
    )
    return text, {"prompt_to_repeat": request}


def _end(random: Random, _: str) -> Made:
    phrase = random.choice(ENDINGS)
    text = _one(random, f'The last words must be "{phrase}"', f'Close with exactly "{phrase}" and write no more after that.')
    return text, {"end_phrase": phrase}


def _quoted(random: Random, _: str) -> Made:
    return _one(random, 'Put " before and after the whole reply.', "Everything you say should stand in double quotes."), {}


def _commas(random: Random, _: str) -> Made:
    return _one(random, "Commas are forbidden.", "Do it without a single comma.", "There must be no comma in it."), {}


MAKERS: dict[str, Maker] = {
    "keywords:existence": _existence, "keywords:frequency": _frequency, "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letters, "language:response_language": _language, "change_case:english_capital": _upper,
    "change_case:english_lowercase": _lower, "change_case:capital_word_frequency": _capital_words,
    "length_constraints:number_sentences": _sentences, "length_constraints:number_words": _words,
    "length_constraints:number_paragraphs": _paragraphs, "length_constraints:nth_paragraph_first_word": _nth,
    "detectable_content:number_placeholders": _placeholders, "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets, "detectable_format:constrained_response": _chosen,
    "detectable_format:number_highlighted_sections": _highlights, "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json, "detectable_format:title": _title, "combination:two_responses": _two,
    "combination:repeat_prompt": _repeat, "startend:end_checker": _end, "startend:quotation": _quoted, "punctuation:no_comma": _commas,
}  # fmt: skip
ADDED = (
    "keywords:existence", "keywords:forbidden_words", "change_case:english_lowercase", "change_case:english_capital", "punctuation:no_comma",
    "detectable_format:title", "length_constraints:number_words", "keywords:letter_frequency",
)  # fmt: skip
"""Kinds that combine with every kind outside their own group: a second instruction is one of them."""
ALONE = (
    "combination:repeat_prompt",
    "detectable_format:json_format",
    "language:response_language",
    "detectable_format:constrained_response",
)


def runs(text: str, length: int = 8) -> set[tuple[str, ...]]:
    """Return the runs of `length` words of a text."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def draw(count: int, seed: int, subjects: Iterable[str], tested: Iterable[str], partial: bool) -> list[dict[str, Any]]:
    """Return rows to import as prompts, the kinds in turn; none shares a run of eight words with a text of `tested`.

    partial: the score is the share of followed instructions. Raise ValueError if a kind has no such prompt left.
    """
    random, subjects, rows = Random(seed), list(subjects), dict[str, dict[str, Any]]()
    seen = set[tuple[str, ...]]().union(*map(runs, tested))
    kinds = list(MAKERS)
    for _ in range(100 * count):
        if len(rows) % len(kinds) == 0:
            random.shuffle(kinds)
        first, request = kinds[len(rows) % len(kinds)], random.choice(REQUESTS).format(random.choice(subjects))
        names = [first]
        second = random.choice(ADDED)
        if random.random() < 0.4 and first not in ALONE and second.partition(":")[0] != first.partition(":")[0]:
            names.append(second)
        made = [MAKERS[name](random, request) for name in names]
        prompt = " ".join([request, *(text for text, _ in made)])
        if prompt in rows or runs(prompt) & seen:
            continue
        verifier = {"name": "constraints", "instruction_id_list": names, "kwargs": [given for _, given in made], "partial": partial}
        rows[prompt] = {"prompt": prompt, "verifier": json.dumps(verifier), "task": "own"}
        if len(rows) == count:
            return list(rows.values())
    raise ValueError(f"{count} prompts of all kinds: {kinds[len(rows) % len(kinds)]} has no other that the test does not share")
