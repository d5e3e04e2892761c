"""Legal pages and notices in place of a page: measured by hand, and told from articles about the same things."""

from __future__ import annotations

import pyarrow as pa
import pytest

from puna.stages.curate.rules.decide import decide
from puna.stages.curate.rules.groups import active_rules
from puna.stages.curate.select import SelectConfig
from puna.stages.curate.signals.definitions import notices
from puna.stages.curate.signals.measure import measure

POLICY = """Privacy policy of Example Cycles

We collect information you provide when you rent a bicycle, and we may share it with our partners. By using this website, you
agree to this policy. We use cookies to remember your preferences, and you can withdraw your consent at any time.
We reserve the right to change this policy without notice. If you have questions, contact us at the shop."""
ARTICLE = """Privacy policies that nobody reads

A law of 2018 made every company say what it does with the data of its customers. A study read the policies of three hundred
shops: the median one takes eighteen minutes, and most of them reserve the right to change at any time. "We collect
what people give us", said one owner, who had copied the text from a competitor. Researchers asked forty readers to find the
paragraph about cookies and only nine did. The terms and conditions of two shops even promised a reward to whoever found the
sentence that offered it; four people wrote in a year. Courts have begun to ask whether consent means anything where nobody
reads, and a judge in Leipzig held last spring that it does not."""
FORBIDDEN = "Please enable JavaScript and cookies\n\nYour browser will be checked before you go on to the shop."


def dropped(text: str) -> list[str]:
    """The rules of the group `notices` that drop a text."""
    values = measure(pa.array([text]), "universal", 5, 0.5).values
    rules = [rule for rule in active_rules(SelectConfig()) if rule.name.startswith("notices.")]
    columns = {rule.drop.signal: values[rule.drop.signal] for rule in rules}
    return decide(pa.table({"id": ["a"], "source": ["web"], **columns}), rules)["rule"].to_pylist()


def test_words_of_different_phrases_are_counted_once() -> None:
    # "you agree" lies inside "you agree to", and "your preferences" occurs twice: 3 + 2 + 2 + 2 + 2 + 3 + 2 + 2 of 25 words, in 8 phrases.
    text = "You agree to it; we collect: your preferences. By using X your preferences, without prior notice, or our partners, opt out. No word is said."
    values = measure(pa.array([text, text.replace("we collect", "they collect")]), "universal", 5, 0.5).values
    assert values["legal_phrase_ratio"].tolist() == [pytest.approx(18 / 25), 0.0]  # with seven phrases none counts


def test_a_policy_goes_and_an_article_about_policies_stays() -> None:
    assert dropped(POLICY) == ["notices.max_legal"]
    assert dropped(ARTICLE) == []
    # Its words of law are no fewer: it is who speaks to whom that differs.
    assert notices.phrases(ARTICLE, "legal")[1] >= 3


def test_a_notice_goes_with_its_lines_and_not_with_those_of_a_page_around_it() -> None:
    words = 5 + 12
    values = measure(pa.array([FORBIDDEN]), "universal", 5, 0.5).values
    assert values["notice_ratio"][0] == pytest.approx(5 / words)
    assert dropped(FORBIDDEN.split("\n")[0]) == ["notices.max_notice"]
    assert dropped(f"{ARTICLE}\n{FORBIDDEN}") == []
    assert dropped("Bitte aktivieren Sie JavaScript, um diese Seite zu sehen.") == []  # no list, no judgement
