"""Rules with datatrove's thresholds decide as datatrove's filters do, compared by running datatrove."""

from __future__ import annotations

from pydoc_data.topics import topics

from tests.benchmarks.datatrove_rules import RULES, different, dropped, dropped_by_datatrove, measured

GOOD = """The first people of that valley came with the spring, when snow had left its fields and the river was low.
They built houses out of grey stone, and nobody else has lived in them for many hundreds of years.
Sheep were kept for wool, goats for milk, while barley grew on the terraces that you can still see today.
A road over the pass was finished in 1871 by soldiers who had little to do after a short war.
Since then most young families have moved to cities on the coast, where work is easier to find.
Visitors who walk up from the station often ask why all doors are painted in the same deep blue.
An old baker will tell you that his grandfather once bought far too much paint at an auction.
Whether this story is true does not matter very much to those with an eye for a good photograph.
In winter the last bus leaves at noon, so be sure that your tea is not too hot."""
LISTED = "".join(f"• the {word} of that river\n" for word in ("mouth", "bank", "source", "bed", "water", "colour", "width", "depth", "ford", "flood"))
SAME = "The river carries water from the hills.\n"

# Group → a page far beyond each threshold: Puna's rule, datatrove's reason, the page.
PAGES = {
    "gopher_repetition": [
        ("max_duplicate_paragraphs", "dup_para_frac", f"{SAME}\n" * 30),
        ("max_duplicate_lines", "dup_line_frac", GOOD + "\n" + SAME * 30),
        ("max_top_2gram", "top_2_gram", GOOD + " every spring" * 99),
        ("max_duplicate_5grams", "duplicated_5_n_grams", GOOD.replace("\n", " ") + " and that is all there is to say of it" * 9),
    ],
    "gopher_quality": [
        ("min_words", "gopher_short_doc", SAME),
        ("max_mean_word_length", "gopher_above_avg_threshold", " ".join([GOOD, *["abcdefghijklm" * 5] * 99])),
        ("min_mean_word_length", "gopher_below_avg_threshold", " ".join([GOOD, *["a b c d e f"] * 99])),
        ("max_hash_ratio", "gopher_too_many_hashes", GOOD.replace(" ", " # ")),
        ("max_ellipsis_ratio", "gopher_too_many_ellipsis", GOOD.replace(" ", " … ")),
        ("max_bullet_lines", "gopher_too_many_bullets", LISTED),
        ("max_ellipsis_lines", "gopher_too_many_end_ellipsis", GOOD.replace(".", "...")),
        ("min_english_stop_words", "gopher_enough_stop_words", "Der Fluss trägt Wasser aus den Bergen in ein weites Tal hinein. " * 9),
    ],
    "c4": [
        ("max_terminated_lorem_ipsum_lines", "lorem_ipsum", f"{GOOD}\nHere is a lorem ipsum line."),
        ("max_terminated_curly_bracket_lines", "curly_bracket", f"{GOOD}\nHere is a {{ and more of it."),
        ("min_terminated_sentences", "too_few_sentences", SAME * 4),
    ],
    "fineweb": [
        ("min_terminated_lines", "line_punct_ratio", GOOD.replace(".", "")),
        ("max_short_lines", "short_line_ratio", "A short line of it ends so.\n" + "".join(f"Line {n}.\n" for n in range(9))),
        ("max_repeated_line_characters", "char_dup_ratio", f"{GOOD}\n{GOOD}"),
        ("max_newline_ratio", "list_ratio", GOOD.replace("\n", "\n" * 9)),
    ],
}  # fmt: skip


def test_each_rule_has_its_reason():
    """A good page passes all groups."""
    texts = [page for pages in PAGES.values() for *_, page in pages] + [GOOD]
    signals, theirs, start = measured(texts), dropped_by_datatrove(texts), 0
    for group, pages in PAGES.items():
        ours = dropped(signals, group)
        for number, (rule, reason, _) in enumerate(pages, start):
            assert (ours.get(number), theirs[group].get(number)) == (f"{group}.{rule}", reason)
        assert len(texts) - 1 not in ours.keys() | theirs[group].keys()
        start += len(pages)
    assert PAGES.keys() == RULES.keys() == theirs.keys()


def test_pages_of_the_python_manual_meet_the_same_end():
    """The decisions agree although datatrove splits words as spaCy does."""
    texts = [topics[name] for name in sorted(topics)[::2]]
    assert different(texts) == {}
    assert all(len(dropped(measured(texts), group)) > 5 for group in ("gopher_repetition", "c4", "fineweb"))
