"""Rules and selection: by hand, compared with DuckDB, and on real stages."""

from __future__ import annotations

from typing import Annotated

import pyarrow as pa
import pytest
from pydantic import Field

from puna.stages.contract import SIGNALS, Facts, InputFacts, execute
from puna.stages.contract.config import parse
from puna.stages.curate import code_reasoning, domains, heuristics, language, quality
from puna.stages.curate.rules.decide import decide
from puna.stages.curate.rules.groups import Drop, GopherQualityRules, WebRules, active_rules, rule_group
from puna.stages.curate.select import SelectConfig, select, without_lines
from puna.storage import PunaError, Store

SCORING = (code_reasoning, domains, heuristics, language, quality)  # importing these modules declares their signals
OFF = dict.fromkeys(name for name in SelectConfig.model_fields if name not in ("groups", "sql"))


def config(**groups):
    return parse(SelectConfig, {**OFF, **groups}, "select")


def signals(store, **columns):
    return store.import_table("signals", pa.table(columns))


@pytest.mark.parametrize("given", [["eng", "deu", "zh-cn", "nb", False, "zxx", "qqq"], ("en", "de", "zh", "no", "no", "zxx", "qqq")])
def test_languages_are_named_by_any_code(given):
    assert config(language={"languages": given}).language.languages == ("en", "de", "zh", "no", "no", "zxx", "qqq")
    for code in ("English", "xx", "", True):
        with pytest.raises(PunaError, match="is not the ISO 639 code of a language|valid string"):
            config(language={"languages": [code]})
    with pytest.raises(PunaError, match="valid tuple"):
        config(language={"languages": "eng"})


def test_the_first_rule_in_declared_order_is_recorded(tmp_path, make_documents):
    store = Store.open(tmp_path)
    given_ = {
        "documents": make_documents(store, [("a", "web", "x"), ("b", "web", "y"), ("c", "web", "z")]),
        "signals": [
            signals(store, id=["a", "b", "c"], words=[49, 10, 50], mean_word_length=[3.0, 2.0, 10.0], hash_ratio=[0.0, 0.0, 0.1]),
            signals(store, id=["a", "b", "c"], language_score=[0.9, 0.2, 0.65]),
        ],
    }
    rules = dict.fromkeys(
        ("max_words", "max_ellipsis_ratio", "max_bullet_lines", "max_ellipsis_lines", "min_alphabetic_words", "min_stop_words",
         "min_stop_word_fraction", "max_misread")
    )
    made = execute(select, config(language={}, gopher_quality=rules), given_, store)
    # Values equal to a threshold are kept: 50 words, length 10, ratio 0.1, score 0.65.
    assert made.read()["id"].to_pylist() == ["c"]
    assert made.read("dropped").to_pylist() == [
        {"id": "a", "rule": "gopher_quality.min_words", "value": 49.0, "threshold": 50.0, "detail": None},
        {"id": "b", "rule": "language.min_score", "value": 0.2, "threshold": 0.65, "detail": None},
    ]


@pytest.mark.parametrize("rule", active_rules(SelectConfig(language={}, code_reasoning={}, quality={})), ids=lambda rule: rule.name)
def test_every_default_rule_fires_beyond_its_threshold_and_not_on_it(rule):
    step = 1e-6 if rule.drop.when == ">" else -1e-6
    values = pa.array([rule.number, rule.number + step], pa.float64())
    source = rule.sources[0] if rule.sources else "web"
    kinds = {kind.signal: [kind.minimum if rule.of_kind else 0.0] * 2 for kind in rule.kinds}
    found = decide(pa.table({"id": ["on", "beyond"], "source": [source] * 2, **kinds, rule.drop.signal: values}), [rule])
    assert found["id"].to_pylist() == ["beyond"]
    assert found["rule"].to_pylist() == [rule.name]
    assert set(rule.signals) <= set(SIGNALS)


