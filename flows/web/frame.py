"""The frame of every web page: head, navigation and style sheet; and HTML that pages share, for links, states, times and form fields."""

from __future__ import annotations

import dataclasses
import hmac
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response

from puna.flows.html.markup import THEME, Content, Html, cell_text, document, tag, text
from puna.flows.web.bounded import Asker
from puna.storage import Artifact, Store
from puna.storage.runs import RunLog

HERE = Path(__file__).parent
STALE = "this page is older than the server, or was made by another site: open it again from here, then retry"
MOST_FIELDS = 2000  # maximum number of fields in a form
STATES = {"finished": "right", "failed": "wrong", "stopped": "", "crashed": "wrong", "at work": "busy"}


class Entry(NamedTuple):
    """A module's entry in the registry of pages. With a `name`, the navigation links to the path `place`; `at` orders the links."""

    at: int
    place: str
    name: str
    router: APIRouter


REGISTRY: list[Entry] = []


def pages(place: str = "", name: str = "", *, at: int = 0) -> APIRouter:
    """Return a new, registered router for a module's pages. With a `name`, the navigation links to `place`; `at` orders the links."""
    router = APIRouter(default_response_class=HTMLResponse)
    REGISTRY.append(Entry(at, place, name, router))
    return router


@dataclass(frozen=True)
class Site:
    """The web site of a store. `prefect`: URL of Prefect's server, if any; `token`: a secret that proves that a form is from this site."""

    store: Store
    prefect: str | None
    asker: Asker
    token: str = dataclasses.field(default_factory=lambda: secrets.token_urlsafe(32))

    def trusts(self, fields: Mapping[str, Sequence[str]]) -> bool:
        """True if a form holds the site's token, which only pages of this server contain."""
        return hmac.compare_digest(fields.get("token", [""])[0].encode(), self.token.encode())

    def page(self, title: str, *content: Content, here: str = "", live: str | None = None, lead: Content = None) -> Html:
        """Return a whole page. `here`: path of its navigation entry; `live`: URL of an event stream whose events make it reload `main`."""
        entries = sorted(entry for entry in REGISTRY if entry.name)
        keys = [*"123456789", *[None] * len(entries)]
        links = [
            tag("a", name, href=f"/puna/{place}", aria_current="page" if place == here else None, accesskey=key)
            for (_, place, name, _), key in zip(entries, keys, strict=False)
        ]
        if self.prefect is not None:
            links.append(tag("a", "Prefect ↗", href="/v2/deployments"))
        sheet = tag("link", rel="stylesheet", href="/puna/static/style.css")
        body = tag(
            "body",
            tag("a", "To the content", href="#content", class_="skip"),
            tag("header",
                tag("div", tag("a", "Puna", href="/puna/", class_="brand"), tag("nav", links, aria_label="Pages"), THEME, class_="top"),
                tag("h1", title), tag("p", lead, class_="lead") if lead else None),
            tag("main", content, id="content", data_live=live),
            Html('<script src="/puna/static/web.js"></script>'),
        )  # fmt: skip
        return document(f"{title} · Puna", body, sheet, tag("link", rel="icon", href="data:,"))


def _site(request: Request) -> Site:
    site: Site = request.app.state.site
    return site


Here = Annotated[Site, Depends(_site)]  # a parameter of a page's function: the site that the page belongs to


def invalid(_: Request, error: Exception) -> Response:
    """Return a 422 response that names the first invalid field and its fault, without the value, which JSON may not be able to hold."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return JSONResponse({"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 422)


def health() -> dict[str, str]:
    return {"status": "ok"}


async def form_fields(request: Request) -> dict[str, list[str]]:
    """Return a form's fields, name → values. Raise HTTPException (400) if the body is not a UTF-8 form or has too many fields or NUL."""
    try:
        fields = parse_qs((await request.body()).decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise HTTPException(400, f"the body is not a UTF-8 form of at most {MOST_FIELDS:,} fields") from error
    if any("\0" in text for name, values in fields.items() for text in (name, *values)):
        raise HTTPException(400, "a field must not contain NUL")
    return fields


@cache
def style() -> str:
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in ("../report/page.css", "web.css"))


def projects_nav(store: Store, chosen: str | None, address: str, *, every: bool = False) -> Html | None:
    """Return links to the page `address`, one per project; None with fewer than two projects. `every`: add a link for all projects."""
    if len(names := store.projects()) < 2:
        return None
    sign = "&" if "?" in address else "?"
    links = [tab("all", address, chosen is None)] if every else []
    links += [tab(name, f"{address}{sign}project={name}", name == chosen) for name in names]
    return tag("nav", "Project ", links, aria_label="Projects")


def tab(words: Content, address: str, here: bool) -> Html:
    """Return a navigation link. `here`: mark the link as the current page or choice."""
    return tag("a", words, href=address, aria_current="page" if here else None)


def button(words: Content, address: str) -> Html:
    return tag("a", words, href=address, class_="button")


def hidden_input(name: str, value: str) -> Html:
    return tag("input", type="hidden", name=name, value=value)


def once() -> Html:
    """Return a hidden field with a new id, so that two clicks on one page start only one run."""
    return hidden_input("once", uuid.uuid4().hex)


def note(*words: Content) -> Html:
    return tag("p", words, class_="note")


def artifact_link(artifact: Artifact, words: str | None = None) -> Html:
    return tag("a", words or artifact.id, href=f"/puna/artifact/{artifact.kind}/{artifact.key[:12]}", class_="id")


def run_link(name: str, words: Content = None) -> Html:
    return tag("a", words or name, href=f"/puna/run/{quote(name)}")


def badge(log: RunLog) -> Html:
    return tag("span", log.state, class_=f"tag {STATES.get(log.state, '')}")


def when(moment: datetime | None) -> Html:
    """Return a time in UTC, which the page's script shows in the reader's time zone; a dash for None."""
    if moment is None:
        return Html("–")
    return tag("time", f"{moment.astimezone(UTC):%-d %b %H:%M}", datetime=moment.isoformat())


def bar(share: float, words: str) -> Html:
    """Return a bar that is filled up to `share` (0 to 1). `words`: label for screen readers."""
    fill = tag("i", class_="kept", style=f"width:{100 * max(0.0, min(1.0, share)):.1f}%")
    return tag("span", fill, class_="bar", role="img", aria_label=words)


def problem(words: str) -> Html:
    return tag("p", *[[line, Html("<br>")] for line in words.splitlines()], class_="alarm", role="alert")


def field(label: Content, control: Html) -> Html:
    return tag("label", tag("span", label), control, class_="field")


def option(value: str, words: str, *, chosen: bool = False) -> Html:
    return tag("option", words, value=value, selected=chosen)


def plain(value: object, longest: int = 400) -> Html:
    """Return a table value as HTML: text cut after `longest` characters, floats with six digits, the number of bytes, a dash for None."""
    if value is None:
        return tag("span", "–", class_="dim")
    words = cell_text(value)
    return text(words) if len(words) <= longest else tag("span", words[:longest], tag("i", " …"), title=words[: 10 * longest])
