"""The features of a block that only the network gets: compared with values found by walking the page, and by hand on a small page."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from resiliparse.parse.html import HTMLTree

from puna.models.extraction import layout as L
from puna.models.extraction.article import ABOVE, LONG, article_features, names
from puna.models.extraction.layout import PROBES, groups
from tests.stages.curate.scans import read_page

TEXT = "a harbour was seen by the old mayor of this town and its ships left at noon for another island far away"
WORDS = TEXT.split()


def random_page(seed: int):
    """Return a page of nested containers with paragraphs, links, pictures and captions."""
    generator = np.random.default_rng(seed)

    def text():
        return " ".join(generator.choice(WORDS, int(generator.integers(1, 40)))) + str(generator.choice([".", "", "!"]))

    def grown(depth):
        kind = generator.integers(0, 8)
        if depth == 0 or kind < 3:
            return f"<p>{text()}</p>"
        if kind == 3:
            return f"<h3><a href=/x>{text()}</a></h3>"
        if kind == 4:
            return f"<figure><img src=x><figcaption>{text()}</figcaption></figure>"
        name, style = generator.choice(["div", "section", "li"]), generator.choice(["red", "blue"])
        return f"<{name} class={style}>{''.join(grown(depth - 1) for _ in range(int(generator.integers(1, 6))))}</{name}>"

    return read_page(HTMLTree.parse(f"<body>{''.join(grown(4) for _ in range(6))}</body>"))


@pytest.mark.parametrize("seed", range(6))
def test_features_are_what_a_walk_over_the_page_finds(seed):
    page = random_page(seed)
    found = dict(zip(names(), article_features(page).T, strict=True))
    blocks, elements = page.blocks, page.elements
    words, linked, stops = (blocks[:, column] for column in (L.WORDS, L.LINKED_WORDS, L.STOPS))
    prose = (words - linked) * ((stops > 0) & (words > 8))
    paragraph = (words - linked >= LONG) & (stops > 0) & (linked <= 0.3 * words)
    alike = Counter((int(e[L.PARENT]), int(sign)) for e, sign in zip(elements, page.signs[:, 0], strict=True))

    def held(share):
        first, end = elements[:, L.FIRST], elements[:, L.END]
        holding = [e for e in range(1, len(elements)) if prose[first[e] : end[e]].sum() > share * prose.sum()]
        return max(holding, default=0)

    def around(element):
        while element >= 0:
            yield element
            element = int(elements[element, L.PARENT])

    focus = held(0.5)
    inside = set(around(focus))
    said = [set(page.hashes[(blocks[b - 1, L.HASHES] if b else 0) : blocks[b, L.HASHES]].tolist()) for b in range(len(blocks))]
    for b in range(len(blocks)):
        up = list(around(int(blocks[b, L.ELEMENT])))
        assert found["caption"][b] == bool(elements[up[0], L.FLAGS] & L.BIT["figcaption"])
        branch = [e for e in up if e not in inside]
        assert found["branch_blocks"][b] == (elements[branch[-1], L.END] - elements[branch[-1], L.FIRST] if branch else -1)
        assert found["branch_words"][b] == (words[elements[branch[-1], L.FIRST] : elements[branch[-1], L.END]].sum() if branch else 0)
        for level in range(ABOVE):
            e = up[level] if level < len(up) else 0
            assert found[f"alike^{level}"][b] == (alike[int(elements[e, L.PARENT]), int(page.signs[e, 0])] if e > 0 else 0)
        for name, share in (("from_focus", 0.5), ("from_most_prose", 0.75)):
            first, end = elements[held(share), L.FIRST], elements[held(share), L.END]
            distance = -words[b + 1 : first].sum() - 1 if b < first else words[end:b].sum() + 1 if b >= end else 0
            assert found[name][b] == distance
        before = [o for o in range(b) if paragraph[o]]
        after = [o for o in range(b + 1, len(blocks)) if paragraph[o]]
        assert found["paragraph-"][b] == (b - before[-1] if before else -1)
        assert found["paragraph+"][b] == (after[0] - b if after else -1)
        assert found["words_to_paragraph"][b] == (words[b + 1 : after[0]].sum() if after else -1)
        others = set().union(*(said[o] for o in range(len(blocks)) if paragraph[o] and o != b))
        hashes = page.hashes[(blocks[b - 1, L.HASHES] if b else 0) : blocks[b, L.HASHES]].tolist()
        assert found["words_said"][b] == pytest.approx(sum(h in others for h in hashes) / len(hashes))


@pytest.mark.parametrize("step", [1, 7, 1 << 20, 1 << 40])  # the last two: more colliding keys than slots that are tried
def test_keys_are_counted_however_they_fall(step):
    keys = np.random.default_rng(step).integers(0, 3 * PROBES, 400).astype(np.uint64) * np.uint64(step)
    assert groups(keys)[0].tolist() == [Counter(keys.tolist())[key] for key in keys.tolist()]
    assert groups(keys[:0])[0].tolist() == []


def test_a_word_of_another_article_is_not_said():
    body = "".join(f"<p>{' '.join(WORDS)} again and again.</p>" for _ in range(3))
    page = read_page(HTMLTree.parse(f"<body><div>{body}</div><p>the mayor of this town</p><p>recipe beans onion oven</p></body>"))
    said = article_features(page)[:, names().index("words_said")]
    assert said.tolist() == [1, 1, 1, 1, 0]
