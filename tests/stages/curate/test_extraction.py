"""The parts of extraction: reading pages into blocks, bounds, trees, the cut, writing, labels."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resiliparse.parse.html import HTMLTree

from puna.kernels.text.search import Words
from puna.models.extraction import attributes
from puna.models.extraction import layout as L
from puna.models.extraction import write as written
from puna.models.extraction.layout import alone, group_sums, groups
from puna.models.extraction.model import LEVELS, TOGETHER, agree, best_cut, content, judge, load, made_whole, once, with_headline
from puna.models.extraction.parse import MAX_ATTRIBUTES, MAX_TAGS, counts
from puna.models.extraction.scan import scan
from puna.models.extraction.tags import NUMBER, find
from puna.models.extraction.trees import LANES, logits, splits
from puna.models.extraction.write import text_of
from tests.benchmarks.extraction_labels import label
from tests.benchmarks.train_extraction import Page, as_arrays, corpus, snippet_labels
from tests.linear import stopped_if_quadratic
from tests.stages.curate.scans import read_page


def texts(html: str) -> list[str]:
    """Return the blocks' texts."""
    page = read_page(HTMLTree.parse(html))
    return [page.text.tobytes()[b[L.START] : b[L.STOP]].decode() for b in page.blocks]


def whole(html: str) -> str:
    """Return all blocks as text."""
    page = read_page(HTMLTree.parse(html))
    return text_of(page, np.ones(len(page.blocks), np.bool_))


# --- reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<p>one<p>two", "one\n\ntwo"),
        ("<div>one</div><div>two</div>", "one\ntwo"),
        ("a<br>b<br><br>c", "a\nb\n\nc"),
        ("<p>some <b>bo</b>ld &amp; &lt;i&gt; &copy; x&nbsp;y", "some bold & <i> © x y"),
        ("<ul><li>x<li>y</ul><ol><li>p<li>q</ol>", "• x\n• y\n\n1. p\n2. q"),
        ("<ul><li></ul><p>z", "z"),
        ("<p =a =>x</p><q\x13=y><p\x01>z</p>", "x\n\nz"),
        ("<table><tr><th>a<th>b<tr><td>1<td>2</table>", "a\tb\n1\t2"),
        ("<a href=x>One</a><a href=y>Two</a>", "One Two"),
        ("<pre>\nfor x:\n    y  z\n\n    w</pre>", "for x:\n    y  z\n\n    w"),
        ("<pre><span>  a</span>\n  b</pre>", "  a\n  b"),
        ("t<script>'<p>no'</script><style>p{}</style><svg><text>no</text></svg><!-- no --> u", "t u"),
        ('<p>is <math alttext="x^2"><mi>x</mi></math>!', "is x^2 !"),
        (
            "<p><math><semantics><mi>x</mi><annotation encoding='application/x-tex'>\\beta</annotation></semantics></math>",
            "\\beta",
        ),
        ("<p><math><mi>x</mi><mo>=</mo><mn>1</mn></math>", "x=1"),
        ('<p>so <span><math alttext="a"><mi>a</mi></math></span><img class="mwe-math" alt="a">.', "so a ."),
        ('<p>k <span class="katex"><span class="katex-html">drawn</span></span>', "k"),
        ('<h2>Part<a class="headerlink" href="#p">¶</a></h2>', "Part"),
        ("<noscript>shown</noscript><template>too</template>", "shown\ntoo"),
        # Escaped markup, as in pages saved by a browser, or in a field to copy from.
        ("<div></div><noscript> &lt;img src='x'&gt; no</noscript><textarea>&lt;a href='x'&gt;no&lt;/a&gt;</textarea><p>&lt;b&gt;", "<b>"),
        ("<div></div><noscript>&lt; 3 is shown</noscript><textarea>a &lt;b&gt;</textarea>", "< 3 is shown\na <b>"),
        ("<title>T</title>", ""),
        ("", ""),
    ],
)
def test_pages_are_read_as_they_are_seen(html, expected):
    assert whole(html) == expected


