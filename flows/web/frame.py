"""The frame of every page: head, navigation, style, and common pieces for states, times and artifacts."""

from __future__ import annotations

import dataclasses
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, quote

from fastapi import FastAPI, HTTPException, Request

from puna.flows.html.markup import Content, Html, duration, tag, text
from puna.storage import Artifact, Store
from puna.storage.runs import RunLog

if TYPE_CHECKING:
    from puna.flows.web.bounded import Asker

HERE = Path(__file__).parent
STALE = "this page is older than the server, or was made by another site: open it again from here, then ask"
MOST_FIELDS = 2000
"""Fields of a form."""
STATES = {"finished": "right", "failed": "wrong", "stopped": "", "crashed": "wrong", "at work": "busy"}


@dataclass(frozen=True)
class Site:
    """The application that a module adds its pages to.

    `prefect`: the address of the server whose forms they link to; `token`: proves that a form comes from these pages.
    """

    app: FastAPI
    store: Store
    prefect: str | None
    asker: Asker
    token: str = dataclasses.field(default_factory=lambda: secrets.token_urlsafe(32))

    def trusts(self, fields: Mapping[str, Sequence[str]]) -> bool:
        """True if a form sends the token along, which only pages of this server hold."""
        return hmac.compare_digest(fields.get("token", [""])[0].encode(), self.token.encode())


class Entry(NamedTuple):
    """Pages of a module: the function that adds them, and their link in the navigation if `name` is given, in order of `at`."""

    at: int
    place: str
    name: str
    routes: Callable[[Site], None]


REGISTRY: list[Entry] = []


def pages(place: str = "", name: str = "", *, at: int = 0) -> Callable[[Callable[[Site], None]], Callable[[Site], None]]:
    """Register the decorated function: it adds a module's pages to a site. With `name` the navigation links to `place`."""

    def register(routes: Callable[[Site], None]) -> Callable[[Site], None]:
        REGISTRY.append(Entry(at, place, name, routes))
        return routes

    return register


async def sent(request: Request) -> dict[str, list[str]]:
    """Return the fields of a form; 400 where the body is no form in UTF-8."""
    try:
        fields = parse_qs((await request.body()).decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise HTTPException(400, f"the body is no form in UTF-8 of at most {MOST_FIELDS:,} fields") from error
    if any("\0" in text for name, values in fields.items() for text in (name, *values)):
        raise HTTPException(400, "a field must not hold NUL")
    return fields


@cache
def style() -> str:
    """Return the report's style sheet, and what these pages add."""
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in ("../report/page.css", "web.css"))


def page(title: str, *content: Content, here: str = "", prefect: str | None = None, live: str | None = None, lead: Content = None) -> Html:
    """Return a whole page. `here`: its place in the navigation; `live`: the address of events after which `main` is fetched anew."""
    links = [
        tag("a", name, href=f"/puna/{place}", aria_current="page" if place == here else None, accesskey=str(number))
        for number, (_, place, name, _) in enumerate(sorted(entry for entry in REGISTRY if entry.name), 1)
    ]
    if prefect is not None:
        links.append(tag("a", "Prefect ↗", href="/v2/deployments"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · Puna"),
        tag("link", rel="stylesheet", href="/puna/static/style.css"),
        tag("link", rel="icon", href="data:,"),
    )
    body = tag(
        "body",
        tag("a", "To the content", href="#content", class_="skip"),
        tag(
            "header",
            tag("div", tag("a", "Puna", href="/puna/", class_="brand"), tag("nav", links, aria_label="Pages"),
                tag("button", "Light / dark", type="button", id="theme"), class_="top"),
            tag("h1", title), tag("p", lead, class_="lead") if lead else None,
        ),
        tag("main", content, id="content", data_live=live),
        Html('<script src="/puna/static/web.js"></script>'),
    )  # fmt: skip
    return Html(f"<!doctype html>\n{tag('html', head, body, lang='en')}\n")


def projects_nav(store: Store, chosen: str | None, address: str, *, every: bool = False) -> Html | None:
    """Return links to a page for each project of the store, None where there is one only. `every`: and for all of them together."""
    if len(names := store.projects()) < 2:
        return None
    sign = "&" if "?" in address else "?"
    links = [tag("a", "all", href=address, aria_current="page" if chosen is None else None)] if every else []
    links += [tag("a", name, href=f"{address}{sign}project={name}", aria_current="page" if name == chosen else None) for name in names]
    return tag("nav", "Project ", links, aria_label="Projects")


def artifact_link(artifact: Artifact, words: str | None = None) -> Html:
    """Return a link to the page of an artifact."""
    return tag("a", words or artifact.id, href=f"/puna/artifact/{artifact.kind}/{artifact.key[:12]}", class_="id")


def run_link(name: str, words: Content = None) -> Html:
    """Return a link to the page of a run."""
    return tag("a", words or name, href=f"/puna/run/{quote(name)}")


def badge(log: RunLog) -> Html:
    """Return the state of a run."""
    return tag("span", log.state, class_=f"tag {STATES.get(log.state, '')}")


def when(moment: datetime | None) -> Html:
    """Return a time in UTC, which the browser shows in the reader's own zone."""
    if moment is None:
        return Html("–")
    return tag("time", f"{moment.astimezone(UTC):%-d %b %H:%M}", datetime=moment.isoformat())


def spent(log: RunLog) -> str:
    """Return the duration of a run, so far if it is at work."""
    if log.opened is None:
        return "–"
    end = datetime.now(UTC) if log.state == "at work" else log.closed or log.opened
    return duration((end - log.opened).total_seconds())


def bar(share: float, words: str) -> Html:
    """Return a bar that is `share` full, from 0 to 1."""
    filled = max(0.0, min(1.0, share))
    fill = tag("i", class_="kept", style=f"width:{100 * filled:.1f}%")
    return tag("span", fill, class_="bar", role="img", aria_label=words)


def problem(words: str) -> Html:
    """Return an error message, line by line."""
    return tag("p", *[[line, Html("<br>")] for line in words.splitlines()], class_="alarm", role="alert")


def field(label: Content, control: Html) -> Html:
    return tag("label", tag("span", label), control, class_="field")


def option(value: str, words: str, *, chosen: bool = False) -> Html:
    """Return one line of a drop-down."""
    return tag("option", words, value=value, selected=chosen)


def plain(value: object, longest: int = 400) -> Html:
    """Return a value of a table as text, cut where it is long."""
    if value is None:
        return tag("span", "–", class_="dim")
    if isinstance(value, float):
        return text(f"{value:.6g}")
    if isinstance(value, bytes):
        return text(f"{len(value):,} bytes")
    words = str(value)
    return text(words) if len(words) <= longest else tag("span", words[:longest], tag("i", " …"), title=words[: 10 * longest])
