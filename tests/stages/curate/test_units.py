"""Cards of other articles go from an article; lists that are the content, cards among its paragraphs and cards it is sure of stay."""

from __future__ import annotations

import numpy as np
import pytest
from resiliparse.parse.html import HTMLTree

from puna.models.extraction.asides import LIKE, PARAGRAPH_WORDS, PARAGRAPHS, UNIT_WORDS, without_units
from puna.models.extraction.scan import read_page
from puna.models.extraction.write import text_of

STORY = "<p>" + "the ship left the harbour at noon " * 5 + "and was gone.</p>"  # 38 words


def card(number: int, words: int = 4, title: str = "<h3><a href=/{0}>Mayor {0} resigns today</a></h3>") -> str:
    return f"<li class=card>{title.format(number)}<p>{'town ' * words}{number} is without one.</p></li>"


def left(body: str, below: float = 0.7) -> str:
    """The text of a page of which all was kept: chances of .8 where a ship is told of, `below` elsewhere."""
    page = read_page(HTMLTree.parse(f"<html><body>{body}</body></html>"))
    texts = [page.text[b[1] : b[2]].tobytes().decode() for b in page.blocks]
    p = np.array([0.8 if "ship" in text else below for text in texts], np.float32)
    return text_of(page, without_units(page, np.ones(len(p), np.bool_), p))


def cards(count: int, **options: object) -> str:
    return f"<ul>{''.join(card(n, **options) for n in range(count))}</ul>"


@pytest.mark.parametrize("body", ["<div>{story}</div>{cards}", "{cards}<article>{story}</article>", "<section>{cards}</section><div>{story}</div>"])
def test_cards_of_other_articles_go_wherever_they_stand_outside_the_paragraphs(body):
    text = left(f"<p>A lead.</p>{body.format(story=STORY * PARAGRAPHS, cards=cards(4))}")
    assert text.startswith("A lead.") and text.count("harbour") == 5 * PARAGRAPHS
    assert "town" not in text and "Mayor" not in text


@pytest.mark.parametrize(
    ("body", "below"),
    [
        (f"<div>{STORY * (PARAGRAPHS - 1)}</div>{cards(4)}", 0.7),  # too few paragraphs: the list may be what the page is about
        (f"<div>{'<p>the ship is here, dear reader, and this is what there is to say of it.</p>' * 9}</div>{cards(4)}", 0.7),
        (f"<div>{STORY * PARAGRAPHS}</div>{cards(LIKE - 1)}", 0.7),  # too few to be a list
        (f"<div>{STORY * PARAGRAPHS}</div>{cards(4, title='<h3>Mayor {0} resigns today</h3>')}", 0.7),  # entries without a link
        (f"<div>{STORY * PARAGRAPHS}</div>{cards(4, title='<h3><a href=/{0}>Mayor {0}</a></h3>')}", 0.7),  # two words are no title
        (f"<div>{STORY * PARAGRAPHS}</div>{cards(4, words=UNIT_WORDS)}", 0.7),  # entries as long as articles
        (f"<div>{STORY * PARAGRAPHS}</div>{cards(4)}", 0.81),  # the trees believe in them more than in the paragraphs
        (f"<div>{STORY * 3}{cards(4)}{STORY * 3}</div>", 0.7),  # among the paragraphs
    ],
)
def test_what_may_be_the_content_stays(body, below):
    text = left(body, below)
    assert "town" in text and "Mayor 1" in text


def test_the_short_paragraphs_of_the_second_page_are_too_few_words():
    assert 9 * 16 < PARAGRAPH_WORDS < PARAGRAPHS * 38


def test_cards_in_cards_are_gone_through_once():
    inner = "".join(card(n) for n in range(3))
    text = left(f"<div>{STORY * PARAGRAPHS}</div>" + f"<div class=row><ul>{inner}</ul></div>" * 4)
    assert "town" not in text and text.count("harbour") == 5 * PARAGRAPHS
