"""The cost of curation: good text lost to each rule and good names lost to the address filter, compared with the junk that they catch.

    python tests/benchmarks/evidence.py [--data FOLDER] [--part rules|names|…] [--json] [--write]

FOLDER (default: ../shared/data) holds the data sets of the other benchmarks. A part whose data is missing is skipped with a note.

`rules`: `puna rules` for every shipped recipe on annotated pages: WCXB's development pages by type (`web_wcxb_dev`), and articles of other
extractors' tests (type `news`: `web_readability`, `web_newspaper`). Junk is the whole text of pages (with menus) and other texts to which
`stages/curate/data/grades.tsv` gives at most 1 of 5. Pages whose HTML does not hold their text are left out: six forum pages, whose text is
fetched by a script. The model behind `quality.min_quality` was trained on these grades. `good_words_lost_TYPES` is, for the worst recipe,
the share of the annotated words of TYPES whose page is dropped or whose line is removed, including pages without any extracted text;
`good_words_lost_TYPES_RECIPE` is the share for each recipe; `junk_caught_RECIPE` is the share of junk words that are removed. `names`:
addresses that the word list of `url_filter` drops. `url_filter_wrong`: of 1,000 innocent names: hosts of WCXB's pages, names under public
suffixes (including towns of Norway and Japan), and pairs of words from 36 books whose letters form an adult word across the boundary
(`vapor` + `nations`). `url_filter_wrong_joined`: of such pairs alone. `url_filter_recall`: of the names in
`stages/curate/data/adult_domains.txt` that contain an adult word, the share that the words find without the list. `languages`
(`FOLDER/languages`): `languages_lost_whole`: of Lingua's 75 languages (`languages_judged`, in NTREX's news and the Universal Declaration of
Human Rights), the number of which `clean` keeps no document; `languages_lost_whole_all`: the same for all languages in the data.
`law_bound_languages`: languages in both sets that have a list of stop words; `law_bound_lost_whole`: those whose news would all be dropped
by a bound on stop words computed from the Declaration alone. Without news, that rule abstains. `harm` (`--harm FOLDER` or `FOLDER/harm`, as
`harm_sets.py` describes it): AUC of the harm model for each category, for answers of language models that people scored as harmful (at
least .5 of 1) and that trained nothing. `..._auc_answers`: against answers scored at most .25, mostly to the same requests; `..._auc_web`:
against the half of WCXB's development pages and Wikipedia articles on near subjects that trained nothing, cut to the same lengths. `_low`
and `_high`: 95 % interval; `_word_list`, `_sexual_words`, `_length`: the same for a list of bad words by category, `dirty_word_ratio`, and
the number of words. `harm_auc_min` is the worst category's `..._auc_web`, `harm_auc_min_answers` its `..._auc_answers`.
`harm_CATEGORY_caught` and `..._harmless_above`: share of the harmful and of the harmless answers above the default bound of the rule.
`harm_pages_above_TYPE`, `harm_good_words_above_TYPE`: share of the development pages, and of their words, that the rules of
`select_model.harm` drop; `harm_articles_above_CATEGORY`: share of the Wikipedia articles on subjects near a category. `extraction`, run
only if named (it trains four models, takes half an hour on one core, and needs lightgbm): F1 of words compared with trafilatura.
`f1_unseen_sites` is that of `curation_extract.py --unseen-sites`; `f1_articles` is the mean over the articles of `curation_articles.py`
from sites that were used neither for the rules nor for the weights of the shipped extractor. `--write` writes the rows of the recipe
`clean` to `flows/report/rule_evidence.tsv`, which the report shows, followed by one row for each shipped recipe: a digest of its rules, and
the shares that all its rules drop together. `tests/flows/test_rule_evidence.py` compares them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
sys.path[:0] = [str(ROOT), str(ROOT / ".pkg"), str(Path(__file__).parent)]

import curation_articles  # noqa: E402

from puna.flows.cli.rules import WORD, Annotations, Evidence, Page, columns_of, evidence  # noqa: E402
from puna.flows.engine.recipe import shipped_recipes  # noqa: E402
from puna.flows.engine.trace import fields, flow_named, load  # noqa: E402
from puna.stages.curate.extract import ExtractConfig  # noqa: E402
from puna.stages.curate.rules.groups import active_rules  # noqa: E402
from puna.stages.curate.select import SelectConfig  # noqa: E402
from puna.storage import Store  # noqa: E402

TYPES = {"articles": "article", "documentation": "documentation", "forums": "forum"}
TAG = re.compile("<[^<>]*>")
JUNK = 1
"""Maximum grade of a junk text."""
LINGUA = (
    "af sq ar hy az eu be bn no bs bg ca zh hr cs da nl en eo et fi fr lg ka de el gu he hi hu is id ga it ja kk ko la lv lt mk ms mi mr mn "
    "nn fa pl pt pa ro ru sr sn sk sl so st es sw sv tl ta te th ts tn tr uk ur vi cy xh yo zu"
)
TABLE = ROOT / "flows/report/rule_evidence.tsv"
ALL_RULES = "all rules of"


def pages(folder: Path) -> Iterator[Page]:
    """Yield the annotated pages of the data sets in the folder."""
    grades = (ROOT / "stages/curate/data/grades.tsv").read_text(encoding="utf-8").splitlines()[1:]
    junk = {(dataset, page) for dataset, page, reading, grade in (line.split("\t") for line in grades) if reading == "whole" and int(grade) <= JUNK}
    wcxb = folder / "web_wcxb_dev"
    rows = [json.loads(line) for line in curation_articles._unpacked(wcxb / "dev_truth.jsonl.zst").splitlines()]
    truth = {row["file_id"]: row for row in rows if "file_id" in row}
    for path, body in curation_articles._files(wcxb / "dev_html.tar.zst"):
        name = Path(path).stem
        if name in truth:
            row = truth[name]
            html = body.decode("utf-8", "replace")
            text = row["ground_truth"].get("main_content") or ""
            if _holds(html, text):
                yield Page(html, True, text, type=row["_internal"]["page_type"]["primary"])
            if ("wcxb", name) in junk:
                yield _whole(body)
    for page in curation_articles.read(folder):
        if page.truth is not None:
            yield Page(page.body.decode("utf-8", "replace"), True, page.truth, type="news")
        if (page.dataset, page.name) in junk:
            yield _whole(page.body)


def _holds(html: str, truth: str) -> bool:
    """Return True if the HTML contains at least a quarter of the sampled runs of four words (every twentieth) of the truth."""
    words = WORD.findall(truth)
    runs = [" ".join(words[at : at + 4]) for at in range(0, len(words) - 3, 20)]
    inside = " ".join(WORD.findall(unescape(html)) + WORD.findall(unescape(TAG.sub(" ", html))))
    return not runs or sum(run in inside for run in runs) >= len(runs) / 4


def _whole(body: bytes) -> Page:
    from resiliparse.extract.html2text import extract_plain_text

    from puna.models.extraction.clean import decode

    return Page(str(extract_plain_text(decode(body, None, html=True), main_content=False)), False, None, good=False, type="junk")


def rules(folder: Path, write: bool) -> dict[str, float]:
    """Return the figures of the part `rules` (see the module)."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        annotated = Annotations(list(pages(folder)), Store.open(place), ExtractConfig())
        results = {name: evidence(annotated, name) for name in shipped_recipes()}
    for name, result in results.items():
        figures |= {f"good_words_lost_{plural}_{name}": result.loss(f"type={kind}") for plural, kind in TYPES.items()}
        whole = result.whole["type=junk"].bad
        figures[f"junk_caught_{name}"] = sum(row.first["type=junk"].bad for row in result.rows) / whole
    worst = {f"good_words_lost_{plural}": max(figures[f"good_words_lost_{plural}_{name}"] for name in results) for plural in TYPES}
    if write:
        TABLE.write_text(table(results), encoding="utf-8")
    return worst | figures


