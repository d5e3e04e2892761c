"""Regeneration of the table of languages: `python tests/benchmarks/language_table.py ISO6391.txt [--half]`.

A language's row is computed from parallel text (NTREX-128's first half: 25 documents; the Universal Declaration of Human Rights: two)
relative to English's own documents. With little text, the value is shrunk towards the mean of the language's family in its script, then of
the script. Without text, FineWeb-2's published value is used, limited to within a quarter of that mean. ISO6391.txt: lines of a two-letter
code and a three-letter code. `--half`: use every other document, to test on the rest.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path[:0] = [str(Path(__file__).parents[2] / ".pkg"), str(Path(__file__).parent)]

from languages import OTHER_CODES, ntrex_documents, rows, udhr_documents  # noqa: E402

SHRINK = 4
PASSAGE, WORDS_ASKED, COVERED = 50, 2, 0.985
FEWEST, MOST, LONGEST = 8, 40, 12
GROUPS = (
    "hr bs sr sh cnr", "id ms jv su min", "no nn da", "af nl", "gl pt es", "tr az uz tk", "tt ba kk ky", "hi mr ne mai bh",
    "zu xh nd ss nr", "nso st tn", "zh yue hsn cjy wuu gan hak nan cdo lzh", "rw rn", "mi ty", "ar shi",
)  # fmt: skip
GROUP_OF = {name: group.split()[0] for group in GROUPS for name in group.split()}
Key = tuple[str, str]
# Codes that stand for several languages together, or for the same language in another edition of ISO 639.
ALSO = {
    "ar": "arb ara", "az": "azj", "et": "ekk", "lv": "lvs", "mg": "plt", "mn": "khk", "ms": "zlm zsm", "ne": "npi", "om": "gaz", "ps": "pbu",
    "sq": "als", "sw": "swh", "uz": "uzn", "zh": "cmn", "fa": "pes prs", "tl": "fil", "no": "nob nb", "ku": "kmr", "ff": "fuf fuc", "ak": "twi fat tw",
    "kg": "kng", "ay": "ayr", "gn": "gug", "kr": "knc", "or": "ory", "iu": "ike", "qu": "quz quy", "sc": "src", "sh": "hbs", "yi": "ydd", "hmn": "mww",
    "za": "zyb", "ik": "esi", "cr": "cwd", "oj": "ojb", "sr": "scc", "hr": "scr", "ro": "mol",
}  # fmt: skip
RATIOS = {"words": (0.4, 2.5), "mean_word_length": (0.4, 2.0), "newline_ratio": (0.5, 2.5)}
LEAST = {"alphabetic_word_fraction": 0.8, "terminated_line_fraction": 0.12, "c4_open_sentences": 5}
FRACTIONS = {
    "short_line_fraction": 0.67, "duplicate_line_fraction": 0.3, "duplicate_paragraph_fraction": 0.3, "repeated_line_character_fraction": 0.01,
    "ngram_coverage": 0.5, "top_2gram_character_fraction": 0.2, "top_3gram_character_fraction": 0.18, "top_4gram_character_fraction": 0.16,
    **{f"duplicate_{n}gram_character_fraction": 0.2 - n / 100 for n in range(5, 11)},
}  # fmt: skip
WIDEST = 3.0
STOP_WORD_SHARE = 0.1


def codes(file: str) -> dict[str, str]:
    """Return a map from any code to the code in use."""
    pairs = [line.split() for line in Path(file).read_text().splitlines() if line]
    found = {three: two for two, three in pairs} | {two: two for two, _ in pairs}
    found |= {other: code for code, others in ALSO.items() for other in others.split()}
    return found | OTHER_CODES | {"ckb": "ckb", "nb": "no", "nob": "no"}


def measured(texts: list[str]) -> Any:
    from puna.stages.curate.signals.measure import measure

    return measure(pa.chunked_array([pa.array(texts, pa.large_string())]), 5, 0.5).values


def quantile(values: Any, q: float) -> float:
    known = values[~np.isnan(values)]
    return float(np.quantile(known, q)) if len(known) else float("nan")


def own_factors(values: Any, english: Any) -> dict[str, float]:
    """Return the factors of one set of parallel documents; NaN: no factor, the rule abstains."""
    out = {}
    for name, (low, high) in RATIOS.items():
        ratio = values[name] / english[name]
        out[name] = float("nan") if np.isnan(ratio).any() else float(np.clip(np.median(ratio), low, high))
    for name, threshold in LEAST.items():
        if name == "terminated_line_fraction":
            # Twice the threshold: a signal on which good text sometimes falls below the threshold is not useful.
            out[name] = 1.0 if quantile(values[name], 0.02) >= 2 * threshold else float("nan")
        elif name == "alphabetic_word_fraction":
            out[name] = min(1.0, max(0.5, 1 + (quantile(values[name], 0.05) - quantile(english[name], 0.05)) / threshold))
        else:
            share = np.median(values[name] / english[name])
            out[name] = float("nan") if not share >= 0.5 else min(1.0, float(share))
    for name, threshold in FRACTIONS.items():
        more = quantile(values[name], 0.95) - quantile(english[name], 0.95)
        out[name] = more if np.isnan(more) else float(np.clip(1 + more / threshold, 1, WIDEST))
    return out


def passages(texts: list[str]) -> list[set[str]]:
    """Return the set of case-folded words of each passage of 50 words."""
    from puna.kernels.text.words import split

    out = []
    for text in texts:
        words = [w for w in split(text.lower()) if any(c.isalpha() for c in w) and not any(c.isdigit() for c in w)]
        out += [set(words[at : at + PASSAGE]) for at in range(0, len(words) - PASSAGE + 1, PASSAGE)]
    return out


def stop_words(sets: list[list[set[str]]], published: list[str]) -> list[str]:
    """Return the fewest most frequent words such that nearly every passage has two; for several sets of text, words frequent in all."""
    from puna.kernels.text.words import split

    sets = [one for one in sets if one]
    shares = [Counter(word for passage in one for word in passage) for one in sets]
    candidates = set().union(*shares)
    listed = set(published)

    def common(word: str) -> float:
        return min(share[word] / len(one) for share, one in zip(shares, sets, strict=True)) * (1.5 if word in listed else 1)

    ordered = sorted((w for w in candidates if len(w) <= LONGEST), key=lambda w: (-common(w), w))
    ordered = [word for word in ordered[: 2 * MOST] if split(word) == [word]][:MOST]
    for size in range(FEWEST, MOST + 1):
        chosen = set(ordered[:size])
        if all(sum(len(chosen & p) >= WORDS_ASKED for p in one) >= COVERED * len(one) for one in sets):
            break
    return ordered[:size]


def share_factor(texts: list[str], words: list[str]) -> float:
    """Return half of the share of stop words that nearly all texts reach, divided by the rule's threshold."""
    from puna.kernels.text.words import split

    listed, shares = set(words), []
    for text in texts:
        found = [w for w in split(text.lower()) if any(c.isalnum() for c in w)]
        shares.append(sum(w in listed for w in found) / max(len(found), 1))
    return 0.5 * float(np.quantile(shares, 0.02)) / STOP_WORD_SHARE


