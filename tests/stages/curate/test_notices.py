"""Legal pages, and notices in place of a page: measured by hand, and distinguished from articles about the same topics."""

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
    """Return the rules of the group `notices` that drop a text."""
    values = measure(pa.array([text]), 5, 0.5).values
    rules = [rule for rule in active_rules(SelectConfig()) if rule.name.startswith("notices.")]
    columns = {rule.drop.signal: values[rule.drop.signal] for rule in rules}
    return decide(pa.table({"id": ["a"], "source": ["web"], **columns}), rules)["rule"].to_pylist()


def test_words_of_different_phrases_are_counted_once() -> None:
    # "you agree" lies inside "you agree to", and "your preferences" occurs twice: 3 + 2 + 2 + 2 + 2 + 3 + 2 + 2 of 25 words, in 8 phrases.
    text = "You agree to it; we collect: your preferences. By using X your preferences, without prior notice, or our partners, opt out. No word is said."
    values = measure(pa.array([text, text.replace("we collect", "they collect")]), 5, 0.5).values
    assert values["legal_phrase_ratio"].tolist() == [pytest.approx(18 / 25), 0.0]  # with seven phrases none counts


def test_a_policy_goes_and_an_article_about_policies_stays() -> None:
    assert dropped(POLICY) == ["notices.max_legal"]
    assert dropped(ARTICLE) == []
    # It has as many legal words; the difference is who addresses whom.
    assert len(notices.phrases(ARTICLE, "legal")[1]) >= 3


DIALOGS = {
    "de": """Wir verwenden Cookies. Auf unserer Website setzen wir und unsere Partner ähnliche Technologien ein, um zu messen, was gelesen wird. Ihre
Einwilligung können Sie jederzeit widerrufen, mit Wirkung für die Zukunft. Mehr steht in der Datenschutzerklärung.
Alle akzeptieren
Alle ablehnen""",
    "fr": """Sur notre site, nous utilisons des cookies. Avec votre accord, nos partenaires et nous mesurons ce qui est lu. Vous pouvez à tout moment
retirer votre consentement ou changer vos préférences. Lisez notre politique de confidentialité.
Tout accepter
Continuer sans accepter""",
    "es": """Utilizamos cookies propias y de terceros en nuestro sitio. Nosotros y nuestros socios medimos lo que se lee. Puede retirar su consentimiento
en la política de cookies o configurar sus datos personales.
Aceptar todas
Rechazar todas""",
    "it": """Utilizziamo i cookie sul nostro sito. Noi e i nostri partner misuriamo che cosa si legge. Puoi liberamente revocare il tuo consenso nel
pannello delle preferenze; leggi l'informativa sulla privacy.
Accetta tutto
Rifiuta tutto""",
    "nl": """Wij gebruiken cookies op onze website. Wij en onze partners meten wat er gelezen wordt met vergelijkbare technieken. Je toestemming intrekken
kan altijd, bij de cookie-instellingen. Lees meer in ons privacybeleid.
Alles accepteren
Alles weigeren""",
    "pt": """Usamos cookies neste site. Nós e os nossos parceiros medimos o que se lê. Pode retirar o seu consentimento; leia a nossa política de
privacidade e as definições de cookies. Os seus dados ficam connosco.
Aceitar todos
Rejeitar todos""",
}
GESETZ = """(3) Die betroffene Person hat das Recht, ihre Einwilligung jederzeit zu widerrufen. Wer personenbezogene Daten verarbeitet, belegt ein
berechtigtes Interesse. Das Recht auf Auskunft und das Recht auf Löschung bleiben unberührt. Für die Verarbeitung personenbezogener Daten ihrer
Mitglieder brauchen Vereine keine Zustimmung; jederzeit widerrufen wird sie mit Wirkung für die Zukunft."""


@pytest.mark.parametrize("language", DIALOGS)
def test_a_consent_dialog_goes_in_other_languages_too(language: str) -> None:
    assert dropped(DIALOGS[language]) == ["notices.max_legal"]


def test_a_law_that_speaks_to_nobody_stays_in_german_too() -> None:
    assert len(notices.phrases(GESETZ, "legal")[1]) >= 6
    assert dropped(GESETZ) == []


# Its phrases are those of terms of use, but nobody is addressed.
STATUTE = """Section 12. (1) The Commission may at any time require a person to produce such documents, in accordance with this section, as
are specified in the notice. (2) Nothing in this section compels the production of a document which is protected under the laws of the
State. Section 13. (1) The terms of an order have effect from the effective date stated in it, and an order may be amended from time
to time. (2) Proceedings may be brought without prior notice to any person except where notice is required by law."""
ERRORS = """Page not found: how the web learned to say no

The page that most people have read is not a page. When Tim Berners-Lee decided that a link may break, the server had to say so, and the
words that engineers found, that the requested URL was not found on this server, were meant for engineers. Writers came later.

Some sites apologize, some joke. A museum in Oslo shows another missing painting every day, and tells in a few lines who took it; its
readers are said to mistype addresses with intent. Where a page no longer exists another number would be the right one, which
hardly anybody uses, since to know that something is gone for ever one must have kept a record of it.

Engineers of safety added a twist of their own. To answer that access is not allowed tells a thief that there is something to be
had, so that many servers say it is not there. The opposite lie is as old: a page that says the page you are looking for is gone,
and reports success, so that machines which count pages count it as one of the living. Whoever keeps a catalogue of the web has
learned to look at the words and not at the number."""


def test_a_law_and_an_article_on_errors_stay() -> None:
    assert len(notices.phrases(STATUTE, "legal")[1]) >= notices.MIN_LEGAL_PHRASES and dropped(STATUTE) == []
    text = "\n".join(paragraph.replace("\n", " ") for paragraph in ERRORS.split("\n\n"))
    ratio = [notices.notice_ratio(text), measure(pa.array([text]), 5, 0.5).values["notice_ratio"][0]]
    # Title and paragraphs each have a phrase, in 10, 51, 66 and 88 words; at most 100 words of a notice are counted.
    assert ratio == pytest.approx([100 / (10 + 51 + 66 + 88)] * 2) and dropped(text) == []
    assert dropped("\n".join(text.split("\n")[:2])) == ["notices.max_notice"]


def test_a_notice_goes_with_its_lines_and_not_with_those_of_a_page_around_it() -> None:
    words = 5 + 12
    values = measure(pa.array([FORBIDDEN]), 5, 0.5).values
    assert values["notice_ratio"][0] == pytest.approx(5 / words)
    assert dropped(FORBIDDEN.split("\n")[0]) == ["notices.max_notice"]
    assert dropped(f"{ARTICLE}\n{FORBIDDEN}") == []
    assert dropped("Bitte aktivieren Sie JavaScript, um diese Seite zu sehen.") == []  # no word list, no decision
