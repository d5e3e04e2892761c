"""Models behind OpenAI's API: a server in another process that fails, rate-limits, refuses and counts; and `puna api` itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from puna.models import progress
from puna.stages.align.reinforcement import GrpoConfig, grpo
from puna.stages.align.sample import SampleConfig, sample
from puna.stages.align.synthesize import SynthesizeConfig, synthesize
from puna.stages.contract import External, execute, parse
from puna.stages.conversations import asking, content_of, messages_of
from puna.stages.curate.judge import JudgeConfig, judge
from puna.stages.endpoint import Endpoint, EndpointConfig, grade_of
from puna.stages.evaluation.benchmark import BenchmarkConfig, benchmark
from puna.stages.io.import_model import ImportModelConfig, import_model
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema
from tests.stages.evaluation.conftest import saved

KEY = "sk-a-secret-of-the-test"
SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
log, seen = Path(sys.argv[1]), {}
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def send(self, status, value, **headers):
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": len(data), **headers}.items():
            self.send_header(name.replace("_", "-"), str(text))
        self.end_headers()
        self.wfile.write(data)
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/v1/chat/completions":
            return self.send(404, {"error": "no such path"})
        asked = json.loads(body)
        text = asked["messages"][-1]["content"]
        with log.open("a") as file:
            file.write(json.dumps([self.headers.get("Authorization"), asked]) + "\\n")
        seen[body] = seen.get(body, 0) + 1
        if Path(str(log) + ".down").exists() and "#3" in text:
            return self.send(401, {"error": "the key " + str(self.headers.get("Authorization")) + " is wrong"})
        if "#busy" in text and seen[body] < 3:
            return self.send(429, {"error": "later"}, Retry_After=0) if seen[body] == 1 else self.send(503, {})
        if "#slow" in text and seen[body] == 1:
            time.sleep(0.8)
        if Path(str(log) + ".hangs").exists() and "#hang" in text:
            time.sleep(3600)
        if "#moved" in text:
            return self.send(302, {}, Location="http://127.0.0.1:9/v1/chat/completions")
        if "#refused" in text:
            return self.send(400, {"error": {"message": "too long for me"}})
        words = {"#1": "1", "#3": "<think>is it 2?</think> 3 points", "#none": "I cannot say", "#cut": "4"}
        answer = next((value for word, value in words.items() if word in text), "Yes, " + text[-20:])
        reason = "length" if "#cut" in text else "stop"
        self.send(200, {"choices": [{"message": {"role": "assistant", "content": answer}, "finish_reason": reason}]})
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


class Remote:
    """The server: its address, and the requests that it received."""

    def __init__(self, url: str, log: Path) -> None:
        self.url, self.log, self.down, self.hangs = url, log, Path(f"{log}.down"), Path(f"{log}.hangs")

    def asked(self) -> list[tuple[str | None, dict[str, Any]]]:
        return [tuple(json.loads(line)) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def endpoint(self, **fields: Any) -> dict[str, Any]:
        return {"base_url": self.url, "model": "big", "key": "TEST_KEY", "pause": 0.01, "retries": 3, **fields}


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    monkeypatch.setenv("TEST_KEY", KEY)
    log = tmp_path / "log.jsonl"
    process = subprocess.Popen([sys.executable, "-S", "-c", SERVER, str(log)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield Remote(f"http://127.0.0.1:{int(process.stdout.readline())}/v1", log)
    process.kill()
    process.wait()
    process.stdout.close()


def prompts_of(store: Store, *texts: str, verifier: dict[str, Any] | None = None, split: str = "train") -> Artifact:
    told = None if verifier is None else json.dumps(verifier)
    rows = [{"id": text, "task": "t", "split": split, "messages": asking(text), "tools": None, "reference": None, "verifier": told} for text in texts]
    return store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))


def sampled(store: Store, prompts: Artifact, *endpoints: dict[str, Any], **values: Any) -> Artifact:
    config = parse(SampleConfig, {"endpoints": list(endpoints), "answers": 2, **values}, "sample")
    return execute(sample, config, {"prompts": prompts}, store)


def test_answers_come_through_failures_and_are_asked_for_once(tmp_path: Path, remote: Remote) -> None:
    store = Store.open(tmp_path / "store")
    prompts = prompts_of(store, "say #1", "#busy", "#slow #1", "#refused", "#cut")
    made = sampled(store, prompts, remote.endpoint(seconds=0.4, at_once=2), temperature=0.5)
    rows = {(row["prompt_id"], row["sample"]): row for row in made.read().to_pylist()}
    assert set(rows) == {(name, i) for name in ("say #1", "#busy", "#slow #1", "#cut") for i in range(2)}
    assert rows["say #1", 0]["text"] == "1" and rows["#busy", 1]["text"] == "Yes, #busy" and rows["#cut", 0]["finished"] is False
    assert {row["model"] for row in rows.values()} == {f"big at {remote.url.removeprefix('http://').removesuffix('/v1')}"}
    (dropped,) = made.read("dropped").to_pylist()
    assert (dropped["id"], dropped["rule"]) == ("#refused", "refused") and "too long for me" in dropped["detail"]
    asked = remote.asked()
    assert {key for key, _ in asked} == {f"Bearer {KEY}"}
    assert len(asked) == 2 + 2 * 3 + 2 * 2 + 2 + 2  # busy: two failures each; slow: one time-out each
    assert len({body["seed"] for _, body in asked if body["messages"][-1]["content"] == "say #1"}) == 2
    kept = made.read("exchanges").to_pylist()
    assert len(kept) == 10 and {json.loads(row["request"])["temperature"] for row in kept} == {0.5}
    assert sampled(store, prompts, remote.endpoint(seconds=9, at_once=1), temperature=0.5).key == made.key and len(remote.asked()) == len(asked)
    assert not any(KEY.encode() in file.read_bytes() for file in (tmp_path / "store").rglob("*") if file.is_file())


def test_endpoints_whose_answers_would_have_one_name_are_refused(tmp_path: Path, remote: Remote) -> None:
    store = Store.open(tmp_path / "store")
    with pytest.raises(PunaError, match="two endpoints have names with the same letters and digits"):
        sampled(store, prompts_of(store, "say #1"), remote.endpoint(model="big-1.5"), remote.endpoint(model="big-1-5"))


def test_a_run_that_failed_asks_only_for_the_rest_and_hides_the_key(tmp_path: Path, remote: Remote) -> None:
    store = Store.open(tmp_path / "store")
    prompts = prompts_of(store, "a #1", "b #1", "c #1", "d #3")
    remote.down.touch()
    with pytest.raises(PunaError, match="gives no answer.*status 401.*the key Bearer … is wrong"):
        sampled(store, prompts, remote.endpoint(at_once=1))
    before = [body["messages"][-1]["content"] for _, body in remote.asked()]
    assert set(before[:6]) == {"a #1", "b #1", "c #1"} and set(before[6:]) == {"d #3"}
    remote.down.unlink()
    assert sampled(store, prompts, remote.endpoint(at_once=1)).rows() == 8
    assert [body["messages"][-1]["content"] for _, body in remote.asked()][len(before) :] == ["d #3"] * 2


def test_no_redirect_is_followed_and_no_run_begins_without_its_key(tmp_path: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path / "store")
    with pytest.raises(PunaError, match="gives no answer.*status 302"):
        sampled(store, prompts_of(store, "#moved"), remote.endpoint())
    for wrong in ("sk-not-a-name", "lower_case"):
        with pytest.raises(PunaError, match="key"):
            parse(SampleConfig, {"endpoints": [remote.endpoint(key=wrong)]}, "sample")
    monkeypatch.delenv("TEST_KEY")
    with pytest.raises(PunaError, match="the environment variable TEST_KEY is not set"):
        sampled(store, prompts_of(store, "say #1"), remote.endpoint())


@pytest.mark.parametrize(("reply", "grade"), [("4", 4.0), ("Grade: 3.5.", 3.5), ("grade-2", 2.0), ("-1", None), ("7", None), ("none", None)])
def test_the_grade_in_a_reply(reply: str, grade: float | None) -> None:
    assert grade_of(reply, 5) == grade


def test_a_judge_elsewhere_grades_answers(tmp_path: Path, remote: Remote) -> None:
    store = Store.open(tmp_path / "store")
    prompts = prompts_of(store, "say #1", "say #3", "#none", verifier={"name": "judge", "rubric": "right?", "max_grade": 5})
    made = sampled(store, prompts, remote.endpoint(), answers=1, scoring={"endpoint": remote.endpoint(model="judge")})
    gold = {row["prompt_id"]: row["gold"] for row in made.read().to_pylist()}
    assert gold == {"say #1": 0.2, "say #3": 0.6, "#none": None} and made.manifest.metrics["unscored_answers"] == 1
    assert made.manifest.metrics["checker_calls"] == 3
    assert sorted(json.loads(row["request"])["model"] for row in made.read("exchanges").to_pylist()) == ["big"] * 3 + ["judge"] * 3


def test_a_policy_is_rewarded_by_a_judge_elsewhere(tmp_path: Path, remote: Remote) -> None:
    """Grades are rewards; an answer that the judge refuses or does not grade has none, and is counted. A resumed run requests only the
    rest."""
    store = Store.open(tmp_path / "store")
    asked = prompts_of(store, "say #1", "say #3", "#refused", "#none", verifier={"name": "judge", "rubric": "right?", "max_grade": 5})
    (files,) = External.resolve(f"model={saved(tmp_path / 'model')}")
    given = {"policy": execute(import_model, ImportModelConfig(), {"model": files}, store), "prompts": asked}
    settings = {"rollouts": 2, "prompts": 4, "answers": 2, "epochs": 1, "max_tokens": 3, "kl_coefficient": 0, "unfinished_penalty": 0}

    def config(**endpoint: Any) -> GrpoConfig:
        return parse(GrpoConfig, {**settings, "scoring": {"endpoint": remote.endpoint(model="judge", at_once=2, **endpoint)}}, "grpo")

    remote.down.touch()
    with pytest.raises(PunaError, match="judge gives no answer.*status 401"):
        execute(grpo, config(), given, store)
    remote.down.unlink()
    graded = {request["messages"][-1]["content"] for _, request in remote.asked() if "#3" not in request["messages"][-1]["content"]}
    made = execute(grpo, config(), given, store)
    assert made.read("training_log")["score"].to_pylist() == pytest.approx([(0.2 + 0.6) / 4] * 2)
    assert made.manifest.metrics["unscored_answers"] == 2 * 2 * 2 and "too long for me" in made.manifest.metrics["unscored_example"]
    requests = [json.dumps(request) for _, request in remote.asked()]
    exchanges = made.read("exchanges").num_rows
    assert made.manifest.metrics["exchanges"] == exchanges <= made.manifest.metrics["checker_calls"] == 16
    answered = [one for one in requests if "#3" not in one]
    assert len(answered) == len(set(answered)) and graded <= {json.loads(one)["messages"][-1]["content"] for one in answered}


def test_training_ends_at_a_rollout_that_a_judge_does_not_grade(tmp_path: Path, remote: Remote) -> None:
    store = Store.open(tmp_path / "store")
    asked = prompts_of(store, "#none", "#refused", verifier={"name": "judge", "rubric": "right?", "max_grade": 5})
    (files,) = External.resolve(f"model={saved(tmp_path / 'model')}")
    given = {"policy": execute(import_model, ImportModelConfig(), {"model": files}, store), "prompts": asked}
    settings = {"rollouts": 2, "prompts": 2, "answers": 2, "max_tokens": 3, "scoring": {"endpoint": remote.endpoint()}}
    with pytest.raises(PunaError, match=r"grpo: none of the 4 answers of rollout 1 could be scored; check the verifiers and their judge"):
        execute(grpo, parse(GrpoConfig, settings, "grpo"), given, store)


def test_a_signal_ends_training_whose_judge_hangs_after_saving_its_state(tmp_path: Path, remote: Remote) -> None:
    store = Store.open(tmp_path / "store")
    asked = prompts_of(store, "say #1", "#hang", verifier={"name": "judge", "rubric": "right?", "max_grade": 5})
    (files,) = External.resolve(f"model={saved(tmp_path / 'model')}")
    given = {"policy": execute(import_model, ImportModelConfig(), {"model": files}, store), "prompts": asked}
    endpoint = remote.endpoint(model="judge", seconds=1, retries=1)
    settings = {"rollouts": 2, "prompts": 1, "answers": 2, "minibatches": 1, "max_tokens": 3, "scoring": {"endpoint": endpoint}}
    config = parse(GrpoConfig, settings, "grpo")

    def texts() -> list[str]:
        return [request["messages"][-1]["content"] for _, request in remote.asked()]

    def interrupt() -> None:
        while not any("#hang" in text for text in texts()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    remote.hangs.touch()
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        execute(grpo, config, given, store)
    thread.join()
    assert "#1" in texts()[0] and list((tmp_path / "store" / "work").glob("*/scratch/*/step-*"))
    remote.hangs.unlink()
    made = execute(grpo, config, given, store)
    answered = [text for text in texts() if "#1" in text]
    assert len(made.read("training_log")) == 2 and len(answered) == len(set(answered))


def test_an_interrupted_client_sends_no_further_request(tmp_path: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.hangs.touch()
    config = parse(EndpointConfig, remote.endpoint(seconds=1, at_once=1), "endpoint")
    client = Endpoint(config, SimpleNamespace(scratch=tmp_path, progress=lambda *_: None))  # type: ignore[arg-type]

    def leave() -> None:
        if remote.asked():
            raise KeyboardInterrupt

    monkeypatch.setattr(progress, "leave", leave)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        client.ask([{"messages": [{"role": "user", "content": f"#hang {i}"}]} for i in range(3)])
    started = set(threading.enumerate()) - before
    assert started and all(thread.daemon for thread in started)
    for thread in started:
        thread.join()
    assert len(remote.asked()) == 1


def test_answers_to_benchmarks_are_graded_elsewhere(tmp_path: Path, remote: Remote) -> None:
    store = Store.open(tmp_path / "store")
    asked = prompts_of(store, "say #1", "#none", split="heldout", verifier={"name": "judge", "rubric": "right?", "max_grade": 5})
    (files,) = External.resolve(f"model={saved(tmp_path / 'model')}")
    model = execute(import_model, ImportModelConfig(), {"model": files}, store)
    config = parse(BenchmarkConfig, {"max_tokens": 2, "scoring": {"endpoint": remote.endpoint(model="judge")}}, "benchmark")
    made = execute(benchmark, config, {"model": model, "prompts": [asked]}, store)
    assert made.manifest.metrics["exchanges"] == 2 == len(remote.asked()) and made.manifest.metrics["unscored_answers_t"] == 1
    assert {json.loads(row["request"])["model"] for row in made.read("exchanges").to_pylist()} == {"judge"}


def test_pages_are_graded_elsewhere(tmp_path: Path, remote: Remote) -> None:
    store = Store.open(tmp_path / "store")
    texts = {"a": "a page, #1", "b": "b page, #3", "c": "c page, #none", "d": "d page, #cut off"}
    columns = {"url": "", "fetched_at": datetime(2026, 1, 1, tzinfo=UTC), "source": "web", "title": None}
    rows = [{"id": name, "text": text, **columns} for name, text in texts.items()]
    documents = store.import_table("documents", pa.Table.from_pylist(rows, schema=table_schema("documents").schema))
    config = parse(JudgeConfig, {"endpoint": remote.endpoint(), "prompt": "Grade it: {text}"}, "judge")
    made = execute(judge, config, {"documents": documents}, store)
    assert dict(zip(*made.read().select(["id", "judgement"]).to_pydict().values(), strict=True)) == {"a": 1.0, "b": 3.0, "c": None, "d": None}
    assert made.manifest.metrics["answer_probability"] == 0.5 and made.manifest.metrics["mean_grade"] == 2.0


def test_problems_are_answered_elsewhere_and_tried_again(tmp_path: Path, remote: Remote) -> None:
    store = Store.open(tmp_path / "store")
    prompts = prompts_of(store, "say #1", "#refused", verifier={"name": "exact", "answer": "1"})
    config = parse(SynthesizeConfig, {"endpoint": remote.endpoint(), "answers": 2, "retries": 1}, "synthesize")
    made = execute(synthesize, config, {"prompts": prompts}, store)
    (row,) = made.read().to_pylist()
    assert [content_of(turn) for turn in messages_of(row)] == ["say #1", "1"]
    assert [(row["id"], row["rule"]) for row in made.read("dropped").to_pylist()] == [("#refused", "refused")]


def test_punas_own_server_answers(tmp_path: Path) -> None:
    """Greedy answers over HTTP equal those of the engine."""
    import uvicorn

    from puna.flows.cli.openai import application
    from puna.models.config import ModelConfig
    from puna.models.generation import Engine, SamplingParams
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

    tokenizer = Tokenizer.train(["to be or not to be, that is the question"], 280)
    shape = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.3)
    model = Transformer(shape, seed=0)
    server = uvicorn.Server(uvicorn.Config(application(Engine(model, tokenizer), "big"), host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    store, url = Store.open(tmp_path), f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    made = sampled(store, prompts_of(store, "to be?"), {"base_url": url, "model": "big"}, temperature=0, max_tokens=12, answers=1)
    server.should_exit = True
    thread.join()
    params = SamplingParams(temperature=0, max_tokens=12, stop=tokenizer.stop_ids)
    ((answer,),) = Engine(model, tokenizer).generate([tokenizer.chat([{"role": "user", "content": "to be?"}])], params)
    assert made.read()["text"].to_pylist() == [tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()]