def as_groups(lists: dict[Key, list[str]], texts: dict[Key, list[str]]) -> tuple[dict[Key, list[str]], dict[Key, float]]:
    """Return the lists and shares of stop words for each language; easily confused languages of a script share the words of all of them."""
    asked: dict[Key, list[str]] = {}
    shares: dict[Key, float] = {}
    for key, own in lists.items():
        group = GROUP_OF.get(key[0])
        together = [key, *(other for other in lists if group and other != key and other[1] == key[1] and GROUP_OF.get(other[0]) == group)]
        asked[key] = list(dict.fromkeys([*own, *(word for other in together for word in lists[other])]))
        shares[key] = min(share_factor(texts[other], asked[key]) for other in together)
    return asked, shares


def usable(words: list[str]) -> list[str]:
    """Return the published words that consist of letters and are one word for the splitter."""
    from puna.kernels.text.words import split

    return [w for w in dict.fromkeys(w.lower() for w in words) if w.isalpha() and len(w) <= LONGEST and split(w) == [w]]


def mean_of(factors: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each factor; NaN if most have none."""
    out = {}
    for name in factors[0]:
        values = np.array([one[name] for one in factors])
        known = values[~np.isnan(values)]
        out[name] = float(known.mean()) if 2 * len(known) > len(values) else float("nan")
    return out


def drawn(own: dict[str, float], weight: int, towards: dict[str, float]) -> dict[str, float]:
    """Return own values averaged with the mean of related languages, weighted by the number of documents."""
    return {n: v if np.isnan(v) or np.isnan(towards[n]) else (weight * v + SHRINK * towards[n]) / (weight + SHRINK) for n, v in own.items()}


def main() -> None:
    from puna.models.languages.registry import ABSTAINS, FILE, SCALED
    from puna.models.languages.scripts import script

    canonical, half = codes(sys.argv[1]), "--half" in sys.argv
    code = lambda name: canonical.get(name.split("-")[0].split("_")[0], name.split("-")[0].split("_")[0])  # noqa: E731
    published = {}
    for row in rows("fineweb2_rules.jsonl.zst"):
        key = (code(row["language"]), row["language"].split("_")[1])
        if key not in published or (row["fineweb2_documents"] or 0) > (published[key]["fineweb2_documents"] or 0):
            published[key] = row
    news: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, text in ntrex_documents():
        news[code(name), script(text)][name].append(text)
    english_news = next(iter(news["en", "Latn"].values()))
    place = {text: at for texts in news.values() for group in texts.values() for at, text in enumerate(group)}
    law: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for three, _, half_of, text in udhr_documents():
        name = "ku" if three == "ckb" else code(three)
        if three.isalpha() and three not in ("und", "mis", "hmn"):
            law[name, script(text)].append((half_of, text))
    english_law = [text for _, text in sorted(law["en", "Latn"])]
    families = {key: row["family"] for key, row in published.items()}
    families |= {key: families.get((key[0], "Latn"), "") for key in (*news, *law) if key not in families}

    counted: dict[tuple[str, str], tuple[dict[str, float], int]] = {}
    lists: dict[tuple[str, str], list[str]] = {}
    evidence: dict[tuple[str, str], str] = {}
    texts_of: dict[tuple[str, str], list[str]] = {}
    reference_news, reference_law = measured(english_news), measured(english_law)
    for key in sorted({*news, *law}):
        pieces, weight = [], 0
        own_news = [t for group in news.get(key, {}).values() for t in group if not half or place[t] % 2 == 0]
        if len(own_news) >= 5:
            found = own_factors(measured(own_news), reference_news[[place[t] for t in own_news]])
            pieces += [found] * 3
            weight += len(own_news)
        if key in law:
            pieces.append(own_factors(measured([t for _, t in law[key]]), reference_law[[n for n, _ in law[key]]]))
            weight += len(law[key])
        if not pieces:
            continue
        together = {name: np.array([one[name] for one in pieces]) for name in pieces[0]}
        # The looser bound of the two kinds of text, because both are good. If one kind has no bound, there is none.
        wider = {n: (float(v.mean()) if n in RATIOS else float(v.min() if n in LEAST else v.max())) for n, v in together.items()}
        counted[key] = wider, weight
        listed = usable(published[key]["stopwords"]) if key in published else []
        lists[key] = stop_words([passages(own_news), passages([t for _, t in law.get(key, [])])], listed)
        texts_of[key] = [*own_news, *(t for _, t in law.get(key, []))]
        evidence[key] = f"NTREX {len(own_news)}, UDHR {len(law.get(key, []))} documents"
    lists, shares = as_groups(lists, texts_of)
    by_script, by_family = defaultdict(list), defaultdict(list)
    for key, (found, _) in counted.items():
        by_script[key[1]].append(found)
        by_family[families.get(key, ""), key[1]].append(found)
    of_script = {name: mean_of(found) for name, found in by_script.items()}
    of_family = {name: drawn(mean_of(found), len(found), of_script[name[1]]) for name, found in by_family.items() if name[0]}
    out = []
    for key in sorted({*counted, *published}):
        towards = of_family.get((families.get(key, ""), key[1])) or of_script.get(key[1])
        words = lists.get(key)
        if key in counted:
            found = drawn(*counted[key], towards) if counted[key][1] < 10 else counted[key][0]
            said = evidence[key]
        else:
            row = published[key]
            found = dict.fromkeys(SCALED, float("nan")) if towards is None else dict(towards)
            said = "no basis but FineWeb-2's stop words" if towards is None else f"mean of {families.get(key) or 'no family'} in {key[1]}"
            for name, value in (("mean_word_length", row["max_avg_word_length"] / 10), ("alphabetic_word_fraction", row["min_alphabetic_words"] / 0.8),
                                *((f"duplicate_{n}gram_character_fraction", v / (0.2 - int(n) / 100)) for n, v in row["dup_n_grams"].items())):  # fmt: skip
                if not np.isnan(found[name]):
                    low, high = 0.8 * found[name], 1.25 * found[name]
                    found[name] = float(np.clip(value, low, high))
                    found[name] = min(found[name], 1.0) if name in LEAST else found[name]
            words = usable(row["stopwords"])[:20]
            said += f"; FineWeb-2 {row['fineweb2_documents'] or 0} documents, {100 * (row['fineweb2_bible_ratio'] or 0):.0f} % Bible"
        # A list from the few words of one short text is not reliable.
        words = words if words and len(words) >= 4 else []
        # A published list comes from other text, so its share in good text is unknown. So it is from declarations alone, whose frequent
        # words are legal: where there is news to compare, such a bound drops all news in 35 of 112 languages (`evidence.py`).
        news_counted = not evidence.get(key, "NTREX 0").startswith("NTREX 0")
        found["stop_word_fraction"] = shares[key] if words and news_counted else float("nan")
        out.append((key, found, words, said))
    for found in of_script.values():
        found["stop_word_fraction"] = float("nan")
    out += [(("", name), found, [], "mean of the script's languages") for name, found in sorted(of_script.items())]
    # Code, numbers and signs have no language to be fair to: thresholds hold as they stand, and junk without letters does not pass.
    as_english = {name: float("nan") if name == "stop_word_fraction" else 1.0 for name in SCALED}
    out.append((("", "Zyyy"), as_english, [], "text without a language or letters is judged as English"))
    also = defaultdict(set)
    for other, name in canonical.items():
        if other != name and other not in ("yue",):
            also[name].add(other)
    with FILE.open("w", encoding="utf-8") as file:
        print(Path(__file__).with_name("language_table_head.txt").read_text(encoding="utf-8"), end="", file=file)
        print("language", "script", "codes", "family", "group", *SCALED, "stop_words", "evidence", sep="\t", file=file)
        for key, found, words, said in out:
            english = key == ("en", "Latn")
            cells = ["1" if english else ABSTAINS if np.isnan(found[name]) else f"{found[name]:.3g}" for name in SCALED]
            group = GROUP_OF.get(key[0], "")
            print(
                *key,
                " ".join(sorted(also[key[0]])) if key[0] else "",
                families.get(key, ""),
                group,
                *cells,
                " ".join(words),
                said,
                sep="\t",
                file=file,
            )


if __name__ == "__main__":
    main()
