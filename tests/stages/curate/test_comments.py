"""Readers' comments below an article are removed; forums, short posts and sections about comments keep their text."""

from __future__ import annotations

import numpy as np
import pytest
from resiliparse.parse.html import HTMLTree

from puna.models.extraction.asides import without_comments
from puna.models.extraction.model import CERTAIN, PAGE_TYPES, below_the_article
from puna.models.extraction.write import text_of
from tests.stages.curate.scans import read_page

STORY = "<p>" + "the ship left the harbour at noon " * 15 + "</p>"  # 105 words
SAID = "<p>I was there and saw it leave</p>"


def left(body: str) -> str:
    """Return the text without comments of a page whose blocks are all kept."""
    page = read_page(HTMLTree.parse(f"<html><body>{body}</body></html>"))
    return text_of(page, without_comments(page, np.ones(len(page.blocks), np.bool_)))


@pytest.mark.parametrize("container", ['<div id="comments">', '<section class="post-comments">', '<ol class="commentList">', '<div id="disqus_thread">', '<div id="comment-box" class="user post box">'])
def test_comments_below_an_article_go(container):
    end = container[1:].split()[0] + ">"
    text = left(f"<article>{STORY}</article>{container}{SAID * 3}</{end}<p>The harbour is closed today</p>")
    assert "harbour" in text and "I was there" not in text
    assert "closed today" in text  # text below the comments that is not a comment


@pytest.mark.parametrize(
    "body",
    [
        f'<p>Short</p><div id="comments">{SAID}{STORY}</div>',  # the comments are the content
        f'{STORY}<div id="respond-to-review-comments">{SAID}</div>',  # a section about comments
        f'{STORY}<div class="commentary">{SAID}</div>',
        f'{STORY}<div class="comments">{SAID}</div><p>{"and so on it went " * 20}</p>',  # each entry of a list has comments
    ],
)
def test_what_is_no_comment_below_an_article_stays(body):
    assert "I was there" in left(body)


def test_only_pages_that_are_articles_beyond_doubt_lose_them():
    page = read_page(HTMLTree.parse(f'<html><body>{STORY}<div id="comments">{SAID}</div></body></html>'))
    keep = np.ones(len(page.blocks), np.bool_)
    types = np.full(len(PAGE_TYPES), -1.0, np.float32)
    for kind, certain, goes in (("article", CERTAIN + 0.01, True), ("article", CERTAIN - 0.01, False), ("forum", 9.0, False)):
        own = types.copy()
        own[PAGE_TYPES.index(kind)] = certain
        assert below_the_article(page, keep, keep.astype(np.float32), own).all() != goes
