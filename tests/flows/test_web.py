"""Puna's own pages: what they show of a run, an artifact, thresholds and queries, and what they refuse."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from datetime import UTC, datetime
from html import unescape
from pathlib import Path

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from puna.flows import web
from puna.flows.cli import main, sql
from puna.flows.engine.session import session
from puna.flows.web import annotate, application, bounded, chat, frame, start
from puna.flows.web import artifact as artifact_pages
from puna.flows.web import documents as document_pages
from puna.flows.web import runs as runs_pages
from puna.stages.contract import execute, perform
from puna.stages.curate.rules.groups import GopherQualityRules, LineRules, RuleGroup
from puna.stages.curate.select import SelectConfig, select
from puna.stages.prompts.prompts import PromptsConfig, prompts
from puna.storage import Artifact, PunaError, Store, runs
from puna.storage.schemas import table_schema

COUNT = 30


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return a store with documents of 1 to 30 words, from which a rule on the word count selected, and a run that made prompts, twice."""
    made = Store.open(tmp_path_factory.mktemp("web"))
    ids = [f"{n:032x}" for n in range(1, COUNT + 1)]
    rows = [
        {"id": one, "url": f"https://a.example/{n}", "fetched_at": datetime(2026, 1, 1, tzinfo=UTC), "source": "web", "title": "<script>alert(1)</script>", "text": "word " * n}
        for n, one in enumerate(ids, 1)
    ]
    documents = made.import_table("documents", pa.Table.from_pylist(rows, schema=table_schema("documents").schema))
    signals = made.import_table("signals", pa.Table.from_pylist([{"id": one, "words": n} for n, one in enumerate(ids, 1)]))
    # All rules off but one.
    groups = {name: None for name, field in SelectConfig.model_fields.items() if isinstance(field.default, RuleGroup | LineRules)}
    rules = {name: None for name in GopherQualityRules.model_fields if name.startswith(("min_", "max_"))}
    config = SelectConfig.model_validate({**groups, "gopher_quality": {**rules, "min_words": 11}})
    execute(select, config, {"documents": documents, "signals": [signals]}, made)
    for _ in range(2):
        with session(made, flow="prompts", workers=1, json=True) as now:
            now.perform(prompts, PromptsConfig(tasks=[{"task": "chain_sum"}], train=5, heldout=2), {}, "prompts")
    return made


@pytest.fixture(scope="module")
def client(store: Store) -> TestClient:
    return TestClient(application(store, prefect=None, auth=""))


def text(answer: object) -> str:
    return unescape(re.sub(r"<[^>]*>", " ", str(getattr(answer, "text", ""))))


def token_of(client: TestClient, path: str) -> str:
    """Return the token in the form at an address."""
    return re.findall(r'name="token" value="([^"]+)"', client.get(path).text)[0]


def selected(store: Store) -> Artifact:
    return next(artifact for artifact in store.artifacts() if artifact.manifest.stage == "select")


def test_home_shows_runs_and_where_they_lead(client: TestClient, store: Store) -> None:
    said = client.get("/").text
    assert all(f"/puna/run/{name}" in said for name in store.runs()) and said.count(">finished<") == 2


def test_a_run_shows_its_steps_and_what_was_reused(client: TestClient, store: Store) -> None:
    said = text(client.get(f"/run/{store.runs()[1]}"))
    made = next(artifact for artifact in store.artifacts() if artifact.kind == "prompts")
    assert made.id in said and "reused" in said and "1, 1 reused" in said


def test_a_run_shows_what_other_processes_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's log has the lines of a step once it has ended, also of a failed one; a run without such lines has no such section."""
    store = Store.open(tmp_path)
    for waiting in (iter([["rank 1: <loads>"], ["rank 1: ends"], []]), iter([[]] * 3)):
        monkeypatch.setattr("puna.stages.executors.ranks.lines_of_ranks", lambda waiting=waiting: next(waiting))
        with session(store, flow="prompts", workers=1, json=True) as now:
            now.perform(prompts, PromptsConfig(tasks=[{"task": "chain_sum"}], train=5, heldout=2), {}, "prompts")
            with pytest.raises(PunaError):
                now.perform(select, SelectConfig(), {}, "select")
    logs = sorted(map(store.log, store.runs()), key=lambda log: -len(log.lines))
    assert [log.lines for log in logs] == [("rank 1: <loads>", "rank 1: ends"), ()] and {log.state for log in logs} == {"finished"}
    pages = [TestClient(application(store, prefect=None, auth="")).get(f"/run/{log.name}").text for log in logs]
    assert "rank 1: &lt;loads&gt;\nrank 1: ends" in pages[0] and ["Other processes" in page for page in pages] == [True, False]


