"""Uncertain blocks below an article's body are removed; leads above it, certain blocks, short pages and other types of page stay
complete."""

from __future__ import annotations

import numpy as np
import pytest
from resiliparse.parse.html import HTMLTree

from puna.models.extraction.asides import SURE, without_teasers
from puna.models.extraction.model import PAGE_TYPES, below_the_article
from puna.models.extraction.write import text_of
from tests.stages.curate.scans import read_page

STORY = "<p>" + "the ship left the harbour at noon " * 8 + "and that was it.</p>"  # 60 words
BODY = f"<div><article>{STORY}<p>{STORY}</article></div>"
OTHERS = "<ul><li><h3>Mayor resigns</h3><p>The mayor of the town has resigned.</p></ul>"


def left(body: str, below: float) -> str:
    """Return the text of a page whose blocks were all kept; each block has the probability `below`, except 1 in the article."""
    page = read_page(HTMLTree.parse(f"<html><body>{body}</body></html>"))
    texts = [page.text[b[1] : b[2]].tobytes().decode() for b in page.blocks]
    p = np.array([1.0 if "ship" in text else below for text in texts], np.float32)
    return text_of(page, without_teasers(page, np.ones(len(p), np.bool_), p))


def test_doubtful_blocks_below_the_body_go_and_leads_above_it_stay():
    text = left(f"<p>A lead about a vessel.</p>{BODY}{OTHERS}", below=SURE - 0.01)
    assert text.startswith("A lead") and text.count("harbour") == 16 and "ayor" not in text


@pytest.mark.parametrize(
    ("body", "below"),
    [
        (BODY + OTHERS, SURE),  # the trees are certain of it
        (f"<article>{STORY}</article>{OTHERS}", 0.1),  # the body is too short to identify the content
        (f"<article>{STORY}{STORY}{OTHERS}</article>", 0.1),  # inside the body
        (
            f"<article>{STORY}{STORY}</article><div>{OTHERS.replace('town', 'town by the sea ' * 25)}</div>",
            0.1,
        ),  # as much prose as in the body
    ],
)
def test_what_is_no_teaser_below_an_article_stays(body, below):
    assert "ayor resigns" in left(body, below)


def test_a_second_section_of_the_article_is_no_teaser():
    section = f"<section>{STORY}</section>"
    text = left(f"<main><section>{STORY * 3}</section>{section.replace('ship', 'boat')}<aside>{OTHERS}</aside></main>", below=0.1)
    assert text.count("boat") == 8 and "ayor" not in text


def test_only_articles_lose_what_stands_below():
    page = read_page(HTMLTree.parse(f"<html><body>{BODY}{OTHERS}</body></html>"))
    keep, p = np.ones(len(page.blocks), np.bool_), np.full(len(page.blocks), 0.5, np.float32)
    for kind in PAGE_TYPES:
        types = np.full(len(PAGE_TYPES), -1.0, np.float32)
        types[PAGE_TYPES.index(kind)] = 0.1
        assert below_the_article(page, keep, p, types).all() == (kind != "article")
