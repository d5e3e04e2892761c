"""People's judgements of pairs become preferences; their agreement is checked by its definition; the page that asks for judgements."""

from __future__ import annotations

import itertools
import json
import random
import signal
import socket
from pathlib import Path

import pyarrow as pa
import pytest
import uvicorn
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.flows.web.annotate import Desk, desk_application
from puna.stages.align.judgements import LEVELS, JudgementsConfig, agreement, judgements, pairs_to_judge
from puna.stages.contract import External, execute
from puna.stages.conversations import asking, message_of, messages_of
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema


def answered(store: Store, prompts: int = 4) -> tuple[Artifact, Artifact]:
    """Return three answers to each prompt: one is unfinished, and two are equal to another one."""
    asked = [
        {"id": f"p{n}", "task": "t", "split": "train", "messages": asking(f"question {n}"), "tools": None, "reference": None, "verifier": None}
        for n in range(prompts)
    ]
    rows = [
        {"id": f"p{n}a{i}", "prompt_id": f"p{n}", "sample": i, "model": "m", "text": text, "tokens": [1], "logprobs": [0.0],
         "finished": text != "cut", "score": None, "gold": None, "detail": None}
        for n in range(prompts) for i, text in enumerate(("good", "bad", " good ", "cut"))
    ]  # fmt: skip
    return tuple(
        store.import_table(kind, pa.Table.from_pylist(some, schema=table_schema(kind).schema))
        for kind, some in (("answers", rows), ("prompts", asked))
    )  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(5))
def test_agreement_is_krippendorffs_alpha_by_its_definition(seed: int) -> None:
    """1 - observed over expected disagreement, by enumerating all pairs of values."""
    draw = random.Random(seed)
    judged = [[draw.choice(("first", "second")) for _ in range(draw.choice((1, 2, 3, 4)))] for _ in range(12)]
    judged += [["first", "second"], ["first", "first"]]
    several = [sides for sides in judged if len(sides) > 1]
    values = [side for sides in several for side in sides]
    observed = sum(sum(a != b for a, b in itertools.permutations(sides, 2)) / (len(sides) - 1) for sides in several) / len(values)
    expected = sum(a != b for a, b in itertools.permutations(values, 2)) / (len(values) * (len(values) - 1))
    couples = [a == b for sides in several for a, b in itertools.combinations(sides, 2)]
    assert agreement(judged) == pytest.approx((sum(couples) / len(couples), 1 - observed / expected))
    assert agreement([["first"], []]) == (None, None) and agreement([["first", "first"]]) == (1.0, None)


@pytest.mark.parametrize("finished", [(), ("good",), ("good", " good ")])
def test_a_prompt_without_two_answers_that_differ_gives_no_pair(finished: tuple[str, ...]) -> None:
    answers = [{"id": str(n), "model": "m", "sample": n, "text": text, "finished": text in finished} for n, text in enumerate((*finished, "cut"))]
    assert pairs_to_judge({"p": answers}, JudgementsConfig()) == {}