def test_code_and_reasoning_pages_have_rules_of_their_own(tmp_path, make_documents):
    store = Store.open(tmp_path)
    ids = list("abcdefgh")
    given_ = {
        "documents": make_documents(store, [(i, "code" if i == "g" else "web", i) for i in ids]),
        "signals": [
            signals(
                store, id=ids, words=[60, 60, 60, 30, 30, 60, 30, 60], alphabetic_word_fraction=[0.6, 0.6, 0.6, 0.9, 0.9, 0.4, 0.1, 0.6],
                code_score=[0.5, 0.49, 0.0, 0.9, None, None, None, 0.1], reasoning_score=[0.0, 0.49, 0.7, 0.0, 0.0, 0.8, None, 0.1],
                code_lines=[0, 7, 0, 0, 0, 0, 0, 8],
            )
        ],
    }  # fmt: skip
    quality = {**dict.fromkeys(["max_words", "min_mean_word_length", "max_mean_word_length", "max_hash_ratio", "max_ellipsis_ratio",
                                "max_bullet_lines", "max_ellipsis_lines", "min_stop_words", "min_stop_word_fraction", "max_misread"]), "min_words": 20}  # fmt: skip
    own = {"max_repeated_line_characters": None, "min_code": 0.5, "min_reasoning": 0.5}
    made = execute(select, config(gopher_quality=quality, code_reasoning=own), given_, store)
    # a, c, h: pages of these kinds whose words pass the kind's own bound; b: just misses both kinds; e: not measured, so of neither kind.
    assert made.read()["id"].to_pylist() == ["a", "c", "e", "g", "h"]
    assert {r["id"]: r["rule"] for r in made.read("dropped").to_pylist()} == {
        "b": "gopher_quality.min_alphabetic_words", "d": "code_reasoning.min_words", "f": "code_reasoning.min_alphabetic_words",
    }  # fmt: skip
    judged = execute(select, config(gopher_quality=quality, code_reasoning={**own, "spared_by": []}), given_, store)
    assert {r["id"] for r in judged.read("dropped").to_pylist() if r["rule"].startswith("gopher")} == {"a", "b", "c", "f", "h"}
    off = dict.fromkeys(("min_code_lines", "min_code", "min_reasoning"))
    without = execute(select, config(gopher_quality=quality, code_reasoning={**own, **off}), given_, store)
    assert {r["rule"] for r in without.read("dropped").to_pylist()} == {"gopher_quality.min_alphabetic_words"}
    bare = {**given_, "signals": [signals(store, id=ids, words=[60] * 8, alphabetic_word_fraction=[0.9] * 8, code_lines=[0] * 8)]}
    with pytest.raises(PunaError, match=r"'code_score', which no input contains.*set code_reasoning=null"):
        execute(select, config(gopher_quality=quality, code_reasoning=own), bare, store)


def test_one_threshold_can_be_set_and_one_rule_turned_off():
    names = [r.name for r in active_rules(SelectConfig())]
    changed = {
        r.name: r.number for r in active_rules(parse(SelectConfig, {"gopher_quality": {"min_words": 60, "max_words": None}}, "select"))
    }
    assert changed["gopher_quality.min_words"] == 60
    assert [n for n in names if n != "gopher_quality.max_words"] == list(changed)
    assert not list(active_rules(config()))
    with pytest.raises(PunaError, match=r"select\.gopher_quality\.min_word: no such field"):
        parse(SelectConfig, {"gopher_quality": {"min_word": 60}}, "select")
    with pytest.raises(PunaError, match=r"select\.fineweb\.max_short_lines"):
        parse(SelectConfig, {"fineweb": {"max_short_lines": 1.5}}, "select")


def test_sources_have_their_own_rules(tmp_path, make_documents):
    store = Store.open(tmp_path)
    docs = make_documents(store, [("a", "web", "x"), ("b", "code", "y"), ("c", "wikipedia", "z"), ("d", "code", "w")])
    found = signals(store, id=["a", "b", "c", "d"], words=[30, 30, 30, 30], max_line_length=[9999, 80, 9999, 9999])
    only = {
        "gopher_quality": {f: None for f in type(SelectConfig().gopher_quality).model_fields if f[:3] in ("min", "max")} | {"min_words": 50}
    }
    off = {f: None for f in type(SelectConfig().code).model_fields if f[:3] in ("min", "max")}
    made = execute(
        select,
        config(**only, code={**off, "max_line_length": 1000}, curated={"min_words": 20}),
        {"documents": docs, "signals": [found]},
        store,
    )
    assert {r["id"]: r["rule"] for r in made.read("dropped").to_pylist()} == {"a": "gopher_quality.min_words", "d": "code.max_line_length"}