def _selections(recipe: str, changes: Sequence[str]) -> Iterator[tuple[str, SelectConfig]]:
    """Yield the `select` configurations of a recipe by step."""
    loaded, steps = load(recipe, list(changes), "curate"), fields(flow_named("curate"))
    for step in ("select", "select_model"):
        for config in loaded.configs(steps[step]):
            assert isinstance(config, SelectConfig)
            yield step, config


def conditions(recipe: str) -> dict[str, str]:
    """Return the conditions of a recipe's rules on signals, as the table names them."""
    rules = [(step, rule) for step, config in _selections(recipe, ()) for rule in active_rules(config)]
    return {f"{step}.{rule.name}": f"{rule.drop.signal} {rule.drop.when} {rule.threshold}" for step, rule in rules}


def digest(recipe: str, changes: Sequence[str] = ()) -> str:
    """Return a digest of a recipe's rules: thresholds, conditions, line rules, SQL expressions, and the quality model."""
    rules = [(step, *active_rules(config), config.sql, config.lines, config.per_language) for step, config in _selections(recipe, changes)]
    trains = bool(load(recipe, list(changes), "curate").configs(fields(flow_named("curate"))["train_quality"]))
    return hashlib.sha256(repr((rules, trains)).encode()).hexdigest()[:16]