TABLES = {
    "a head over two columns, and cells over two rows": (
        "<tr><th rowspan=2>Region<th colspan=2>Sales<th rowspan=2>Share<tr><th>2020<th>2021<tr><td>North<td>10<td>12<td>55 %"
        "<tr><td>South<td colspan=2>none<td>45 %",
        "Region\tSales\t\tShare\n\t2020\t2021\nNorth\t10\t12\t55 %\nSouth\tnone\t\t45 %",
    ),
    "empty cells": ("<tr><td><th>A<th>B<tr><td>x<td><td>2<tr><td>y<td>3<td>", "\tA\tB\nx\t\t2\ny\t3"),
    "a column that is empty in all rows": ("<tr><td>1.<td><td>One<tr><td>2.<td><td>Two", "1.\tOne\n2.\tTwo"),
    "lines and paragraphs in a cell": ("<tr><td>a<br>b<td><p>c</p><p>d</p><tr><td><p>e</p><td>f", "a b\tc d\ne\tf"),
    "a line of its own, its lines apart": ("<tr><td>a<td>b<tr><td colspan=2>c<br>d<tr><td><td>e", "a\tb\nc\nd\n\te"),
    "a span ends with its group of rows": ("<tbody><tr><td rowspan=0>a<td>b<tr><td>c</tbody><tbody><tr><td>d<td>e</tbody>", "a\tb\n\tc\nd\te"),
    "spans that are no numbers, or too large": ("<tr><td colspan=x rowspan=-1>a<td colspan=99999>b<td>c<tr><td>d<td>e", "a\tb\tc\nd\te"),
    "a table in a cell": ("<tr><td>a<td><table><tr><td>i<td>j<tr><td><td>k</table><td>z", "a\ni\tj\n\tk\nz"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_cells_stand_in_their_columns(name):
    rows, expected = TABLES[name]
    assert whole(f"<table>{rows}</table>") == expected


def test_cells_that_are_left_out_leave_their_columns():
    page = read_page(HTMLTree.parse("<table><caption>Sales<tr><th>a<th>b<th>c<tr><td>1<td>2<td>3<tr><td>4<td>5<td>6</table>"))
    keep = np.ones(len(page.blocks), np.bool_)
    assert text_of(page, keep) == "Sales\na\tb\tc\n1\t2\t3\n4\t5\t6"
    keep[[4, 8]] = False  # 1 and 5
    assert text_of(page, keep) == "Sales\na\tb\tc\n\t2\t3\n4\t\t6"


def test_blank_lines_stand_around_a_table_whose_first_or_last_cell_is_empty():
    assert whole("<p>x<table><tr><td><th>A<th>B<tr><td>c<td>1<td></table><p>y") == "x\n\n\tA\tB\nc\t1\n\ny"


def test_equal_cells_of_a_data_table_are_no_copies():
    table = "<table><tr class=odd><td>one two three four five<td>1<tr class=even><td>one two three four five<td>2</table>"
    page = read_page(HTMLTree.parse(f"{table}<div>one two three four five</div>"))
    assert once(page, np.ones(len(page.blocks), np.bool_)).tolist() == [True, True, True, True, False]


def test_long_cells_are_layout_and_stand_on_lines_of_their_own():
    long = "word " * 60
    assert whole(f"<table><tr><td>{long}<td>{long}</table>") == f"{long.strip()}\n{long.strip()}"


def test_elements_know_their_parents_blocks_and_flags():
    page = read_page(HTMLTree.parse("<nav><a href=/>home</a></nav><main class='fooBar-baz'><p>a<p hidden>b</main>"))
    kinds = page.elements[:, L.TAG].tolist()
    nav, main = kinds.index(NUMBER["nav"]), kinds.index(NUMBER["main"])
    assert page.elements[nav, [L.FIRST, L.END]].tolist() == [0, 1]
    assert page.elements[main, [L.FIRST, L.END]].tolist() == [1, 3]
    flags = page.elements[page.blocks[:, L.ELEMENT], L.FLAGS]
    assert [bool(f & L.BIT["nav"]) for f in flags] == [True, False, False]
    assert [bool(f & L.HIDDEN) for f in flags] == [False, False, True]
    assert page.elements[main + 1, L.TOKENS] - page.elements[main, L.TOKENS] == 3  # foo, bar, baz
    assert page.blocks[:, L.LINKED_WORDS].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("style", "hides"), [("display:none", True), ("color:red;Visibility: hidden", True), ("visibility:visible", False), ("display:block", False)]
)
def test_styles_that_hide_are_known(style, hides):
    page = read_page(HTMLTree.parse(f"<p style='{style}'>a"))
    assert bool(page.elements[page.blocks[0, L.ELEMENT], L.FLAGS] & L.HIDDEN) == hides


def _reference(html: str) -> str:
    """Return the words of the text nodes of Resiliparse's tree, by walking it."""
    found: list[str] = []

    def walk(node, hidden):
        if node.tag == "#text":
            found.append("" if hidden else node.value or "")
        if node.tag in BLOCKS:
            found.append(" ")
        child = node.first_child
        while child is not None:
            walk(child, hidden or node.tag in ("script", "style", "head"))
            child = child.next
        if node.tag in BLOCKS:
            found.append(" ")

    tree = HTMLTree.parse(html)
    walk(tree.body, False)
    return " ".join("".join(found).split())


BLOCKS = ("p", "div", "li", "ul", "td", "tr", "table", "tbody", "h1", "br", "body", "section")
TAGS = ("p", "div", "b", "span", "li", "ul", "table", "tr", "td", "h1", "br", "i", "section")
WORDS = ("word", "two words", " ", "&amp;", "&lt;p&gt;", "é", "<!-- c -->", "<script>x<p></script>", "<style>y</style>", "<em class='a b'>")
PIECES = st.sampled_from((*(f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")), *WORDS))


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=40))
def test_no_text_of_the_tree_is_lost_or_made_up(pieces):
    html = "<body>" + "".join(pieces)
    assert " ".join(" ".join(texts(html)).split()) == _reference(html)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=300)
    | st.lists(st.sampled_from([b"<", b">", b"</", b"<p", b"<!--", b"-->", b'="', b"&", b"&amp", b"<script", b"<math>", b"x"])).map(
        b"".join
    )
)
def test_any_bytes_are_read(data):
    page = scan(data)  # not even a parser wrote this
    keep = content(alone(page), load())
    assert len(text_of(page, keep)) <= 4 * len(data) + 64
    starts, stops = page.blocks[:, L.START], page.blocks[:, L.STOP]
    assert (starts <= stops).all() and (stops[:-1] <= starts[1:]).all()
    assert (page.elements[1:, L.PARENT] < np.arange(1, len(page.elements))).all()
    assert (page.elements[:, L.FIRST] <= page.elements[:, L.END]).all()


