"""What in the store a text resembles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from puna.flows.html.markup import Content, Html, details, section, table, tag
from puna.flows.web.frame import artifact_link, field, option
from puna.stages.curate.minhash.index import indexed
from puna.stages.curate.minhash.similar import described, resembling
from puna.storage import Artifact, PunaError, Store

MOST_FOUND = 20


def near_form(offered: Sequence[tuple[Artifact, str]], chosen: Artifact, text: str = "") -> Html:
    """The form that asks. `offered`: documents with their titles."""
    options = [option(one.id, title, chosen=one.key == chosen.key) for one, title in offered]
    form = tag("form",
        field("Text", tag("textarea", text, name="text", rows=6, required=True)),
        field("Among", tag("select", options, name="artifact")),
        tag("p", tag("button", "Compare", class_="main")),
        action="/puna/near", method="post")  # fmt: skip
    return details("What does a text resemble?", form, open_=bool(text), class_="more")


def resembled(store: Store, asked: Mapping[str, Sequence[str]]) -> tuple[Artifact, str, Html]:
    """The documents that were asked about, the text, and which of them resemble it. PunaError where it has no words."""
    artifact, text = store.resolve(asked.get("artifact", [""])[0]), asked.get("text", [""])[0]
    if artifact.kind != "documents":
        raise PunaError(f"{artifact.id} holds {artifact.kind}, not documents")
    found = resembling(text, artifact)
    rows: list[list[Content]] = []
    for row in described(found[:MOST_FOUND], artifact):
        name = tag("a", row["title"] or row["url"] or row["id"], href=f"/puna/document/{row['id']}")
        removed = None if row["kept"] else [" ", tag("span", "removed", class_="tag wrong")]
        rows.append([[name, removed], *(f"{row[share]:.3f}" for share in ("similarity", "of_text", "of_document"))])
    said = "Shares of runs of words: those in common of all that either has, of the text's, and of the document's."
    if indexed(artifact):
        said += " Only documents that share a band of the index were looked at."
    head = f"{len(found):,} documents resemble it" if found else "Nothing resembles it"
    shown = table(["document", "of both", "of the text", "of the document"], rows, numeric=(1, 2, 3)) if rows else tag("p", "")
    return artifact, text, section("near", head, [said, " ", artifact_link(artifact)], shown)