def table(results: Mapping[str, Evidence]) -> str:
    """Return tab-separated text: for each rule of `clean` the shares of words that it drops, alone and as the first that fires.

    Further rows, one per recipe, hold the recipe's digest and the shares of all its rules together.
    """
    result = results["clean"]
    rows = columns_of(result, "type")[:-1]
    rows += [columns_of(own, "type")[-1] | {"rule": f"{ALL_RULES} {name}", "drops": digest(name)} for name, own in results.items()]
    types = [group.partition("=")[2] for group in result.whole if group.startswith("type=") and result.whole[group].good]
    names = ["rule", "drops", "pages", "good_lost", "bad_caught", "first_good_lost", "first_bad_caught", *types]
    lines = ["\t".join(names)]
    for row in rows:
        values = [row.get(name, "") for name in names]
        lines.append("\t".join(f"{value:.4f}" if isinstance(value, float) else str(value) for value in values))
    return "\n".join(lines) + "\n"


def names(folder: Path, write: bool) -> dict[str, float]:
    """Return the figures of the part `names` (see the module)."""
    from publicsuffixlist import PublicSuffixList

    from puna.stages.curate import url_filter

    rows = [json.loads(line) for line in curation_articles._unpacked(folder / "web_wcxb_dev/dev_truth.jsonl.zst").splitlines()]
    hosts = sorted({host for row in rows if (host := urlsplit(row.get("url") or "").hostname)})
    suffixes = sorted(name for name in PublicSuffixList(only_icann=True)._publicsuffix if name.isascii() and name not in url_filter.SUFFIXES)
    joined = [f"{name}.org" for name in _joined(folder)]
    innocent = [*_some(hosts, 300), *_some(joined, 300), *(f"www.{name}" for name in suffixes)]
    innocent = innocent[:300] + _some(innocent[300:], 700)
    wrong = [name for name in innocent if url_filter.adult_name(name)]
    vocabulary = url_filter._vocabulary()
    listed = [name for name in url_filter._lines(url_filter.LISTS["adult"]) if vocabulary.stems.search(name)]
    caught = sum(bool(url_filter.adult_name(name)) for name in listed)
    print(f"names: {len(innocent):,}, dropped: {wrong}; of {len(listed)} adult ones {caught} are dropped", file=sys.stderr)
    return {
        "url_filter_wrong": float(len(wrong)), "url_filter_names": float(len(innocent)), "url_filter_recall": caught / len(listed),
        "url_filter_wrong_joined": sum(bool(url_filter.adult_name(name)) for name in joined) / len(joined),
    }  # fmt: skip


def _some(values: list[str], count: int) -> list[str]:
    """Return some of the values, chosen by their hash."""
    return sorted(values, key=lambda value: hashlib.sha256(value.encode()).digest())[:count]


def _joined(folder: Path) -> list[str]:
    """Return joined pairs of words from the books, with an adult word across the boundary that begins inside the first word."""
    from puna.stages.curate import url_filter

    vocabulary = url_filter._vocabulary()
    stems = sorted(vocabulary.stems.pattern.split("|"))
    books = curation_articles._unpacked(folder / "text_books/books36.jsonl.zst").splitlines()
    counts = Counter(word for line in books for word in set(re.findall("[a-z]{3,}", json.loads(line)["text"])))
    words = sorted(word for word, count in counts.items() if count >= 6 and word not in vocabulary.whole | vocabulary.adult)
    pairs: set[str] = set()
    for stem in stems:
        for cut in range(1, len(stem)):
            left = [word for word in words if word.endswith(stem[:cut]) and len(word) > cut and stem not in word]
            right = [word for word in words if word.startswith(stem[cut:]) and stem not in word]
            pairs.update(a + b for a in _some(left, 30) for b in _some(right, 10))
    return sorted(pairs)


