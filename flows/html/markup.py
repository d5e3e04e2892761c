"""Functions that build HTML. All text that is not `Html` is escaped, so that text from the web cannot become markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TypeAlias

from puna.storage import Artifact

# Characters that XML and HTML forbid in text; they are shown as the replacement character.
FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
VOID = frozenset(("br", "hr", "meta", "link", "input", "col", "wbr"))


class Html(str):
    """A string of finished markup, which is not escaped again."""

    __slots__ = ()


Content: TypeAlias = "str | int | Iterable[Content] | None"  # content of an element: text (escaped), `Html`, nothing


def text(value: object) -> Html:
    return Html(escape(FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True))


def join(content: Content) -> Html:
    if content is None:
        return Html("")
    if isinstance(content, Html):
        return content
    if isinstance(content, int):
        return text(number(content))
    return text(content) if isinstance(content, str) else Html("".join(map(join, content)))


def tag(name: str, /, *content: Content, **attributes: object) -> Html:
    """Return an element. In attribute names, a trailing `_` is dropped and other `_` become `-`; None and False drop the attribute."""
    attributes_text = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        attributes_text.append(f" {label}" if value is True else f' {label}="{text(value)}"')
    opened = f"<{name}{''.join(attributes_text)}>"
    return Html(opened if name in VOID else f"{opened}{join(content)}</{name}>")


THEME = tag("button", "Light / dark", type="button", id="theme")  # the button that switches a page between light and dark colours


def document(title: str, body: Html, *head: Content) -> Html:
    """Return a whole page; `head`: elements that follow the title in the page's head."""
    first = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"), tag("title", title), head,
    )  # fmt: skip
    return Html(f"<!doctype html>\n{tag('html', first, body, lang='en')}\n")


def table(head: Sequence[Content], rows: Iterable[list[Content]], *, numeric: Iterable[int] = ()) -> Html:
    """Return a table in a scrollable box. `numeric`: indices of the columns to align right."""
    right = set(numeric)

    def cells(kind: str, row: Sequence[Content], scope: str | None = None) -> list[Html]:
        return [tag(kind, cell, class_="n" if i in right else None, scope=scope) for i, cell in enumerate(row)]

    body = [tag("tr", cells("td", row)) for row in rows]
    headed = tag("thead", tag("tr", cells("th", head, "col")))
    return tag("div", tag("table", headed, tag("tbody", body)), class_="scroll", tabindex=0)


def details(summary: Content, *content: Content, open_: bool = False, class_: str | None = None) -> Html:
    return tag("details", tag("summary", summary), *content, open=open_, class_=class_)


def section(name: str, title: str, lead: Content, *content: Content) -> Html:
    inside = join(content)
    if not inside:
        return Html("")
    return tag("section", tag("h2", title), tag("p", lead, class_="lead") if lead else None, inside, id=name)


def part(title: str, *content: Content, note: Content = None) -> Html:
    """Return a titled part of a section; empty markup if the part has no content."""
    inside = join(content)
    return Html("") if not inside else tag("div", tag("h3", title), tag("p", note, class_="note") if note else None, inside, class_="part")


def legend(names: Mapping[str, str]) -> Html:
    """Return a legend of colours. `names`: CSS class of a colour → the colour's meaning."""
    return tag("ul", [tag("li", tag("i", class_=kind), words) for kind, words in names.items()], class_="legend")


def stacked_bar(pieces: Iterable[tuple[str, float]], class_: str = "bar") -> Html:
    """Return a stacked bar. `pieces`: a CSS class and a percentage of the width for each piece."""
    segments = [tag("i", class_=kind, style=f"width:{width:.2f}%") for kind, width in pieces]
    return tag("span", segments, class_=class_, aria_hidden="true")


def number(value: float | int | None, digits: int = 4) -> str:
    """Return a number as text (None: a dash): whole and large numbers with thousands separators, others to `digits` significant digits."""
    if value is None:
        return "–"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    if value != value:
        return "not a number"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}"
    return f"{value:.{digits}g}"


def short(value: float | int | None) -> str:
    """Return a count in at most four digits: 950, 12.3 k, 4.56 M; a dash for None."""
    if value is None:
        return "–"
    for start, scale, unit in ((0.9995e12, 1e12, "T"), (0.9995e9, 1e9, "G"), (0.9995e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= start:
            scaled = value / scale
            return f"{scaled:.{0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2}f} {unit}"
    return number(value, 3)


def percent(part_: float, whole: float) -> str:
    """Return a share in percent, a dash if `whole` is 0. A non-zero share is never shown as zero, nor an incomplete share as 100 %."""
    if not whole:
        return "–"
    share = 100 * part_ / whole
    if 0 < share < 0.1:
        return "< 0.1 %"
    if 99.9 < share < 100:
        return "> 99.9 %"
    return f"{share:.0f} %" if share >= 99.95 or share == 0 else f"{share:.1f} %"


def duration(seconds: float) -> str:
    """Return a time span: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min. A negative span counts as 0."""
    seconds = max(0.0, seconds)
    if 0 < seconds < 0.05:
        return "< 0.1 s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(count: float) -> str:
    """Return a number of bytes as text, in powers of 1000."""
    for bound, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= 0.9995 * bound:
            return f"{count / bound:.3g} {unit}" if count < 999.5 * bound else f"{count / bound:,.0f} {unit}"
    return f"{count:.0f} B"


def cell_text(value: object) -> str:
    """Return a table's value as text: floats with six digits, bytes as their number; empty for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{len(value):,} bytes" if isinstance(value, bytes) else str(value)


def excerpt(value: str, characters: int = 420) -> str:
    """Return the beginning of a text, without runs of blank lines."""
    whole = value.strip()
    squeezed = re.sub(r"\n\s*\n+", "\n\n", whole[: characters * 4])
    return squeezed if len(squeezed) <= characters and len(whole) <= characters * 4 else squeezed[:characters].rstrip() + " …"


def counted_rows(artifact: Artifact, table: str = "") -> str:
    """Return the number of rows of a table (default: the main table) as text; empty if the artifact lacks the table."""
    name = table or artifact.kind
    return f"{artifact.rows(name):,}" if name in artifact.tables else ""


def disk_size(artifact: Artifact) -> int:
    return sum(record.bytes for record in artifact.manifest.files.values())


def stored(artifact: Artifact) -> str:
    return size(disk_size(artifact))


def made_at(artifact: Artifact) -> str:
    return artifact.manifest.created_at[:16].replace("T", " ")