def test_a_page_that_is_past_by_the_time_it_listens_is_told_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Listener:
        left = 2

        async def is_disconnected(self) -> bool:
            self.left -= 1
            return self.left < 0

    async def told(since: str) -> list[str]:
        return [line async for line in runs_pages._events(store, Listener(), store.runs()[0], since)]  # type: ignore[arg-type]

    monkeypatch.setattr(runs_pages, "LOOKED_SECONDS", 0)
    now = runs_pages.state_digest(store, store.runs()[0])
    assert asyncio.run(told(now)) == [": still\n\n"] * 2
    assert asyncio.run(told("what it was")) == ['data: "changed"\n\n', ": still\n\n"]


def test_two_runs_of_the_same_work_are_said_to_be_the_same(client: TestClient, store: Store) -> None:
    first, second = store.runs()
    assert "1 of 1 steps gave the same artifact" in text(client.get(f"/compare?run={first}&run={second}"))
    assert client.get(f"/compare?run={first}").status_code == 404


def test_a_list_that_is_cut_says_so(client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    given = selected(store).manifest.inputs[0]
    uses, near = f"/artifact/documents/{given.key[:12]}", {"artifact": f"documents/{given.key}", "text": "word " * 20}
    assert "The first 1." not in text(client.get(uses)) and " similar documents, the first 20 are shown" in text(client.post("/near", data=near))
    monkeypatch.setattr(artifact_pages, "MOST_USERS", 1)
    monkeypatch.setattr(document_pages, "MOST_FOUND", 30)
    assert "The first 1." in text(client.get(uses)) and "are shown" not in text(client.post("/near", data=near))


def test_an_artifact_shows_rows_lineage_and_never_markup_of_the_web(client: TestClient, store: Store) -> None:
    chosen = selected(store)
    given = chosen.manifest.inputs[0]
    said = client.get(f"/artifact/documents/{chosen.key[:12]}")
    assert "1 to 20 of 20" in text(said) and f"/puna/artifact/documents/{given.key[:12]}" in said.text
    assert "<script>alert" not in said.text and "&lt;script&gt;alert" in said.text
    assert chosen.id in text(client.get(f"/artifact/documents/{given.key[:12]}"))  # used by
    assert "21 to 30 of 30" in text(client.get(f"/artifact/documents/{given.key[:12]}?start=20"))


def test_two_artifacts_differ_in_what_they_were_made_with_and_in_rows(client: TestClient, store: Store) -> None:
    chosen = selected(store)
    whole = chosen.manifest.inputs[0]
    said = text(client.get(f"/artifacts/compare?artifact=documents/{whole.key}&artifact={chosen.id}"))
    assert "contents differ" in said and re.search(r"rows of documents\s+30\s+20\s+-10", said)
    assert client.get(f"/artifacts/compare?artifact={chosen.id}").status_code == 404


def test_documents_are_found_by_words_and_by_the_rule_that_dropped_them(
    client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = selected(store)
    found = client.get(f"/documents?artifact={chosen.id}&q=a.example/12")
    assert "1 found among 20 documents" in text(found) and "<script>alert" not in found.text
    assert "None found" in text(client.get(f"/documents?artifact={chosen.id}&q=a.example/9"))  # dropped: 9 words
    read = Artifact.read

    def in_parts(artifact: Artifact, table: str | None = None, columns: list[str] | None = None) -> pa.Table:
        assert table != "dropped" or columns is not None, "a search must not read millions of dropped rows at once"
        return read(artifact, table, columns)

    monkeypatch.setattr(Artifact, "read", in_parts)
    gone = text(client.get(f"/documents?artifact={chosen.id}&q=a.example/9&rule=gopher_quality.min_words"))
    assert re.search(r"gopher_quality.min_words\s+value 9, threshold 11", gone) and "among 30 documents" in gone
    (identity,) = re.findall(r'/puna/document/([0-9a-f]{32})"', client.get(f"/documents?artifact={chosen.id}&q=a.example/9&rule=any rule").text)
    said = text(client.get(f"/document/{identity}"))
    assert "Outcome in each stage" in said and re.search(r"select\s+dropped", said) and "word word" in said


def test_a_form_stands_beside_its_plan_and_says_what_is_wrong(client: TestClient, store: Store) -> None:
    fields = {"set.tasks": '[{"task": "chain_sum"}]', "set.train": "5", "set.heldout": "2"}
    token = token_of(client, "/start/prompts")
    reused = client.post("/start/prompts/plan", data={**fields, "token": token})
    assert "Nothing to do" in text(reused) and "1 reused" in text(reused)
    assert ">Start</button>" not in reused.text  # without a server nothing can be started
    changed = text(client.post("/plan/prompts", data={**fields, "set.train": "6", "token": token}))
    assert "About" in changed and "config train: 5 → 6" in changed and "puna run stage:prompts --set" in changed
    refused = client.post("/plan/prompts", data={**fields, "set.train": "-6", "token": token})
    assert refused.status_code == 200 and 'role="alert"' in refused.text and "train" in text(refused)
    given = selected(store).manifest.inputs[0]
    picked = client.get(f"/start/line_dedup?documents=documents/{given.key[:12]}").text
    assert re.search(rf'<option value="documents/{given.key[:12]}" selected', picked)
    assert "never ran" in text(client.post("/plan/line_dedup", data={"documents": f"documents/{given.key[:12]}", "token": token}))
    refused = client.post("/start/prompts", content="set.train=-5&set.heldout=3")
    assert refused.status_code == 422 and "train: Input should be greater" in text(refused)
    assert re.search(r'name="set.heldout"[^>]*value="3"', refused.text)  # the form keeps the values that were filled in
    assert client.get("/start/nothing").status_code == 404 and "there is no such page" in text(client.get("/nothing"))
    assert "pipeline" in text(client.get("/start")) and "minhash_dedup" in text(client.get("/start"))


def test_a_threshold_is_replayed_as_select_decides(client: TestClient, store: Store) -> None:
    chosen = selected(store)
    asked = f"/rules/outcome?artifact={chosen.key[:12]}"
    assert "20 of 30 documents are kept" in text(client.get(asked))
    said = text(client.get(f"{asked}&gopher_quality.min_words=16"))
    assert "15 of 30 documents are kept" in said and "5 more would go" in said and "--set select.gopher_quality.min_words=16" in said
    fewer = text(client.get(f"{asked}&gopher_quality.min_words=6"))
    assert "25 of 30 documents are kept" in fewer and "5 would stay" in fewer
    assert "takes a number" in text(client.get(f"{asked}&gopher_quality.min_words=many"))
    assert "takes a whole number" in text(client.get(f"{asked}&gopher_quality.min_words=16.5"))
    # The slider of an integer steps through integers, from one below the documents' quantiles (1.145 and 29.855) to one above.
    assert 'type="range" min="1" max="30" step="1" value="11"' in client.get("/rules").text


def test_the_threshold_of_a_later_selection_names_its_step(store: Store, tmp_path: Path) -> None:
    copied = Store.open(shutil.copytree(store.root, tmp_path / "copy"))
    first = selected(copied).manifest
    given = [copied.find(item.kind, item.key) for item in first.inputs]
    config = SelectConfig.model_validate(first.config | {"gopher_quality": first.config["gopher_quality"] | {"min_words": 12}})
    second = perform(select, config, {"documents": given[0], "signals": given[1:]}, copied, run="a-run").artifact
    copied.record("a-run", runs.Made("select_model", "select", second.kind, second.key, False, 1.0).event())
    client = TestClient(application(copied, prefect=None, auth=""))
    said = text(client.get(f"/rules/outcome?artifact={second.key[:12]}&gopher_quality.min_words=16"))
    assert "--set select_model.gopher_quality.min_words=16" in said


def test_a_question_is_answered_and_a_change_refused(client: TestClient) -> None:
    token = token_of(client, "/sql")

    def said(question: str) -> str:
        return text(client.post("/sql", data={"q": question, "token": token}))

    assert "10" in said("select count(*) as n from dropped;").split()
    assert "read-only" in said("create table t as select 1")
    assert "does not exist" in said("select * from nothing")
    assert "1,000 rows in" in said("from range(100000000000)") and "there are more" in said("from range(1001)")
    assert "physical_plan" in said("explain select 1") and "range" in said("describe from range(3)")
    assert "file system operations are disabled" in said("from read_text('/etc/passwd')")


def test_an_address_fills_a_form_and_runs_nothing(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded.Asker, "ask", lambda *_, **__: pytest.fail("was asked"))
    shown = client.get("/sql", params={"q": "select 42"})
    assert "select 42</textarea>" in shown.text and "rows in" not in text(shown)
    for path in ("/start/prompts", "/start/prompts?set.train=7"):
        shown = client.get(path)
        assert "Press Plan" in text(shown) and "data-now" not in shown.text
        assert "data-now" in client.get(path, headers={"sec-fetch-site": "same-origin"}).text
        assert "data-now" not in client.get(path, headers={"sec-fetch-site": "cross-site"}).text
    assert client.get("/plan/prompts").status_code == 405
    for path in ("/sql", "/plan/prompts", "/start/prompts/plan"):
        for token in ("", "wrong", "ÿ"):
            refused = client.post(path, data={"q": "select 42", "token": token})
            assert refused.status_code == 403 and "older than the server" in text(refused)


def test_a_question_is_stopped_at_its_limits(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    token = token_of(client, "/sql")

    def said(question: str) -> str:
        return text(client.post("/sql", data={"q": question, "token": token}))

    assert "emory" in said("select list(range) from range(1000000000)")
    monkeypatch.setitem(bounded.SECONDS, "sql", 0.5)
    assert "stopped after" in said("select count(*) from range(100000000000) a, range(1000) b where hash(a.range + b.range) = 0")
    assert "42" in said("select 42").split()


def test_what_is_not_there_is_said(client: TestClient) -> None:
    for path in ("/run/nothing", "/run/..%2f..%2fetc", "/artifact/documents/ffffffffffff", "/artifact/nothing/ffffffffffff", "/static/app.py"):
        answer = client.get(path)
        assert answer.status_code == 404 and "Traceback" not in answer.text


def test_the_door_is_shut_where_a_password_is_set(store: Store) -> None:
    shut = TestClient(application(store, prefect=None, auth="me:secret"))
    assert shut.get("/").status_code == 401 and shut.get("/sql?q=select+1", auth=("me", "wrong")).status_code == 401
    assert shut.get("/", auth=("me", "secret")).status_code == 200


def test_a_page_loads_what_is_its_own_alone(client: TestClient) -> None:
    assert client.get("/").headers["content-security-policy"].startswith("default-src 'self'")


def test_a_text_is_told_what_it_resembles(client: TestClient, store: Store) -> None:
    """The generated document of 20 words has, like each one longer than a shingle, the single shingle "word word …": all are similar to
    all."""
    documents = next(artifact for artifact in store.artifacts() if artifact.kind == "documents" and artifact.manifest.stage != "select")
    assert 'action="/puna/near"' in client.get("/documents").text
    found = client.post("/near", data={"artifact": documents.id, "text": "word " * 20})
    assert found.status_code == 200
    assert "similar documents" in text(found)
    assert "1.000 1.000 1.000" in re.sub(r"\s+", " ", text(found))
    assert "<script>alert" not in found.text
    assert "No similar documents" in text(
        client.post("/near", data={"artifact": documents.id, "text": "quite other words than these are, all of them, and many more"})
    )
    refused = client.post("/near", data={"artifact": documents.id, "text": " "})
    assert refused.status_code == 404
    assert "no words" in text(refused)


def test_what_breaks_in_puna_is_a_page_that_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("no room on the shelf")

    monkeypatch.setattr(start, "start_run", broken)
    made = TestClient(application(store, prefect=None, auth=""), raise_server_exceptions=False).post("/start/curate", data={"recipe": "demo"})
    assert made.status_code == 500 and "RuntimeError: no room on the shelf" in text(made) and "Runs" in text(made)


def test_one_file_adds_a_page_and_one_a_command(client: TestClient, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    (tmp_path / "greeting.py").write_text(
        "from puna.flows.web.frame import Here, pages\n"
        "router = pages('greeting', 'Greeting', at=10)\n"
        "@router.get('/greeting')\n"
        "def greeting(site: Here) -> str:\n"
        "    return site.page('Good day', site.store.uri, here='greeting')\n"
    )
    monkeypatch.setattr(web, "__path__", [*web.__path__, str(tmp_path)])
    request.addfinalizer(frame.REGISTRY.pop)
    monkeypatch.setattr(sql.app, "registered_commands", list(sql.app.registered_commands))
    request.addfinalizer(lambda: sys.modules.pop("puna.flows.web.greeting"))
    client = TestClient(application(store, prefect=None, auth=""))
    assert "Good day" in (said := text(client.get("/greeting"))) and store.uri in said
    assert '<a href="/puna/greeting">Greeting</a></nav>' in client.get("/rounds").text

    @sql.app.command()
    def greet(name: str) -> None:
        print(f"good day, {name}")

    assert CliRunner().invoke(main.app, ["greet", "you"]).output == "good day, you\n"


class Desk:
    """A stub of an annotation desk with one pair, and nothing that could be saved."""

    def at(self, by: str, place: int | None) -> dict[str, object]:
        return {"by": by, "place": place}

    def judge(self, pair: str, **said: object) -> None:
        if pair != "known":
            raise PunaError(f"there is no pair {pair}")

    def save(self) -> Artifact:
        raise PunaError("nothing was judged yet")


def test_a_desk_of_the_site_shows_pairs_takes_judgements_and_says_what_is_wrong(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotate, "_desk", lambda store, name: Desk())
    client = TestClient(application(store, prefect=None, auth=""))
    page = client.get("/judge/abc")
    assert page.url.path == "/judge/abc/" and page.headers["content-security-policy"] == annotate.POLICY
    assert client.get("/judge/abc/pair?by=Ada&place=2").json() == {"by": "Ada", "place": 2}
    said = {"pair": "known", "by": "Ada", "better": "left", "level": "slightly better"}
    assert client.post("/judge/abc/judge", json=said).json() == {"ok": True}
    assert client.post("/judge/abc/judge", json={**said, "pair": "other"}).json() == {"error": "there is no pair other"}
    nameless = client.post("/judge/abc/judge", json={**said, "by": ""})
    assert nameless.status_code == 422 and nameless.json()["error"].startswith("body.by: ")
    assert client.post("/judge/abc/save").json() == {"error": "nothing was judged yet"}


def chunk(data: bytes) -> bytes:
    """Return a chunk of an HTTP response."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@pytest.mark.parametrize("end, last", [
    (b"10\r\ndata: {", "IncompleteRead"), (b"5\r\nda", "IncompleteRead"), (chunk(b"data: {\n"), "property name"),
    (chunk(b'data: {"error": {"message": "the weights are damaged"}}\n'), "the weights are damaged"),
])  # fmt: skip
def test_an_answer_that_breaks_off_says_so_last(end: bytes, last: str) -> None:
    first = b'data: {"choices": [{"delta": {"content": "one "}}]}\n'
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
                connection.sendall(head + chunk(first) + end)

        thread = threading.Thread(target=answer)
        thread.start()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/", timeout=60) as response:
            pieces = list(chat._pieces(response))
        thread.join()
    assert len(pieces) == 2 and pieces[0] == "one " and pieces[1].startswith("\n[stopped answering: ") and last in pieces[1]


CHAT = """<!doctype html><body><button id="theme"></button><main id="content"><form id="chat">
<select name="model"><option value="m">m</option></select><div id="talk"></div><textarea name="text"></textarea>
<button class="main">Send</button><button type="button" id="new">New</button></form></main><pre id="log"></pre>
<script>
const sent = [];
let finish;
window.fetch = async (url, options) => {
  sent.push(JSON.parse(options.body).messages.map((one) => one.content));
  if (sent.length === 2) return new Response("<p class=alarm>refused</p>", {status: 404});
  return new Response(new ReadableStream({start(stream) {
    finish = () => { stream.enqueue(new TextEncoder().encode("answer")); stream.close(); };
    if (sent.length > 2) finish();
  }}));
};
</script><script src="SCRIPT"></script><script>
const wait = () => new Promise((go) => setTimeout(go, 100)), box = document.querySelector("textarea");
const say = async (words) => { box.value = words; document.querySelector("button.main").click(); await wait(); };
(async () => {
  await say("one");
  document.getElementById("new").click();
  finish();
  await wait();
  await say("two");
  const left = box.value;
  await say("three");
  await say("four");
  document.getElementById("log").textContent = JSON.stringify({sent, left});
})();
</script></body>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_new_chat_forgets_a_late_answer_and_a_refused_text_stays_in_the_box(tmp_path: Path) -> None:
    page = tmp_path / "chat.html"
    page.write_text(CHAT.replace("SCRIPT", (Path(web.__file__).parent / "web.js").resolve().as_uri()))
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run([*words, "--virtual-time-budget=10000", "--dump-dom", page.as_uri()], capture_output=True, text=True, check=True)
    (log,) = re.findall(r'<pre id="log">(.*)</pre>', shown.stdout)
    assert json.loads(unescape(log)) == {"sent": [["one"], ["two"], ["three"], ["three", "answer", "four"]], "left": "two"}
