"""Wikipedia extracts of a package as article pages."""

import hashlib
import json
from collections.abc import Iterator
from html import escape
from urllib.parse import quote

from puna.flows.demo.warc import Member, Page

LONG = 600  # bytes of UTF-8; every extract from this length on is taken
SHORT_SHARE = 16  # of the shorter ones, one in this many

_LANGUAGES = {"en-us": "en", "fr-fr": "fr", "es-es": "es"}


def wanted(path: str) -> bool:
    """True if a member of the wheel holds the extracts of a language."""
    return _language(path) is not None


def articles(members: list[Member]) -> Iterator[Page]:
    """Yield one HTML page for each extract taken: title, short description, paragraphs, topic."""
    for member in members:
        extracts: dict[str, dict[str, str]] = json.loads(member.body)
        for _, entry in sorted(extracts.items()):
            if _taken(entry["title"], entry["extract"]):
                yield _article(str(_language(member.path)), entry, member)


def _language(path: str) -> str | None:
    name = path.rsplit("/", 1)[-1]
    return next((short for long, short in _LANGUAGES.items() if name == f"summaries_{long}.json"), None)


def _taken(title: str, extract: str) -> bool:
    if len(extract.encode()) >= LONG:
        return True
    return bool(extract) and hashlib.sha256(title.encode()).digest()[0] % SHORT_SHARE == 0


def _article(language: str, entry: dict[str, str], member: Member) -> Page:
    title, topic = escape(entry["title"]), escape(entry.get("topic") or "")
    paragraphs = "\n".join(f"<p>{escape(text)}</p>" for text in entry["extract"].splitlines() if text.strip())
    description = escape(entry.get("description") or "", quote=True)
    body = f"""<!DOCTYPE html>
<html lang="{language}">
<head>
<meta charset="utf-8">
<title>{title} - Wikipedia</title>
<meta name="description" content="{description}">
<link rel="license" href="https://creativecommons.org/licenses/by-sa/4.0/">
</head>
<body>
<nav><a href="/wiki/">Wikipedia</a></nav>
<main>
<article>
<h1>{title}</h1>
{paragraphs}
</article>
</main>
<footer><ul><li>{topic}</li><li>CC BY-SA 4.0</li></ul></footer>
</body>
</html>
"""
    path = quote(entry["title"].replace(" ", "_"), safe="/:@!$'()*,;-._~")
    url = f"https://{language}.wikipedia.org/wiki/{path}"
    return Page(url, member.modified, "text/html; charset=utf-8", body.encode())