@pytest.mark.parametrize("language", ["ไทย", "ລາວ", "ខ្មែរ", "မြန်မာ"])
def test_four_letters_of_a_script_without_spaces_are_about_a_word(language):
    text = "".join(chr(ord(language[0]) + n % 20) for n in range(400))
    page = read_page(HTMLTree.parse(f"<p>{text}"))
    assert abs(int(page.blocks[0, L.WORDS]) - 100) <= 1  # one more word may be counted at the end of the run, as after any letters


@pytest.mark.parametrize(
    ("text", "stops", "commas", "last"),
    [
        ("船は正午に港を出た。静かだった！", 2, 0, "!"),
        ("船在中午离开了，港口？很安静．", 2, 1, "."),
        ("海、山、川", 0, 2, ""),
        ("जहाज चला गया। फिर लौटा॥", 2, 0, "."),
        ("غادرت السفينة، فهل عادت؟", 1, 1, "?"),
        ("جہاز چلا گیا۔", 1, 0, "."),
        ("（注）と「話」", 0, 0, ""),
        ("A ship, and gone.", 1, 1, "."),
    ],
)
def test_marks_of_other_scripts_end_sentences_and_clauses(text, stops, commas, last):
    block = read_page(HTMLTree.parse(f"<p>{text}")).blocks[0]
    assert (block[L.STOPS], block[L.COMMAS]) == (stops, commas)
    assert chr(block[L.LAST]) == last if last else block[L.LAST] >= 128


