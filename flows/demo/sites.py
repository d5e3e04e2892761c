"""Pages from the sample's packages: HTML documentation, saved news and blog pages, Python source files, Wikipedia extracts."""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urlsplit

from resiliparse.parse.encoding import detect_encoding
from resiliparse.parse.html import HTMLTree

from puna.flows.demo.warc import Member, Page

MIN_CODE = 200  # bytes; shorter source files are nearly empty, such as __init__.py
MAX_CODE = 64_000  # bytes; longer files, such as generated tables, are left out


def documentation(members: list[Member], folder: str, site: str) -> Iterator[Page]:
    """Yield the HTML pages below a folder of an archive, with URLs below `site`."""
    for member in members:
        if member.path.startswith(folder) and member.path.endswith(".html"):
            yield html_page(site + quote(member.path.removeprefix(folder)), member)


def source_code(members: list[Member], site: str) -> Iterator[Page]:
    """Yield the Python files of MIN_CODE to MAX_CODE bytes, with URLs below `site`, the address of the repository's raw files."""
    for member in members:
        if member.path.endswith(".py") and MIN_CODE <= len(member.body) <= MAX_CODE:
            content_type = f"text/x-python; charset={charset(member.body)}"
            yield Page(site + quote(member.path), member.modified, content_type, member.body)


def saved_pages(members: list[Member], folder: str) -> Iterator[Page]:
    """Yield the web pages that a package keeps as test data, with their original URLs.

    The URL comes from the package's tests, else from the page, else from the file's name, which starts with the host."""
    addresses = _test_addresses(members)
    for member in members:
        name = PurePosixPath(member.path).name
        if member.path.startswith(folder) and name.endswith(".html"):
            candidates = (addresses.get(name), _own_address(member.body))
            url = next((url for url in candidates if url and _is_whole(url)), None) or _address_of_name(name)
            yield html_page(_normal(url), member)


def html_page(url: str, member: Member) -> Page:
    """Return a file of an archive as an HTML page, with the charset of its bytes."""
    return Page(url, member.modified, f"text/html; charset={charset(member.body)}", member.body)


def charset(body: bytes) -> str:
    """Return the charset of the bytes: UTF-8 if they are valid UTF-8, else the detected charset. A saved page's own label may be wrong."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        return str(detect_encoding(body))
    return "utf-8"


def _test_addresses(members: list[Member]) -> dict[str, str]:
    """Return file name → URL of saved pages, from `MOCK_PAGES` in `tests/unit_tests.py` and from the metadata files."""
    result: dict[str, str] = {}
    for member in members:
        if member.path == "tests/unit_tests.py":
            result.update(_mock_pages(member))
        elif "/metadata/" in member.path and member.path.endswith(".json") and (url := json.loads(member.body).get("url")):
            result[PurePosixPath(member.path).stem + ".html"] = url
    return result


def _mock_pages(member: Member) -> dict[str, str]:
    """Return file → URL from the literal MOCK_PAGES in a test module, which is parsed, not run."""
    for statement in ast.parse(member.body).body:
        if isinstance(statement, ast.Assign) and "MOCK_PAGES" in [getattr(target, "id", None) for target in statement.targets]:
            pages: dict[str, str] = ast.literal_eval(statement.value)
            return {file: url for url, file in sorted(pages.items())}
    return {}


def _own_address(body: bytes) -> str | None:
    """Return the first absolute URL among a page's canonical links and og:url; None without one."""
    head = HTMLTree.parse_from_bytes(body, charset(body)).head
    if head is None:
        return None
    for selector, attribute in (('link[rel="canonical"]', "href"), ('meta[property="og:url"]', "content")):
        for node in head.query_selector_all(selector):
            url = (node.getattr(attribute) or "").strip()
            if _is_whole(url):
                return str(url)
    return None


def _is_whole(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and "." in parts.netloc


def _address_of_name(name: str) -> str:
    """Return the URL in a file name: https://heise.de/lithium for heise.de.lithium.html. A name without a host gets a reserved host."""
    stem = name.removesuffix(".html")
    match = re.match(r"((?:[\w-]+\.)+(?:com|org|net|info|blog|me|co\.uk|gv\.at|[a-z]{2}))(?:\.(.+))?$", stem)
    return f"https://news.example.org/{stem}.html" if match is None else f"https://{match[1]}/{match[2] or ''}"


def _normal(url: str) -> str:
    """Return a URL in the form that a crawler requests: with a path, percent-encoded, without a fragment."""
    parts = urlsplit(url)
    path = quote(unquote(parts.path) or "/", safe="/:@!$&'()*+,;=~-._")
    query = "?" + quote(parts.query, safe="/?:@!$&'()*+,;=~-._%") if parts.query else ""
    return f"{parts.scheme}://{parts.netloc}{path}{query}"


LONG = 600  # bytes of UTF-8; every extract of at least this length is selected
SHORT_SHARE = 16  # one of this many shorter extracts is selected

_LANGUAGES = {"en-us": "en", "fr-fr": "fr", "es-es": "es"}


def articles(members: list[Member]) -> Iterator[Page]:
    """Yield an HTML page for each selected Wikipedia extract: title, short description, paragraphs, topic."""
    for member in members:
        extracts: dict[str, dict[str, str]] = json.loads(member.body)
        for _, entry in sorted(extracts.items()):
            if _is_taken(entry["title"], entry["extract"]):
                yield _article(str(language_of(member.path)), entry, member)


def language_of(path: str) -> str | None:
    """Return the language of the extracts in a file of the wheel; None if the file holds no extracts."""
    name = path.rsplit("/", 1)[-1]
    return next((short for long, short in _LANGUAGES.items() if name == f"summaries_{long}.json"), None)


def _is_taken(title: str, extract: str) -> bool:
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