def languages(folder: Path, write: bool) -> dict[str, float]:
    """Return the figures of the part `languages` (see the module)."""
    os.environ["PUNA_LANGUAGES_DATA"] = str(folder / "languages")
    import language_table
    from languages import code_of, ntrex_documents, udhr_documents

    from puna.models.languages.scripts import script
    from tests.benchmarks.fairness import Labelled, fairness

    news: dict[tuple[str, str | None], list[str]] = {}
    law: dict[tuple[str, str | None], list[str]] = {}
    for name, text in ntrex_documents():
        news.setdefault((code_of(name), script(text)), []).append(text)
    for name, _, _, text in udhr_documents():
        law.setdefault((code_of(name), script(text)), []).append(text)
    documents = [Labelled(key[0], text) for texts in (news, law) for key, own in texts.items() for text in own]
    judged = fairness(documents, changes=["select.language={}"])
    kept = {row["language"]: row["kept"] for row in judged.rows}
    asked = LINGUA.split()
    lost = bounds = 0
    for key in sorted(news.keys() & law.keys(), key=str):
        if len(words := language_table.stop_words([language_table.passages(law[key])], [])) >= language_table.FEWEST:
            bound, bounds = language_table.share_factor(law[key], words), bounds + 1
            lost += max(2 * language_table.share_factor([text], words) for text in news[key]) < bound
    return {
        "languages_judged": float(len(asked)), "languages_lost_whole": float(sum(kept[name] == 0 for name in asked)),
        "languages_judged_all": judged.figures["languages"], "languages_lost_whole_all": judged.figures["languages_at_zero"],
        "law_bound_languages": float(bounds), "law_bound_lost_whole": float(lost),
    }  # fmt: skip


def harm(folder: Path, write: bool) -> dict[str, float]:
    """Return the figures of the part `harm` (see the module)."""
    import harm_evidence

    if not (HARM or folder / "harm").is_dir():
        print(f"harm: skipped, since there is no folder {HARM or folder / 'harm'}; give --harm FOLDER", file=sys.stderr)
        return {}
    return harm_evidence.figures(HARM or folder / "harm", folder)


def extraction(folder: Path, write: bool) -> dict[str, float]:
    """Return the figures of the part `extraction` (see the module)."""
    import curation_extract

    if find_spec("lightgbm") is None:
        sys.exit("evidence: --part extraction needs lightgbm; install it beside Puna, or leave this part out")
    held_out = [page for page in curation_articles.read(folder) if page.half == "held_out" and page.truth is not None]
    scores, sets = curation_articles.figures(held_out), Counter(page.dataset for page in held_out)
    found = {"articles": float(len(held_out))}
    for system, name in (("extract", "f1_articles"), ("trafilatura", "trafilatura_f1_articles")):
        found[name] = sum(scores[f"{one}_{system}_f1"] * count for one, count in sets.items()) / len(held_out)
    return found | curation_extract.unseen_sites(folder / "web_wcxb_dev")


PARTS: dict[str, Callable[[Path, bool], dict[str, float]]] = {
    "rules": rules, "names": names, "languages": languages, "harm": harm, "extraction": extraction,
}  # fmt: skip
LONG = ("extraction",)
HARM: Path | None = None


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data", help="folder of the sets")
    parser.add_argument("--harm", type=Path, help="folder of the harm sets; default: harm in the folder of the sets")
    parser.add_argument("--part", choices=PARTS, action="append", help="measure this alone (repeatable)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the committed table of rules")
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        sys.exit(f"evidence: no folder {arguments.data}; give --data FOLDER (see --help)")
    global HARM
    HARM = arguments.harm
    figures: dict[str, float] = {}
    for name in arguments.part or (name for name in PARTS if name not in LONG):
        figures |= PARTS[name](arguments.data, arguments.write)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:48} {value:.4f}")


if __name__ == "__main__":
    main()