@pytest.mark.parametrize("text", ["長い見出しが続く", "ข่าวอื่นที่น่าสนใจ", "a plain title"])
def test_all_words_of_a_link_are_linked_in_any_script(text):
    block = read_page(HTMLTree.parse(f"<p><a href=x>{text}</a></p>")).blocks[0]
    assert block[L.LINKED_WORDS] == block[L.WORDS] > 0


def searched(monkeypatch, module):
    """Return a list of how far each search of `module` went."""
    steps = []

    def counted(html, at, byte, stop=-1):
        found = find(html, at, byte, stop)
        steps.append(found - at)
        return found

    monkeypatch.setattr(module, "find", counted)
    return steps


@pytest.mark.parametrize(
    ("read", "tag"), [(attributes.types, b'<script type="ld+json">{"type": 1}'), (attributes._address, b"<link href=/a/page/here>")]
)
def test_what_a_page_says_of_itself_is_looked_for_in_its_own_tag(monkeypatch, read, tag):
    steps = searched(monkeypatch, attributes)
    page = scan(tag * 50)
    for start in range(0, 50 * len(tag), len(tag)):
        read.py_func(page, start, start + len(tag))
    assert 0 < sum(steps) <= 2 * 50 * len(tag)


def test_formulas_in_formulas_are_looked_through_once(monkeypatch):
    steps = searched(monkeypatch, written)
    tag = b"<math>"
    page = scan(tag * 50)
    page.state[L.PLAIN_STOP] = 0
    for at in range(len(tag), 50 * len(tag), len(tag)):
        written.annotation.py_func(page, 1, at)
    assert 0 < sum(steps) <= 50 * len(tag)


# --- bounds ----------------------------------------------------------------------------------------------

PIECES = [
    "<p", "<td", "<svg>", "</svg>", "<math", "<title>", "</title>", "<script>", "</script>", "<style>", "<select>", "</select>", "<option", "<template>",
    "<table>", "</p>", "</br>", "<!--", "-->", "<![CDATA[", "]]>", "<body", "<html", "<textarea>", "<x/>", "<", ">", "/", " ", "=", '"', "'", "\x01", "a", "b ",
    "c=1", 'd="<q e f>"',
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=60))
def test_a_parser_makes_at_most_the_elements_and_attributes_that_are_counted(pieces):
    """The parser adds by itself `html`, `head` and `body`, and up to three elements around a row or a cell of a table."""
    html = "".join(pieces).encode()
    bound, elements, attributes = counts(html), 0, 0
    nodes = [HTMLTree.parse_from_bytes(html, "utf-8").document]
    while nodes:
        node = nodes.pop()
        if node.type == 1:
            elements += 1
            attributes += len(node.attrs)
        nodes += node.child_nodes
    assert elements <= 4 * bound.tags + 3 and attributes <= bound.attributes


def test_tags_within_attributes_of_tags_are_counted_in_linear_time():
    with stopped_if_quadratic():  # searching each attribute's end separately would take hours
        assert counts(b"<b x=\"<b x='" * 500_000).attributes > MAX_ATTRIBUTES


@pytest.mark.parametrize("html", ["<p>" * MAX_TAGS + "<p>", " ".join(["<p", *map("a{}".format, range(MAX_ATTRIBUTES + 1))]) + ">",
                                  "<b a='%s'>" % ("x" * 200_000) + "<p>" * 6000, "<u>" * 4000], ids=["tags", "attributes", "bytes", "formats"])  # fmt: skip
