"""Invisible text on a page: templates, notices about JavaScript, tags in brackets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.models.extraction.invisible_text import _tag_end
from puna.stages.curate.extract import ExtractConfig, page_text

FIRST = (
    "The council met on Tuesday to discuss the bridge, which was closed in March after engineers found cracks in two of its piers. Repairs may "
    "take until autumn, the mayor said, and cost four million euros."
)  # fmt: skip
LAST = (
    "Residents have asked for a ferry in the meantime. A study of the university found that the detour adds forty minutes to the way to work "
    "for some three thousand people on each day of the week."
)  # fmt: skip


def text_between(markup: str) -> str:
    """Return the extracted text between the first and last paragraphs of an article with this markup in between."""
    page = f"<html><head><title>Bridge</title></head><body><article><h1>Bridge</h1><p>{FIRST}</p>{markup}<p>{LAST}</p></article></body></html>"
    text = page_text(page.encode(), "text/html", "utf-8", ExtractConfig()).text
    assert text.count(FIRST) == text.count(LAST) == 1
    return text[text.index(FIRST) + len(FIRST) : text.index(LAST)].strip()


WINTER = "The bridge in winter, seen from the north bank"
BRACKETS = "The list [1, 2] and note [12] stay; [sic] too, and [b]bold[/b] in forums."
NOTE = "[Translator's note: the word has no equivalent in this language.]"
HARBOUR = "The mayor of the town speaks about a new harbour and its cost in the years to come."
CHARTS = "The height of the river over a hundred years is shown in interactive JavaScript charts that two students made for the town."
RETURN = "What the service of the harbour returns (JavaScript objects with the height of the tide) is open to all who live in the town."
HIDDEN_TEMPLATE = '<div style="display:none" class="elementor-template"><p>A hidden template of a page builder that no reader of it ever sees.</p></div>'


@pytest.mark.parametrize(
    "markup",
    [
        "<template><p>Dear customer, your order of several items will be shipped by our partner.</p></template>",
        HIDDEN_TEMPLATE,
        "<noscript><p>Please enable JavaScript to view the comments powered by a service.</p></noscript>",
        "<div>JavaScript is disabled in your browser. Please enable JavaScript to use all features of this site.</div>",
        "<p>Bitte aktivieren Sie JavaScript, um die Karte zu sehen.</p>",
        "<p>Veuillez activer JavaScript pour lire les commentaires.</p>",
        "<p>JavaScript est désactivé.</p>",
        "<p>JavaScript ist deaktiviert.</p>",
        "<p>Turn JavaScript on to read the comments.</p>",
        '[vc_row][vc_column width="1/2"][/vc_column][/vc_row]',
        '<p>[gallery ids="1,2,3"]</p>',
        "<p>[adthrive-player video-id=\u201dx\u201d name=\u201dClean a table\u201d]</p>",
    ],
)
def test_what_nobody_sees_goes(markup: str) -> None:
    assert text_between(markup) == ""


@pytest.mark.parametrize(
    ("markup", "left"),
    [
        (f'<p>[caption id="a_12" align="none"]{WINTER}[/caption]</p>', WINTER),
        (f"<p>{BRACKETS}</p>", BRACKETS),
        (f"<p>{NOTE}</p>", NOTE),
        ("<p>property options: defaults | Type[default_load_options]</p>", "property options: defaults | Type[default_load_options]"),
        ("<ul><li>[no_tags] Fixed the bridge between two engines</li></ul>", "\u2022 [no_tags] Fixed the bridge between two engines"),
        ("<pre>[section_one]\nname=&quot;x&quot;\n[/section_one]</pre>", '[section_one]\nname="x"\n[/section_one]'),
        (f"<noscript><p>{HARBOUR}</p></noscript>", HARBOUR),
        (f"<p>{CHARTS}</p>", CHARTS),
        (f"<p>{RETURN}</p>", RETURN),
    ],
)
def test_what_readers_see_stays(markup: str, left: str) -> None:
    assert text_between(markup) == left


def test_an_article_about_javascript_keeps_what_it_says_of_turning_it_on() -> None:
    steps = [f"Step {n}: open the settings of browser number {n} and enable JavaScript for all sites that you trust." for n in range(1, 6)]
    assert [step in text_between("".join(f"<p>{step}</p>" for step in steps)) for step in steps] == [True] * 5


@given(st.text(st.sampled_from('[]/ab_-1 ="\'x\n\u201d'), max_size=40), st.integers(0, 5))
def test_a_tag_ends_at_a_bracket_or_is_none(text: str, at: int) -> None:
    data = np.frombuffer(text.encode(), np.uint8)
    at = min(at, len(data))
    end = _tag_end(data, at, len(data))
    assert end == at or (data[at] == ord("[") and data[end - 1] == ord("]"))
