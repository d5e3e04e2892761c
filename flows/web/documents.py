"""Pages about documents: search, the history of a document, and the documents that resemble a text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from puna.flows.html.markup import Content, Html, details, excerpt, number, percent, section, table, tag
from puna.flows.report.why import fate
from puna.flows.web.frame import Here, Site, artifact_link, field, form_fields, note, option, pages, plain
from puna.stages.curate.minhash.index import describe, has_index, resembling
from puna.storage import Artifact, PunaError, Store
from puna.storage.parts import Follower

MOST_FOUND = 20
MOST_HITS = 40
SECONDS = 15.0  # maximum seconds for a search; the page reports how many documents were searched
ANY = "any rule"
BEFORE, AFTER = 120, 200  # characters shown before and after a match
router = pages("documents", "Documents", at=4)


def similar_documents(store: Store, form: Mapping[str, Sequence[str]]) -> tuple[Artifact, str, Html]:
    """Return a form's artifact and text with a view of similar documents. Raise PunaError for another kind or a text without words."""
    artifact, text = store.resolve(form.get("artifact", [""])[0]), form.get("text", [""])[0]
    if artifact.kind != "documents":
        raise PunaError(f"{artifact.id} holds {artifact.kind}, not documents")
    matches = resembling(text, artifact)
    rows: list[list[Content]] = []
    for row in describe(matches[:MOST_FOUND], artifact):
        name = tag("a", row["title"] or row["url"] or row["id"], href=f"/puna/document/{row['id']}")
        removed = None if row["kept"] else [" ", tag("span", "removed", class_="tag wrong")]
        rows.append([[name, removed], *(f"{row[share]:.3f}" for share in ("similarity", "of_text", "of_document"))])
    about = "Shared word n-grams as a share of the n-grams of both texts together, of the text, and of the document."
    if has_index(artifact):
        about += " Only documents that share a MinHash band with the text were compared."
    shown = f", the first {MOST_FOUND} are shown" if len(matches) > MOST_FOUND else ""
    head = f"{len(matches):,} similar documents{shown}" if matches else "No similar documents"
    listing = table(["document", "of both", "of the text", "of the document"], rows, numeric=(1, 2, 3)) if rows else tag("p", "")
    return artifact, text, section("near", head, [about, " ", artifact_link(artifact)], listing)


@router.get("/documents")
def search(site: Here, q: str = "", artifact: str = "", rule: str = "") -> str:
    """Return the search page. `rule`: search the documents that this rule dropped (`ANY`: that any rule dropped); empty: kept documents."""
    return _page(site, artifact, q, rule)


@router.post("/near")
async def near(site: Here, request: Request) -> str:
    return await run_in_threadpool(_page, site, "", "", "", await form_fields(request))


def _page(site: Site, name: str, words: str, rule: str, text: Mapping[str, Sequence[str]] | None = None) -> Html:
    store = site.store
    artifacts = store.artifacts("documents")[::-1]
    if not artifacts:
        return site.page("Documents", here="documents", lead="The store holds no documents yet: run `curate`.")
    names = store.names()
    aliases = {alias: one for one in artifacts for alias in names.get(one.key, ())}
    near = similar_documents(store, text) if text else None
    artifact = near[0] if near else store.resolve(name) if name else aliases.get("documents@latest", artifacts[0])
    rules = _rules(artifact)
    choices = list({one.key: one for one in (artifact, *artifacts[:MOST_HITS])}.values())
    titles = {one: " · ".join([*names.get(one.key, ()), one.id, one.manifest.stage, f"{one.rows():,} rows"]) for one in choices}
    options = [option(one.id, title, chosen=one.key == artifact.key) for one, title in titles.items()]
    which = [option("", f"kept: {artifact.rows():,}", chosen=not rule)]
    if rules:
        which.append(option(ANY, f"dropped by {ANY}: {rules.total():,}", chosen=rule == ANY))
        which += [option(one, f"dropped by {one}: {count:,}", chosen=one == rule) for one, count in rules.most_common()]
    form = tag("form",
        field("Words in text, address or title", tag("input", type="search", name="q", value=words, autofocus=not words)),
        field("Artifact", tag("select", options, name="artifact")),
        field("Which", tag("select", which, name="rule")),
        tag("p", tag("button", "Search", class_="main")),
        action="/puna/documents", method="get")  # fmt: skip
    comparison = tag("form",
        field("Text", tag("textarea", near[1] if near else "", name="text", rows=6, required=True)),
        field("Among", tag("select", options, name="artifact")),
        tag("p", tag("button", "Compare", class_="main")),
        action="/puna/near", method="post")  # fmt: skip
    return site.page(
        "Documents", tag("div", form, tag("div", _dropped_by(artifact, rules)), class_="two"),
        details("Find documents similar to a text", comparison, open_=bool(near and near[1]), class_="more"),
        near[2] if near else _results(store, artifact, words, rule), here="documents",
    )  # fmt: skip