def test_a_page_without_a_small_bound_is_not_cheap(html):
    assert not counts(html.encode()).is_cheap() and counts(html[: len(html) // 4].encode()).is_cheap()


# --- the model's parts -----------------------------------------------------------------------------------


def test_the_cut_keeps_what_gives_the_highest_expected_f1():
    generator = np.random.default_rng(0)

    def f1(kept, content):
        return 2 * sum(kept & content) / (sum(kept) + sum(content)) if (kept | content).any() else 0.0

    for _ in range(50):
        p = generator.integers(0, LEVELS, 8).astype(np.float32) / LEVELS
        words = generator.integers(1, 50, 8)
        owner = np.repeat(np.arange(8), words)  # word by word

        def expected(kept, p=p, owner=owner):
            together = np.mean([f1(kept[owner], (p >= level / LEVELS)[owner]) for level in range(LEVELS)])
            alone = 2 * p[owner][kept[owner]].sum() / (kept[owner].sum() + p[owner].sum())
            return TOGETHER * together + (1 - TOGETHER) * alone

        cut, found = best_cut(p, words.astype(np.float64))
        assert expected(p >= cut) == pytest.approx(found, rel=1e-6)
        assert max(expected(p >= level) for level in set(p.tolist())) == pytest.approx(found, rel=1e-6)


def test_a_page_that_is_content_whole_or_not_at_all_is_left_to_its_likelier_state():
    # A short text that is surely content, and long cards that are content on three of ten such pages: treated as independent, all blocks
    # would be kept (F1 .54 against .43), yet that is wrong on seven of ten pages.
    p = np.array([0.9, *[0.3] * 10], np.float32)
    words = np.array([40, *[30] * 10], np.float64)
    assert best_cut(p, words)[0] > 0.3


def test_blocks_of_one_path_are_judged_together_and_one_text_is_taken_once():
    long = "words that are many enough to be a text of their own"
    page = read_page(HTMLTree.parse(f"<ul><li>a<li>b c d e<li>{long}</ul><p>{long}</p><p>{long}</p><p>a</p><pre>{long}</pre>"))
    sizes = np.sqrt(page.blocks[:, L.WORDS])
    z = np.array([1, -2, 3, 4, 5, 6, 7], np.float32)
    expected = z.copy()
    for same in ([0, 1, 2], [3, 4, 5], [6]):
        expected[same] += 0.35 * (np.average(z[same], weights=sizes[same]) - z[same])
    np.testing.assert_allclose(agree(page, z), expected, rtol=0.02, atol=0.02)
    every = np.ones(7, np.bool_)
    assert once(page, every).tolist() == [True, True, True, False, False, True, True]  # short texts and code may repeat
    without_first = every.copy()
    without_first[2] = False
    assert once(page, without_first).tolist() == without_first.tolist()  # adjacent paragraphs are not copies


def test_sums_over_equal_keys():
    generator = np.random.default_rng(1)
    keys = generator.integers(0, 7, 60).astype(np.uint64)
    values = generator.random((60, 3)).astype(np.float32)
    size, before = groups(keys)
    sums = group_sums(keys, values)
    for k in range(60):
        assert (size[k], before[k]) == ((keys == keys[k]).sum(), (keys[:k] == keys[k]).sum())
        np.testing.assert_allclose(sums[k], values[keys == keys[k]].sum(0), rtol=1e-5)


def test_trees_give_the_sum_of_their_leaves():
    def leaf(value):
        return {"leaf_value": value}

    def split(feature, threshold, left, right):
        return {"split_feature": feature, "threshold": threshold, "left_child": left, "right_child": right}

    trees = splits(as_arrays([split(0, 1.5, leaf(1.0), split(1, 0.0, leaf(2.0), leaf(4.0))), leaf(8.0)]))
    rows = np.array([[1.5, 9], [2, 0], [2, 0.5]], np.float32)
    assert logits(trees, rows).tolist() == [9.0, 10.0, 12.0]
    many = np.random.default_rng(0).integers(0, 3, LANES + 3)  # more rows than are processed together
    assert logits(trees, rows[many]).tolist() == np.array([9.0, 10.0, 12.0])[many].tolist()


def test_trees_send_rows_where_their_nodes_say():
    generator = np.random.default_rng(3)

    def grown(depth):
        if depth == 0 or generator.random() < 0.15:
            return {"leaf_value": float(generator.normal())}
        split = {"split_feature": int(generator.integers(0, 5)), "threshold": float(generator.integers(0, 4))}
        return split | {"left_child": grown(depth - 1), "right_child": grown(depth - 1)}

    def leaf_of(node, row):
        while "leaf_value" not in node:
            node = node["left_child" if row[node["split_feature"]] <= node["threshold"] else "right_child"]
        return np.float32(node["leaf_value"])

    structures = [grown(5) for _ in range(20)]
    rows = generator.integers(-1, 5, (LANES + 11, 5)).astype(np.float32)
    wanted = np.zeros(len(rows), np.float32)
    for structure in structures:
        wanted += [leaf_of(structure, row) for row in rows]
    assert logits(splits(as_arrays(structures)), rows).tolist() == wanted.tolist()
    with pytest.raises(ValueError, match="more than 32 leaves"):
        chain = {"leaf_value": 0.0}
        for _ in range(32):
            chain = {"split_feature": 0, "threshold": 0.0, "left_child": {"leaf_value": 0.0}, "right_child": chain}
        splits(as_arrays([chain]))


def test_words_are_found_together_wherever_they_stand():
    generator = np.random.default_rng(4)
    alphabet = np.frombuffer(b"abcd", np.uint8)
    words = Words("abcda", "ddddd", "bcdabcab", "cabbage")
    found = 0
    for _ in range(800):
        text = generator.choice(alphabet, int(generator.integers(0, 120))).tobytes()
        wanted = any(word in text for word in (b"abcda", b"ddddd", b"bcdabcab", b"cabbage"))
        assert words.any_in(text) == wanted, text
        found += wanted
    assert 40 < found < 760
    assert words.any_in(b"xxcabbage") and words.any_in(b"cabbage") and not words.any_in(b"cabbag") and not words.any_in(b"")


def test_the_model_prefers_sentences_to_menus():
    menu = "".join(f"<li><a href=/{n}>Menu {n}</a></li>" for n in range(8))
    text = "<p>The llama is a domesticated animal of the Andes, kept for its wool and to carry loads over the mountains.</p>"
    page = read_page(HTMLTree.parse(f"<body><div class=menu><ul>{menu}</ul></div><div class=content><h1>Llamas</h1>{text * 4}</div>"))
    p, types = judge(alone(page), load())
    assert p[-4:].min() > p[:8].max()
    assert types.shape == (1, 7)


def test_labels_follow_the_truth_in_order_and_find_what_was_moved():
    blocks = [
        "Home",
        "A title",
        "the first of the paragraphs here",
        "share this",
        "a box that the truth has at its very end",
        "and the last one, the longest of them all by far",
        "Home",
    ]
    truth = "A title\n\nthe first of the paragraphs here\n\nand the last one, the longest of them all by far\n\na box that the truth has at its very end"
    shares, lengths = label(blocks, truth)
    assert lengths.tolist() == [len(re.findall(r"\w+", b)) for b in blocks]
    assert (shares > 0.5).tolist() == [False, True, True, False, True, True, False]


def test_snippets_label_the_blocks_that_hold_them_and_no_others():
    page = read_page(HTMLTree.parse("<p>Home<p>the story begins<p>and goes on<p>Home<p>said twice<p>said twice<p>and goes on, too</p>"))
    wanted = ["story begins", "said twice", "goes on, too", "begins and", "Home"]
    shares, known = snippet_labels(page, wanted, ["Home", "and goes on, too", "not there", " "])
    # A snippet in two blocks, across two blocks, or both wanted and unwanted: unknown. An unwanted snippet: in any block.
    assert known.tolist() == [True, True, False, True, False, False, False]
    assert shares[known].tolist() == [0, 1, 0]


def test_pages_weigh_as_they_are_told_and_only_by_known_blocks():
    html = "<p>one two three<p>four five six<p>seven"
    scan_of = read_page(HTMLTree.parse(html))
    some = np.array([False, True, False])
    whole_page = Page("a", scan_of, "four five six", 0, 0, some.astype(np.float32), np.ones(3, np.bool_), 1.0)
    weight = corpus([whole_page, whole_page._replace(truth=None, known=some, weight=0.5)]).weight
    assert weight[3] == weight[5] == 0
    assert weight[4] == pytest.approx(weight[:3].sum() / 2)
    assert weight[0] / weight[2] == pytest.approx((4 / 2) ** 0.6)


ROWS = "<table><tr><td>1<td>2<tr><td>3<td>4<tr><td>5<td>6</table>"
HEAD = ROWS.replace("<table>", "<table><caption>c</caption><thead><tr><th>h<th>i<tbody>")


@pytest.mark.parametrize(
    ("html", "kept", "whole"),
    [
        # Code inside the content stays; code next to it does not.
        ("<nav><pre>z</pre></nav><main><p>a b c<pre>d</pre><p>e f</main>", "a b c|e f", "a b c|d|e f"),
        # A tenth of the outermost list's words decides, and half of a table's.
        ("<main><p>x<dl><dt>a<dd>b c<dd><dl><dt>d<dd>e f g h i j</dl></dl></main>", "x|a", "x|a|b c|d|e f g h i j"),
        ("<main><p>x<dl><dt>a<dd>b c d e f g h i j k</dl></main>", "x|a", "x|a"),
        ("<main><p>x<table><tr><td>1<td>2<tr><td>3<td>4</table></main>", "x|1|4", "x|1|2|3|4"),
        ("<main><p>x<table><tr><td>1<td>2<tr><td>3<td>4</table></main>", "x|1", "x|1"),
        # Of a data table, 0.3 of the words suffice, if the rest has no more words than all that is kept; of other tables they do not.
        (f"<main><p>u v w{ROWS}</main>", "u v w|1|2", "u v w|1|2|3|4|5|6"),
        (f"<main><p>w{ROWS}</main>", "w|1|2", "w|1|2"),
        (f"<main><p>u v w<table><tr><td>{ROWS}</table></main>", "u v w|1|2", "u v w|1|2|3|4|5|6"),
        ("<main><p>u v w<table><tr><td>1<tr><td>2<tr><td>3</table></main>", "u v w|1", "u v w|1"),
        # The head and caption of a data table stay with any of its cells, and a caption beside it in the figure.
        (f"<main><p>w{HEAD}</main>", "w|1", "w|c|h|i|1"),
        (f"<main><p>w<figure>{HEAD}<figcaption>f</figcaption></figure><figure><figcaption>g</figure></main>", "w|1", "w|c|h|i|1|f"),
        (f"<main><p>w{HEAD}</main>", "w", "w"),
        (f"<main><p>w{HEAD.replace('<td>2', '<td>' + '2 ' * 200)}</main>", "w|1", "w|1"),
        # Headings stay with their text, but not above the first kept block.
        ("<h1>t</h1><main><p>x<h2>a</h2><h3>b</h3><p>y<h2>c</h2><p>z</main>", "x|y", "x|a|b|y"),
        # Lists are not completed, and an empty mask stays empty.
        ("<main><p>x<ul><li>a<li>b<li>c</ul></main>", "x|a|b", "x|a|b"),
        ("<main><p>x<pre>y</pre></main>", "", ""),
    ],
)
def test_code_and_tables_and_lists_of_definitions_stay_whole(html, kept, whole):
    page = read_page(HTMLTree.parse(html))
    text = page.text.tobytes()
    blocks = [text[b[L.START] : b[L.STOP]].decode() for b in page.blocks]
    keep = np.array([block in kept.split("|") for block in blocks])
    assert [block for block, stays in zip(blocks, made_whole(page, keep), strict=True) if stays] == [w for w in whole.split("|") if w]


@pytest.mark.parametrize(
    ("html", "kept", "found"),
    [("<h1>t</h1><p>x", "x", "t|x"), ("<p>x<h1>t</h1>", "x", "x"), ("<h1>t</h1><h1>u</h1><p>x", "x", "x"), ("<h1>t</h1>", "", "")],
)
def test_the_headline_is_the_only_first_heading(html, kept, found):
    page = read_page(HTMLTree.parse(html))
    blocks = [page.text.tobytes()[b[L.START] : b[L.STOP]].decode() for b in page.blocks]
    keep = with_headline(page, np.array([block in kept.split("|") for block in blocks]))
    assert "|".join(block for block, stays in zip(blocks, keep, strict=True) if stays) == found