def test_what_is_not_measured(tmp_path, make_documents):
    store = Store.open(tmp_path)
    docs = make_documents(store, [("a", "web", "x"), ("b", "web", "y")])
    found = signals(store, id=["a", "b"], token_kl_excess=[None, 9.0], language=[None, "en"], language_score=[0.9, 0.9])
    rules = {"divergence": {}, "language": {"languages": ["en", "fr"]}}
    made = execute(select, config(**rules), {"documents": docs, "signals": [found]}, store)
    # A missing divergence is no reason to drop a document; a missing language is.
    assert [(r["rule"], r["value"], r["detail"]) for r in made.read("dropped").to_pylist()] == [
        ("language.languages", None, "not measured"), ("divergence.max_excess", 9.0, None)
    ]  # fmt: skip


def test_errors_name_what_is_missing(tmp_path, make_documents):
    store = Store.open(tmp_path)
    docs = make_documents(store, [("a", "web", "x"), ("b", "web", "y")])
    one = signals(store, id=["a"], quality=[0.5], quality_rank=[0.5])
    with pytest.raises(
        PunaError, match=r"rule divergence\.max_excess reads the signal 'token_kl_excess', which no input contains .*quality"
    ):
        execute(select, config(divergence={}), {"documents": docs, "signals": [one]}, store)
    with pytest.raises(PunaError, match="document b has no signals in"):
        execute(select, config(quality={}), {"documents": docs, "signals": [one]}, store)
    other = signals(store, id=["a", "b"], quality_rank=[0.1, 0.2])
    with pytest.raises(PunaError, match="signal 'quality_rank' is in both"):
        execute(select, config(quality={}), {"documents": docs, "signals": [one, other]}, store)
    with pytest.raises(PunaError, match="'line_signals', which 0 inputs contain"):
        execute(select, config(lines={}), {"documents": docs, "signals": [other]}, store)


def test_repeated_lines_of_kept_documents_go(tmp_path, make_documents):
    store = Store.open(tmp_path)
    docs = make_documents(store, [("a", "web", "one\ntwo\nthree\nfour"), ("b", "code", "one\ntwo"), ("c", "web", "")])
    lines = pa.table({
        "id": ["a", "a", "a", "b"], "line": pa.array([1, 2, 3, 1], pa.int32()), "words": pa.array([32, 32, 29, 32], pa.int32()),
        "ngram_coverage": [1.0, 0.9, 1.0, 1.0],
    })  # fmt: skip
    found = store.import_table("signals", pa.table({"id": ["a", "b", "c"], "words": [9, 9, 0]}), line_signals=lines)
    made = execute(select, config(lines={}), {"documents": docs, "signals": [found]}, store)
    # 0.9 is not more than 0.9; a line of 29 words is too short to be judged; code keeps its lines.
    assert made.read()["text"].to_pylist() == ["one\nthree\nfour", "one\ntwo", ""]
    assert made.read("removed_lines").to_pylist() == [
        {"id": "a", "line": 1, "text": "two", "rule": "lines.max_ngram_coverage", "value": 1.0}
    ]
    assert made.read("dropped").num_rows == 0


def test_a_document_of_which_blank_lines_alone_are_left_is_dropped(tmp_path, make_documents):
    store = Store.open(tmp_path)
    docs = make_documents(store, [("a", "web", " \n\nagain"), ("b", "web", " \n\n"), ("c", "web", "again\n\nnew")])
    lines = pa.table({"id": ["a", "c"], "line": pa.array([2, 0], pa.int32()), "words": pa.array([40] * 2, pa.int32()), "ngram_coverage": [1.0] * 2})
    found = store.import_table("signals", pa.table({"id": ["a", "b", "c"], "words": [9, 0, 9]}), line_signals=lines)
    made = execute(select, config(lines={}), {"documents": docs, "signals": [found]}, store)
    assert made.read()["text"].to_pylist() == [" \n\n", "new"]  # a blank document that loses no line is left to other rules
    assert [(row["id"], row["rule"]) for row in made.read("dropped").to_pylist()] == [("a", "lines")]