def test_several_peoples_judgements_become_preferences(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    answers, prompts = answered(store)
    desk = Desk(store, answers, prompts)
    assert len(desk.order) == 4
    side = {pair: "first" if first["text"].strip() == "good" else "second" for pair, (first, _) in desk.pairs.items()}
    other = {"first": "second", "second": "first"}
    one, two, three, four = desk.order
    lines = [
        {"pair": one, "by": "Ada", "better": other[side[one]], "level": "better"},
        {"pair": one, "by": "Ada", "better": side[one], "level": "significantly_better", "edited": "very good"},
        {"pair": one, "by": "Bo", "better": side[one], "level": "slightly_better", "prompt": "question, asked well"},
        {"pair": two, "by": "Ada", "better": "first", "level": "better"},
        {"pair": two, "by": "Bo", "better": "second", "level": "better"},
        {"pair": three, "by": "Ada"},
        {"pair": four, "by": "Bo", "better": other[side[four]], "level": "marginally_better"},
    ]
    file = tmp_path / "said.jsonl"

    def made(rows: list[dict[str, str]]) -> Artifact:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {"answers": answers, "prompts": prompts, "judged": External.resolve(str(file))}
        return execute(judgements, JudgementsConfig(), given, store)

    found = made(lines)
    rows = {row["id"]: row for row in found.read().to_pylist()}
    assert set(rows) == {one, four} and {row["rule"] for row in found.read("dropped").to_pylist()} == {"no_majority", "skipped"}
    first = rows[one]
    # Ada's last judgement counts: 4 and 2 average to 3, "better".
    assert first["level"] == "better" and [message_of(first, c)["content"] for c in ("edited", "chosen", "rejected")] == ["very good", "good", "bad"]  # type: ignore[index]
    assert messages_of(first)[0]["content"] == "question, asked well"
    assert rows[four]["level"] == LEVELS[-1] and message_of(rows[four], "chosen") == {"role": "assistant", "content": "bad"}
    assert found.manifest.metrics["judges"] == 2 and found.manifest.metrics["agreement"] == 0.5
    with pytest.raises(PunaError, match=r"said.jsonl, line 2: answers/.* has no pair nowhere"):
        made([lines[0], {"pair": "nowhere", "by": "Ada"}])
    with pytest.raises(PunaError, match=r"said.jsonl, line 1: not a valid judgement \(.*\s+level"):
        made([{**lines[0], "level": "best"}])


def test_the_page_shows_both_sides_by_chance_and_keeps_what_is_said(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    answers, prompts = answered(store, prompts=12)
    client = TestClient(desk_application(Desk(store, answers, prompts)))
    assert "save and continue" in client.get("/").text
    sides = set()
    for _ in range(12):
        shown = client.get("/pair", params={"by": "Ada"}).json()
        assert {shown["left"], shown["right"]} == {"good", "bad"}
        side = "left" if shown["left"] == "good" else "right"
        sides.add(side)
        said = {"pair": shown["pair"], "by": "Ada", "better": side, "level": "better"}
        assert client.post("/judge", json=said).json() == {"ok": True}
        # Shown again, the pair has the same sides and the earlier judgement.
        again = client.get("/pair", params={"by": "Ada", "place": shown["place"]}).json()
        assert (again["left"], again["before"]["better"]) == (shown["left"], side)
    assert sides == {"left", "right"} and "pair" not in client.get("/pair", params={"by": "Ada"}).json()
    bo = {client.get("/pair", params={"by": "Bo", "place": n}).json()["left"] for n in range(12)}
    assert bo == {"good", "bad"}
    wrong = client.post("/judge", json={"pair": shown["pair"], "by": "Ada", "better": "left", "level": "best"})
    assert wrong.status_code == 400 and "significantly_better" in wrong.json()["error"]
    assert client.post("/judge", json={"pair": "none", "by": "Ada"}).status_code == 400
    # A reloaded page continues where it was, and the saved preferences all choose the good answers.
    later = TestClient(desk_application(Desk(store, answers, prompts)))
    saved = later.post("/save").json()
    assert saved["rows"] == 12 and saved["id"] == store.alias("judged@latest").id
    assert {message_of(row, "chosen")["content"] for row in store.alias("judged@latest").read().to_pylist()} == {"good"}  # type: ignore[index]


def test_names_that_judged_nothing_take_no_memory(tmp_path: Path) -> None:
    """Each name that was requested used to be kept forever."""
    store = Store.open(tmp_path / "store")
    desk = Desk(store, *answered(store))
    client = TestClient(desk_application(desk))
    for n in range(50):
        assert client.get("/pair", params={"by": f"stranger {n}"}).json()["judged"] == 0
    assert not desk._said


def test_no_acknowledged_judgement_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unicode line breaks in an edit, a disk that was full for a while, and a line truncated by a crash."""
    store = Store.open(tmp_path / "store")
    answers, prompts = answered(store, prompts=3)
    desk = Desk(store, answers, prompts)
    one, two, three = desk.order
    breaks = "two\u2028lines\x85of text"
    desk.judge(one, "Ada", "left", "better", breaks, None)
    with monkeypatch.context() as full, pytest.raises(PunaError, match="not saved .*full.*; judge the pair again"):
        full.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
        desk.judge(two, "Ada", "left", "better", None, None)
    assert desk.at("Ada", None)["pair"] == two
    desk.judge(three, "Bo", "right", "better", None, None)
    with desk.file.open("ab") as file:
        file.write(b'{"pair": "' + two.encode())
    again = Desk(store, answers, prompts)
    assert again.at("Ada", 0)["before"]["edited"] == breaks and again.at("Bo", 2)["judged"] == 1
    again.judge(two, "Ada", "right", "better", None, None)
    assert again.save().manifest.metrics["judges"] == 2 and again.save().rows() == 3


def test_ctrl_c_ends_the_page_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path / "store")
    answers, prompts = answered(store)
    desk = Desk(store, answers, prompts)
    desk.judge(desk.order[0], "Ada", "left", "better", None, None)
    monkeypatch.setattr("puna.flows.web.annotate.prompts_of", lambda store, answers: prompts)
    started = uvicorn.Server.startup

    async def interrupted(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        await started(server, sockets)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(uvicorn.Server, "startup", interrupted)
    ended = CliRunner().invoke(app, ["annotate", answers.id, "--port", "0", "--store", store.uri], catch_exceptions=False)
    assert ended.exit_code == 0 and f"1 preferences: {store.alias('judged@latest').id} is judged@latest" in ended.output