@router.get("/document/{identity}")
def document_page(site: Here, identity: str) -> str:
    """Return the page of one document: its latest text, if stored, and its outcome in each stage (kept, scored, dropped, …)."""
    store = site.store
    rows = fate(store, identity)
    artifacts = [store.find("documents", row["artifact"]) for row in reversed(rows) if row["verb"] == "kept"]
    there = next((one for one in artifacts if one is not None), None)
    text = next(iter(there.between(identity, f"{identity}g", columns=["url", "title", "text"]).to_pylist()), None) if there else None
    steps: list[list[Content]] = []
    for row in rows:
        artifact = store.resolve(row["artifact"])
        detail = tag("small", row["what"].partition(": ")[2])
        steps.append([row["step"], tag("b", row["verb"]), detail, artifact_link(artifact)])
    title = (text or {}).get("title") or identity
    return site.page(
        str(title), section("fate", "Outcome in each stage", None, table(["step", "outcome", "values", "artifact"], steps)),
        section("text", "Text", f"after {there.manifest.stage}", tag("div", text["text"], class_="said")) if there and text else None,
        here="documents", lead=tag("code", (text or {}).get("url", identity)),
    )  # fmt: skip


def _rules(artifact: Artifact) -> Counter[str]:
    if "dropped" not in artifact.tables:
        return Counter()
    counts = artifact.read("dropped", columns=["rule"])["rule"].value_counts().to_pylist()
    return Counter({row["values"]: row["counts"] for row in counts})


def _dropped_by(artifact: Artifact, rules: Counter[str]) -> Content:
    if not rules:
        return note(artifact_link(artifact), " dropped nothing.")
    rows: list[list[Content]] = [
        [tag("a", rule, href=f"/puna/documents?artifact={artifact.id}&rule={rule}"), number(count), percent(count, rules.total())]
        for rule, count in rules.most_common(8)
    ]
    return table([["dropped by ", artifact_link(artifact)], "rows", "share"], rows, numeric=(1, 2))


def _results(store: Store, artifact: Artifact, words: str, rule: str) -> Html:
    began = time.monotonic()
    cards: list[Html] = []
    seen = whole = 0
    for source, batch, dropped in _batches(store, artifact, rule):
        whole = sum(one.rows() for one in source)
        seen += batch.num_rows
        why = {row["id"]: row for row in dropped}
        matches = batch.filter(pc.is_in(batch["id"], pa.array(list(why), pa.string()))) if rule else batch
        cards += [_card(row, words, why.get(row["id"])) for row in _matching(matches, words).slice(0, MOST_HITS - len(cards)).to_pylist()]
        if len(cards) >= MOST_HITS or time.monotonic() - began > SECONDS:
            break
    among = f"the first {seen:,} of {whole:,} documents" if seen < whole else f"{whole:,} documents"
    summary = f"{len(cards) or 'None'}{' or more' if len(cards) == MOST_HITS else ''} found among {among}"
    return section("found", summary, None, tag("div", cards, class_="cards"), tag("p", "") if not cards else None)


def _batches(store: Store, artifact: Artifact, rule: str) -> Iterator[tuple[list[Artifact], pa.RecordBatch, list[dict[str, Any]]]]:
    """Yield (searched artifacts, batch, its rows of `dropped` by `rule`) from `artifact` or, with a rule, from the artifact's inputs."""
    holding = [artifact]
    if rule and "dropped" not in artifact.tables:
        return
    if rule:
        sources = [store.find(item.kind, item.key) for item in artifact.manifest.inputs if item.kind in ("documents", "pages")]
        holding = [one for one in sources if one is not None]
        if not holding:
            raise PunaError(f"{artifact.id}: its inputs are no longer in the store")
    for one in holding:
        columns: list[str] = [name for name in ("id", "url", "title", "source", "text") if name in one.columns()]
        drops = Follower(artifact.beside(table="dropped"), "", None) if rule else None
        for batch in one.batches(columns=columns, rows=1024):
            rows = drops.upto(batch["id"][-1].as_py()) if drops else artifact.schema().empty_table()
            yield holding, batch, (rows if rule in ("", ANY) else rows.filter(pc.equal(rows["rule"], rule))).to_pylist()


def _matching(batch: pa.RecordBatch, words: str) -> pa.RecordBatch:
    if not words.strip():
        return batch
    matches = pa.array([False] * batch.num_rows, pa.bool_())
    for name in ("text", "url", "title"):
        if name in batch.schema.names:
            there = pc.match_substring(batch[name], words.strip(), ignore_case=True)
            matches = pc.or_(matches, pc.fill_null(there, False))
    return batch.filter(matches)


def _card(row: dict[str, Any], words: str, why: dict[str, Any] | None) -> Html:
    reason = None
    if why is not None:
        facts = [f"{name} {plain(why[name])}" for name in ("value", "threshold", "detail") if why.get(name) not in (None, "")]
        reason = note(tag("span", why["rule"], class_="tag wrong"), " ", Html(", ".join(facts)))
    head = tag("a", row.get("title") or row.get("url") or row["id"], href=f"/puna/document/{row['id']}")
    return tag("div", tag("p", head), tag("p", row.get("url") or "", class_="url"), reason,
               tag("blockquote", _mark(row.get("text") or "", words.strip())), class_="card")  # fmt: skip


def _mark(text: str, words: str) -> Content:
    at = text.lower().find(words.lower()) if words else -1
    if at < 0:
        return excerpt(text, 300)
    end = at + len(words)
    after = text[end : end + AFTER] + (" …" if len(text) > end + AFTER else "")
    return [" …" if at > BEFORE else "", text[max(0, at - BEFORE) : at], tag("mark", text[at:end]), after]
