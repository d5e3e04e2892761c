"""The frame of every page: head, navigation, style, and common pieces for states, times and artifacts."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from urllib.parse import quote

from puna.flows.html.markup import Content, Html, duration, tag, text
from puna.storage import Artifact, Store
from puna.storage.runs import RunLog

HERE = Path(__file__).parent
PLACES = {
    "": "Runs", "start": "Start", "artifacts": "Artifacts", "documents": "Documents", "rules": "Rules", "rounds": "Rounds", "sql": "SQL",
    "chat": "Chat",
}  # fmt: skip
STATES = {"finished": "right", "failed": "wrong", "stopped": "", "crashed": "wrong", "at work": "busy"}


@cache
def style() -> str:
    """Return the report's style sheet, and what these pages add."""
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in ("../report/page.css", "web.css"))


def page(title: str, *content: Content, here: str = "", prefect: str | None = None, live: str | None = None, lead: Content = None) -> Html:
    """Return a whole page. `here`: its place in the navigation; `live`: the address of events after which `main` is fetched anew."""
    links = [
        tag("a", name, href=f"/puna/{place}", aria_current="page" if place == here else None, accesskey=str(number))
        for number, (place, name) in enumerate(PLACES.items(), 1)
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
    shown = tag("i", class_="kept", style=f"width:{100 * filled:.1f}%")
    return tag("span", shown, class_="bar", role="img", aria_label=words)


def problem(words: str) -> Html:
    """Return an error message, line by line."""
    return tag("p", *[[line, Html("<br>")] for line in words.splitlines()], class_="alarm", role="alert")


def field(label: Content, control: Html) -> Html:
    """Return a form's control with its name."""
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