def test_documents_that_a_rule_skips_for_their_language_are_counted(tmp_path, make_documents):
    """Only documents of the rule's sources and kinds are counted, although others may have the same language."""
    store, ids = Store.open(tmp_path), list("abcde")
    languages = pa.table({"language": ["lo", "en"], "script": ["Laoo", "Latn"], "documents": [4, 1], "words_factor": pa.array([None, 1.0]),
                          "stop_words": pa.nulls(2, pa.string()), "evidence": ["", ""]})  # fmt: skip
    of_language = pa.table({"id": ids, "language": ["lo"] * 4 + ["en"], "script": ["Laoo"] * 4 + ["Latn"]})
    found = [store.import_table("signals", of_language, languages=languages), signals(store, id=ids, words=[60] * 5)]
    docs = make_documents(store, [(i, source, i) for i, source in zip("abde", ("web", "wikipedia", "web", "web"), strict=True)])
    bounds = {name: None for name in GopherQualityRules.model_fields if name not in ("sources", "exempt_sources", "min_words")}
    made = execute(select, config(gopher_quality=bounds, curated={}, per_language=True), {"documents": docs, "signals": found}, store)
    assert made.manifest.metrics == {"characters": 4, "rules": 2, "abstained_gopher_quality.min_words": 2, "abstained_curated.min_words": 1}


def test_lines_that_c4_takes_out(tmp_path, make_documents):
    store = Store.open(tmp_path)
    text = 'Menu\nThis one stays.\n\nSo does "this one." \nToo short.\r\nNo end to this line...\nA\u00a0line\u2028of four!\nend of it?'
    docs = make_documents(store, [("a", "web", text), ("b", "code", "x = 1"), ("c", "web", "Menu\n\nHome"), ("d", "web", ""), ("e", "web", "no")])
    lines = {"max_ngram_coverage": None, "final_punctuation": True, "min_line_words": 3, "exempt_sources": ["code"]}
    bounds = {f: None for f in type(SelectConfig().gopher_quality).model_fields if f[:3] in ("min", "max")} | {"min_words": 1}
    measured = execute(heuristics.heuristics, heuristics.HeuristicsConfig(min_language_words=1, c4_lines=True), {"documents": docs}, store)
    found = store.import_table("signals", pa.table({"id": list("abcde"), "words": [9, 9, 9, 9, 0]}), c4_lines=measured.read("c4_lines"))
    with pytest.raises(PunaError, match="'c4_lines', which 0 inputs contain; give the signals of one heuristics stage with c4_lines=true"):
        execute(select, config(lines=lines), {"documents": docs, "signals": [signals(store, id=list("abcde"), words=[9] * 5)]}, store)
    made = execute(select, config(lines=lines, gopher_quality=bounds), {"documents": docs, "signals": [found]}, store)
    kept = [line for line in text.split("\n") if line.strip()[-1:] in {".", "?", "!", '"'} and line.strip()[-3:] != "..." and len(line.split()) > 2]
    assert made.read()["text"].to_pylist() == ["\n".join(kept), "x = 1", ""]
    assert len(kept) == 4
    removed = made.read("removed_lines").to_pylist()
    assert [(row["line"], row["rule"], row["value"]) for row in removed if row["id"] == "a"] == [
        (0, "lines.final_punctuation", 0.0), (2, "lines.final_punctuation", 0.0), (4, "lines.min_line_words", 2.0),
        (5, "lines.final_punctuation", 0.0),
    ]  # fmt: skip
    assert [(row["id"], row["rule"], row["detail"]) for row in made.read("dropped").to_pylist()] == [
        ("c", "lines", "no line was left"), ("e", "gopher_quality.min_words", None),
    ]  # fmt: skip


def test_blank_lines_do_not_pile_up_where_lines_go():
    text = "log\n\none\n\nlog\n\n\nlog\n\ntwo\nlog\n\nthree"
    kept, removed = without_lines(text, {0, 4, 7, 10})
    assert kept == "one\n\ntwo\n\nthree"
    assert removed == {0: "log\n", 4: "log\n\n", 7: "log\n", 10: "log"}


