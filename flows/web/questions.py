"""The SQL page: a box for one read-only statement over all artifacts, the statement's result, examples and the available tables."""

from __future__ import annotations

import time
from urllib.parse import quote

import duckdb
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, Response

from puna.flows.html.markup import Content, Html, details, duration, part, table, tag
from puna.flows.web.bounded import SECONDS
from puna.flows.web.frame import STALE, Here, Site, form_fields, hidden_input, note, pages, plain, problem
from puna.storage import PunaError, Store, catalog, errors_at
from puna.storage.schemas import TABLES
from puna.storage.views import FACTS

MOST_ROWS = 1000
MEMORY = "1GB"  # memory limit of a statement
LIMITS = f"at most {SECONDS['sql']:.0f} s, {MEMORY} of memory and {MOST_ROWS:,} rows"
EXAMPLES = {
    "Dropped documents by rule": "select rule, count(*) as documents from dropped group by rule order by documents desc",
    "Time by stage": "select stage, count(*) as artifacts, round(sum(seconds), 1) as seconds from artifacts\n"
    "group by stage order by seconds desc",
    "Newest artifacts": "select kind, artifact[:12] as id, stage, rows, created_at from artifacts order by created_at desc limit 20",
    "Accuracy of every evaluation": "select artifact[:12] as id, task, metric, value, n from evaluation\n"
    "where metric = 'accuracy' order by id, task",
    "Inputs of each artifact": "select l.artifact[:12] as id, l.name, l.kind, l.input[:12] as input, a.stage\n"
    "from lineage l left join artifacts a on a.artifact = l.input order by id",
}
router = pages("sql", "SQL", at=8)


@router.get("/sql")
def box(site: Here, q: str = "") -> str:
    return _page(site, q, None)


def _page(site: Site, question: str, answer: Content) -> Html:
    """Return the SQL page with a statement in its box, and with the answer if the statement was run."""
    box = tag(
        "form",
        tag("textarea", question, name="q", id="q", rows=6, spellcheck="false", autofocus=not question, aria_label="SQL"),
        tag("p", tag("button", "Ask", class_="main"), tag("span", " Ctrl+Enter · read-only · ", LIMITS, class_="note")),
        hidden_input("token", site.token),
        action="/puna/sql", method="post", id="ask", data_answered="" if answer else None,
    )  # fmt: skip
    examples = [tag("li", tag("a", words, href=f"/puna/sql?q={quote(query)}")) for words, query in EXAMPLES.items()]
    columns = {**FACTS, **{name: table_.schema for name, table_ in TABLES.items()}}
    tables = [details(tag("b", name), note(", ".join(schema.names)), class_="more") for name, schema in columns.items()]
    return site.page(
        "SQL", box, answer,
        tag("div",
            part("Examples", tag("ul", examples)),
            part("Earlier statements", tag("ul", id="asked"), note="Stored in this browser."),
            part("Tables", tables, note="Each has the column artifact, the key of the artifact that holds the row."),
            class_="three"),
        here="sql", lead="One DuckDB statement over all artifacts.",
    )  # fmt: skip


def answer(store: Store, question: str) -> Html:
    """Run a statement and return its first rows as HTML. Raise PunaError if the statement is invalid, refused or needs too much memory."""
    began = time.perf_counter()
    with errors_at("", duckdb.Error), catalog.Catalog(store, memory=MEMORY) as opened:
        result = catalog.run(opened, question.strip().rstrip(";"), rows=MOST_ROWS + 1)
    head = result.slice(0, MOST_ROWS)
    numeric = [n for n, field in enumerate(result.schema) if str(field.type).startswith(("int", "uint", "float", "double", "decimal"))]
    rows: list[list[Content]] = [[plain(value) for value in row.values()] for row in catalog.rows_of(head)]
    took = duration(time.perf_counter() - began)
    more = "; there are more rows" if result.num_rows > MOST_ROWS else ""
    more += f"; {opened.uncompared:,} bytes were not compared with their checksums" if opened.uncompared else ""
    return tag(
        "div", tag("p", f"{len(rows):,} row{'' if len(rows) == 1 else 's'} in {took}{more}", class_="note", role="status"),
        table(list(result.schema.names), rows, numeric=numeric) if rows else None, class_="rows",
    )  # fmt: skip


@router.post("/sql")
async def ask(site: Here, request: Request) -> Response:
    """Run the form's statement if the form holds the site's token, and return the page. A statement in a URL only fills the box."""
    form = await form_fields(request)
    text = form.get("q", [""])[0]
    answer: Html | None = None
    if not site.trusts(form):
        return HTMLResponse(_page(site, text, problem(STALE)), 403)
    if text.strip():
        try:
            answer = await run_in_threadpool(site.asker.ask, "sql", q=text)
        except PunaError as error:
            answer = problem(str(error))
    return HTMLResponse(_page(site, text, answer))
