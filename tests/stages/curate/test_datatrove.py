"""With `words: datatrove` words, decisions and reasons are datatrove's, on its live output.

Left out: texts with the word IS_ALPHA, with which datatrove's answer depends on the texts that it read before.
"""

from __future__ import annotations

import importlib.util
import json
import random
import warnings
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.utils.word_tokenizers import load_word_tokenizer

from puna.kernels.text.english_tables import DATA, data
from puna.kernels.text.english_words import english_words
from puna.stages.curate.rules.decide import decide
from puna.stages.curate.rules.groups import active_rules
from puna.stages.curate.rules.sets import DATATROVE_REASONS
from puna.stages.curate.select import SelectConfig
from puna.stages.curate.signals.measure import measure, names

FILTERS = {
    "gopher_quality": ("datatrove", GopherQualityFilter()),
    "gopher_repetition": ("datatrove", GopherRepetitionFilter()),
    "c4": ("datatrove", C4QualityFilter()),
    "c4 as FineWeb uses it": ("fineweb", C4QualityFilter(filter_no_terminal_punct=False)),
    "fineweb": ("datatrove", FineWebQualityFilter()),
}

EXCEPTIONS = ["".join(pieces.split(" ")) for pieces in data()["specials"]]
SIGNS = [*".,;:!?…'\"’‘“”()[]{}<>-–—~+*^/=_#&@$£€°%|\\`", "...", "..", "--", "---", "——", "……", "US$", "C$", "'s", "’S"]
PIECES = [
    *("a", "b", "A", "AB", "word", "Word", "WORD", "1", "23", "4.5", "é", "É", "ß", "日", "本", "ก", "я", "Я", "µ", "٣", "😀", "™", "©"),
    *("http://", "https://", "www.", "example", "com", ".com", ".org", "@", "a@b.com", "192.168.1.1", "8.8.8.8", "127.0.0.1", ":80", "/p"),
    *("\u200b", "\u00ad", "\u0301", "ﬁ", "𝐀", "\ufeff", "x_y"),
]
SPACES = [" ", " ", " ", " ", "  ", "\n", "\t", "\u00a0", "\n\n", "\u2028", " \n", "\x85"]
PROSE = ["the", "of", "and", "to", "with", "river", "carries", "water", "from", "hills", "into", "a", "wide", "valley", "every", "spring",
         "people", "that", "have", "boats", "cross", "it", "slowly", "1984", "don't", "U.S.", "Mr.", "e.g.", "co-operate", "3km", "$5"]  # fmt: skip
ENDS = [".", ".", ".", "!", "?", '."', "…", "...", ":", "", ".[1]", ". [2]", ".[citation needed]", "。", " .", "?!", ".)"]
LINES = ["• item", "- entry", "#tag ##", "3 likes", "lorem ipsum dolor sit.", "if (x) { return; }.", "Please enable JavaScript now.",
         "Our privacy policy and terms of use.", "Read more...", "日本語の文章です。", "x" * 1001 + " a b c.", "[1] [2] [3]", "   ", "\t", "wait…"]  # fmt: skip


def jumble(rnd):
    """Exceptions, signs and odd characters run together."""
    atoms = EXCEPTIONS + SIGNS * 12 + PIECES * 8
    return "".join(rnd.choice(atoms if rnd.random() < 0.75 else SPACES) for _ in range(rnd.randint(1, 40)))


def page(rnd):
    """Prose with what each rule looks for, in random doses."""
    odd, repeat, paragraph, symbol = (rnd.random() ** 3 for _ in range(4))
    lines = []
    for _ in range(rnd.randint(0, 25)):
        if lines and rnd.random() < repeat:
            lines.append(rnd.choice(lines))
        elif rnd.random() < odd:
            lines.append(rnd.choice(LINES))
        else:
            words = [rnd.choice(PROSE if rnd.random() > symbol else SIGNS) for _ in range(rnd.randint(1, 30))]
            lines.append(" ".join(words) + rnd.choice(ENDS))
    return "".join(line + ("\n\n" if rnd.random() < paragraph else rnd.choice(["\n", "\n", " ", "\r\n"])) for line in lines)


@pytest.mark.parametrize("seed", range(4))
def test_words(seed):
    rnd, tokenizer = random.Random(seed), load_word_tokenizer("en")
    for text in [make(rnd) for make in (jumble, page) for _ in range(1500 if make is jumble else 100)]:
        assert english_words(text) == tokenizer.word_tokenize(text)


def ours(texts, name):
    """The reason for which each text goes, None where it stays."""
    group, (rule_set, _) = name.split(" ")[0], FILTERS[name]
    off = dict.fromkeys(field for field in SelectConfig.model_fields if field not in ("rule_set", group))
    config = SelectConfig(rule_set=rule_set, **off)
    values = measure(pa.array(texts), "datatrove", 5, 0.5).values
    table = pa.table({"id": [f"{n}" for n in range(len(texts))], "source": ["web"] * len(texts), **{name: values[name] for name in names("datatrove")}})
    dropped = decide(table, list(active_rules(config)))
    found = dict(zip(dropped["id"].to_pylist(), dropped["rule"].to_pylist(), strict=True))
    return [DATATROVE_REASONS[found[f"{n}"]] if f"{n}" in found else None for n in range(len(texts))]


def theirs(texts, name):
    results = [FILTERS[name][1].filter(Document(text=text, id="x")) for text in texts]
    return [result[1] if isinstance(result, tuple) else None for result in results]


@pytest.mark.parametrize("name", FILTERS)
def test_decisions_and_reasons(name):
    reasons = Counter()
    for seed in range(3):
        rnd = random.Random(seed)
        texts = ["", " ", "\n", "word", *(page(rnd) for _ in range(250)), *(jumble(rnd) for _ in range(50))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a mean of no words
            expected = theirs(texts, name)
        assert ours(texts, name) == expected
        reasons += Counter(expected)
    # The texts meet most rules, and some pass.
    assert reasons[None] > 20
    assert len(reasons) >= {"gopher_quality": 8, "gopher_repetition": 9, "fineweb": 5}.get(name, 4)


def test_the_tables_are_the_live_ones(capsys):
    file = Path(__file__).parents[2] / "benchmarks" / "peer_english_tables.py"
    spec = importlib.util.spec_from_file_location("peer_english_tables", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    assert json.loads(capsys.readouterr().out) == json.loads(DATA.read_text(encoding="utf-8"))