def test_a_rule_may_be_a_condition_over_signals(tmp_path, make_documents):
    store = Store.open(tmp_path)
    given_ = {
        "documents": make_documents(store, [(i, "news" if i == "d" else "web", i) for i in "abcde"]),
        "signals": [signals(store, id=list("abcde"), words=[10, 10, 300, 10, None], hash_ratio=[0.6, 0.4, 0.6, 0.6, 0.6])],
    }
    chosen = config(sql={"many_signs": "hash_ratio > 0.5 and words < 200 and source <> 'news'", "few": "words = 10 and hash_ratio < .5"})
    made = execute(select, chosen, given_, store)
    # A document without words is not measured: the condition is null, which is not true.
    assert made.read()["id"].to_pylist() == ["c", "d", "e"]
    said = "hash_ratio > 0.5 and words < 200 and source <> 'news': hash_ratio = 0.6, words = 10, source = web"
    assert [(row["id"], row["rule"], row["detail"]) for row in made.read("dropped").to_pylist()] == [
        ("a", "sql.many_signs", said), ("b", "sql.few", "words = 10 and hash_ratio < .5: words = 10, hash_ratio = 0.4"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("words <", "is not a valid SQL expression"),
        ("words > (select 1)", "has a subquery"),
        ("avg(words) > 3", "avg is a function over many rows"),
        ("random() > words", "random is not deterministic"),
        ("row_number() over () > words", "has a window function"),
        ("nosuch(words)", "there is no function nosuch"),
        ("1 = 1", "reads no signal"),
        ("words > 1) from read_csv('x'", "is more than one expression"),
        ("words > 1, 2", "a rule is true or false"),
    ],
)
def test_a_condition_that_is_none_is_refused(tmp_path, make_documents, expression, said):
    store = Store.open(tmp_path)
    given_ = {"documents": make_documents(store, [("a", "web", "x")]), "signals": [signals(store, id=["a"], words=[1])]}
    with pytest.raises(PunaError, match=said):
        execute(select, config(sql={"wrong": expression}), given_, store)


def test_a_condition_is_checked_against_the_signals_before_anything_runs(tmp_path, make_documents):
    store = Store.open(tmp_path)
    given_ = {"documents": make_documents(store, [("a", "web", "x")]), "signals": [signals(store, id=["a"], words=[1])]}
    for expression, said in (("wrods > 3", "select.sql.r reads 'wrods', which no input contains; did you mean words"),
                             ("words + 1", "gives int64; a rule is true or false"), ("lower(words) < 3", "select.sql.r")):  # fmt: skip
        with pytest.raises(PunaError, match=said):
            execute(select, config(sql={"r": expression}), given_, store)
    facts = Facts({"signals": (InputFacts("signals", {"signals": ("id", "words")}),)}, 1)
    assert select.unmet(config(sql={"r": "wrods > 3"}), facts)[0].startswith("select: select.sql.r reads 'wrods'")
    assert select.unmet(config(sql={"r": "words > 3"}), facts) == []


@rule_group("signs_of_tests")
class SignRules(WebRules):
    """Rules of another package."""

    max_signs: Annotated[float | None, Drop("hash_ratio", ">")] = Field(0.5, ge=0, description="Maximum number of signs per word")


def test_rules_of_other_packages_are_groups_like_all_others(tmp_path, make_documents):
    store = Store.open(tmp_path)
    given_ = {
        "documents": make_documents(store, [("a", "web", "x"), ("b", "web", "y")]),
        "signals": [signals(store, id=["a", "b"], hash_ratio=[0.4, 0.6])],
    }
    made = execute(select, config(groups={"signs_of_tests": {}}), given_, store)
    assert [(r["id"], r["rule"], r["value"], r["threshold"]) for r in made.read("dropped").to_pylist()] == [
        ("b", "signs_of_tests.max_signs", 0.6, 0.5)
    ]
    stricter = execute(select, config(groups={"signs_of_tests": {"max_signs": 0.3}}), given_, store)
    assert stricter.rows("dropped") == 2 and stricter.key != made.key
    assert execute(select, config(groups={"signs_of_tests": {"max_signs": None}}), given_, store).rows("dropped") == 0
    for field, given in (("groups", ["calm"]), ("sql", ["words < 50"])):
        with pytest.raises(PunaError, match=rf"select.{field}: .*give (groups|rules) by name with their"):
            parse(SelectConfig, {field: given}, "select")
    with pytest.raises(PunaError, match=r"'signs_of_test' is not a rule group .*; did you mean signs_of_tests\?"):
        config(groups={"signs_of_test": {}})

