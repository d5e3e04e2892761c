"""The HTTP server, over a socket: OpenAI's response formats, errors, streams, and clients that disconnect."""

import asyncio
import copy
import json
import threading
import time
from types import SimpleNamespace

import httpx
import jsonschema
import openai
import pytest
import uvicorn
from fastapi.testclient import TestClient

from puna.flows.cli.openai import Limits, application
from puna.flows.web import chat
from puna.models.config import ModelConfig
from puna.models.generation import Engine, SamplingParams
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.storage import PunaError

TOKENIZER = Tokenizer.train(["to be or not to be, that is the question"], 280)
SHAPE = ModelConfig(vocab_size=TOKENIZER.vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.3)


@pytest.fixture(scope="module")
def engine():
    return Engine(Transformer(SHAPE, seed=0), TOKENIZER, sequences=8)


@pytest.fixture(scope="module")
def url(engine):
    """Yield the address of a server on a free port."""
    app = application(engine, "tiny", Limits(queue=20, body=5000), key="secret")
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=60) as made:
        yield made


def expected(prompt, tokenizer=TOKENIZER, **params):
    """Return the answer of a separate engine."""
    model = Transformer(SHAPE, seed=0)
    stop = (*tokenizer.stop_ids, *params.pop("stop", ()))
    (row,) = Engine(model, tokenizer).generate([prompt], SamplingParams(stop=stop, **params))
    return row


def shown(tokens):
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def streamed(lines):
    """Return the chunks of a stream, after checking its end marker."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def test_a_window_lets_answers_leave_the_context():
    """An answer may have 512 tokens although the context has 256; the default length is the answer's maximum."""
    from starlette.testclient import TestClient

    model = Transformer(SHAPE, seed=0)
    engine, prompt = Engine(model, TOKENIZER, sinks=16, window=64), list(range(3, 80)) * 4
    with TestClient(application(engine, "tiny", Limits(body=50_000))) as client:
        made = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 512, "temperature": 0}).json()
        whole = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "to be " * 200}], "temperature": 0}).json()
    stop = tuple(TOKENIZER.stop_ids)
    ((answer,),) = Engine(model, TOKENIZER, sinks=16, window=64).generate([prompt], SamplingParams(temperature=0, max_tokens=512, stop=stop))
    assert made["choices"][0]["text"] == shown(answer.tokens) and made["usage"]["completion_tokens"] == len(answer.tokens)
    assert whole["usage"]["prompt_tokens"] > 256 and 0 < whole["usage"]["completion_tokens"] <= 1024


def test_chat(client):
    messages = [{"role": "user", "content": "to be?"}]
    made = client.post("/v1/chat/completions", json={"messages": messages, "seed": 3, "max_tokens": 12, "n": 2, "logprobs": True}).json()
    row = expected(TOKENIZER.chat(messages), seed=3, max_tokens=12, n=2)
    assert [c["message"] for c in made["choices"]] == [{"role": "assistant", "content": shown(a.tokens)} for a in row]
    assert [c["finish_reason"] for c in made["choices"]] == ["stop" if a.finished else "length" for a in row]
    scores = [[one["logprob"] for one in c["logprobs"]["content"]] for c in made["choices"]]
    assert scores == [pytest.approx(a.logprobs, abs=1e-5) for a in row]
    size, total = len(TOKENIZER.chat(messages)), sum(len(a.tokens) for a in row)
    assert made["usage"] == {"prompt_tokens": size, "completion_tokens": total, "total_tokens": size + total}
    assert made["object"] == "chat.completion" and made["model"] == "tiny"


def test_the_chat_page_answers_with_what_fits_into_a_short_context(url, monkeypatch):
    model = SimpleNamespace(kind="model", key="k", id="tiny")
    monkeypatch.setattr(chat.Chat, "_load", lambda *_: chat.Talker("k", url, "secret", None))
    talk = chat.Chat(SimpleNamespace(resolve=lambda name: model, check=lambda artifact: artifact))
    said = "".join(talk.say("tiny", [{"role": "user", "content": "to be?"}]))
    assert said and "stopped answering" not in said
    with pytest.raises(PunaError, match="exceed the model's context of 256"):
        talk.say("tiny", [{"role": "user", "content": "to be? " * 300}])


def test_a_stream_brings_the_same_text_and_nothing_of_a_stop_text(client):
    (plain,) = expected(TOKENIZER.encode("to be"), seed=1, max_tokens=40)
    text = shown(plain.tokens)
    stop = text[len(text) // 2 :][:2]
    body = {"prompt": TOKENIZER.encode("to be"), "seed": 1, "max_tokens": 40, "stop": stop}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        chunks = streamed(reply.iter_lines())
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"] == text[: text.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"


def test_a_stream_is_one_line_an_event_for_clients_that_split_at_any_line_break():
    """U+0085 and U+2028 end lines for httpx and many others, though not in the standard."""
    tokenizer = Tokenizer.train(["to be\u2028 or\u0085 not"] * 3, 290)
    ids = tokenizer.encode("\u2028x\u0085")
    model = Transformer(SHAPE.replace(vocab_size=tokenizer.vocab_size), seed=0)
    body = {"prompt": [5], "max_tokens": 40, "seed": 1, "temperature": 10, "stream": True, "logit_bias": {str(token): 600 for token in ids}}
    with TestClient(application(Engine(model, tokenizer), "tiny")) as other, other.stream("POST", "/v1/completions", json=body) as reply:
        text = "".join(chunk["choices"][0]["text"] for chunk in streamed(reply.iter_lines()))
    assert {*text} == {"\u2028", "x", "\u0085"}


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": None}, 400, "messages"),
        ({"temperature": -1}, 400, "temperature"),
        ({"n": "many"}, 400, "n: "),
        ({"model": "gpt"}, 404, "there is no model 'gpt'"),
        ({"max_tokens": 9999}, 400, "exceed the model's context of 256"),
        ({"stop": [""]}, 400, "must not be empty"),
        ({"logit_bias": {"99999": 1}}, 400, "token ids lie in"),
        ({"best_of": 3}, 400, "best_of"),
        ({"messages": [{"role": "user", "content": "x" * 6000}]}, 413, "at most 5000 bytes"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogates not allowed"),
        ({"logit_bias": {"5": float("nan")}}, 400, "must be finite numbers"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "does not support tools"),
    ],
)
def test_what_is_wrong_is_told_in_openais_shape(client, change, status, said):
    for stream in (False, True):
        body = json.dumps({"messages": [{"role": "user", "content": "a"}], "stream": stream, **change})
        reply = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
        error = reply.json()["error"]
        assert reply.status_code == status and said in error["message"]
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("GET", "/v1/nothing", b"", 404, "GET /v1/nothing: Not Found"),
        ("GET", "/v1/models/gpt", b"", 404, "no model 'gpt'"),
        ("GET", "/v1/completions", b"", 405, "Method Not Allowed"),
        ("POST", "/v1/completions", b"{no JSON", 400, "body: JSON decode error"),
        ("POST", "/v1/completions", b"[" * 4000, 400, "There was an error parsing the body"),
        ("POST", "/v1/completions", b"null", 400, "body: Field required"),
    ],
)
def test_whatever_is_sent_is_answered_in_openais_shape(client, method, path, body, status, said):
    reply = client.request(method, path, content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert reply.status_code == status and said in error["message"] and error["type"] == "invalid_request_error" and error["param"] != "1"
    assert set(error) == {"message", "type", "param", "code"} and reply.headers.get("allow") == ("POST" if status == 405 else None)


def test_what_breaks_the_server_is_told_in_openais_shape():
    model = Transformer(SHAPE, seed=0)
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.encode = lambda text: {}[text]
    with TestClient(application(Engine(model, tokenizer), "tiny"), raise_server_exceptions=False) as broken:
        reply = broken.post("/v1/completions", json={"prompt": "to be"})
    assert reply.status_code == 500 and reply.json()["error"] == {"message": "the server failed: KeyError", "type": "server_error", "param": None, "code": None}


def test_null_is_as_good_as_nothing(client):
    """A null field means the same as a missing field, because some clients send all fields."""
    body = {"messages": [{"role": "user", "content": "to be?"}], "seed": 3, "max_tokens": 6}
    fields = ("temperature", "top_p", "n", "stream", "stop", "logit_bias", "logprobs", "tools", "presence_penalty", "response_format", "user", "model")
    made = [client.post("/v1/chat/completions", json=one).json()["choices"] for one in (body, body | dict.fromkeys(fields))]
    assert made[0] == made[1]


def test_log_probs_are_told_where_no_others_are_asked_for(client):
    """logprobs 0 in OpenAI's API returns log-probs only of the drawn tokens; false returns none."""
    body = {"prompt": TOKENIZER.encode("to be"), "seed": 1, "max_tokens": 4}
    found = [client.post("/v1/completions", json={**body, "logprobs": asked}).json()["choices"][0]["logprobs"] for asked in (0, True, False, None)]
    assert found[0] == found[1] and len(found[0]["token_logprobs"]) == len(found[0]["tokens"]) > 0 and found[2:] == [None, None]


def test_a_whole_answer_that_nobody_waits_for_any_more_is_cancelled(url, engine, monkeypatch):
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.02) or step())

    def count(what):
        return int(next(line.split()[1] for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(f"puna_{what}")))

    before, eos = count("cancelled"), TOKENIZER.stop_ids
    body = {"prompt": TOKENIZER.encode("to be"), "max_tokens": 240, "seed": 1, "logit_bias": {str(token): -100 for token in eos}}
    with httpx.Client(timeout=0.4) as leaving, pytest.raises(httpx.ReadTimeout):
        leaving.post(f"{url}/v1/completions", json=body, headers={"Authorization": "Bearer secret"})
    until = time.monotonic() + 60
    while not (count("active") == 0 and engine.scheduler.idle) and time.monotonic() < until:
        time.sleep(0.05)
    assert count("cancelled") == before + 1


def test_keys_and_what_needs_none(client, url):
    assert httpx.get(f"{url}/v1/models", headers={"Authorization": "secret"}).status_code == 401
    assert httpx.get(f"{url}/v1/models", headers={"Authorization": "bearer secret"}).status_code == 200
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer wrong"}).json()["error"]["type"] == "authentication_error"
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert "puna_pages " in httpx.get(f"{url}/metrics").text


def test_clients_that_go_away_leave_nothing_and_others_get_theirs(url, engine):
    """16 clients stream, and every second one disconnects after three lines: nothing of them remains, and the others get their answers."""
    prompts = [TOKENIZER.encode(f"{i} to be or not to be")[:20] for i in range(16)]

    async def one(client, number):
        body = {"prompt": prompts[number], "seed": number, "max_tokens": 40, "stream": True, "temperature": 0}
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if number % 2:
                lines = reply.aiter_lines()
                await anext(lines), await anext(lines), await anext(lines)
                return None
            return streamed([line async for line in reply.aiter_lines()])

    async def all_of_them():
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=60) as client:
            return await asyncio.gather(*(one(client, number) for number in range(16)))

    found = asyncio.run(all_of_them())
    answers = Engine(engine.model, TOKENIZER).generate(prompts[::2], SamplingParams(max_tokens=40, temperature=0))
    for number, (answer,) in zip(range(0, 16, 2), answers, strict=True):
        assert "".join(chunk["choices"][0]["text"] for chunk in found[number]) == shown(answer.tokens)
    until = time.monotonic() + 30
    while not engine.scheduler.idle and time.monotonic() < until:
        time.sleep(0.01)
    pool = engine.scheduler.pool
    assert engine.scheduler.idle and pool.available == len(pool.references)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 3, "maximum": 99}, "kind": {"enum": ["x", "yy"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def openai_client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def test_openais_client_chats_and_streams(openai_client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "to "}, {"type": "text", "text": "be?"}]}]
    (answer,) = expected(TOKENIZER.chat([{"role": "user", "content": "to be?"}]), seed=2, max_tokens=12)
    asked = {"model": "tiny", "messages": messages, "seed": 2, "max_completion_tokens": 12, "logprobs": True}
    whole = openai_client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == shown(answer.tokens)
    assert [one.token for one in whole.choices[0].logprobs.content] == [TOKENIZER.decode([token]) for token in answer.tokens]
    assert whole.usage.completion_tokens == len(answer.tokens)
    chunks = list(openai_client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == shown(answer.tokens)
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    (plain,) = expected(TOKENIZER.encode("to be"), seed=2, max_tokens=5)
    made = openai_client.completions.create(model="tiny", prompt=TOKENIZER.encode("to be"), seed=2, max_tokens=5, logprobs=1)
    assert made.choices[0].text == shown(plain.tokens)
    assert made.choices[0].logprobs.token_logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    assert [model.id for model in openai_client.models.list()] == ["tiny"] and openai_client.models.retrieve("tiny").id == "tiny"


def test_openais_client_gets_json_of_a_schema(openai_client):
    messages = [{"role": "user", "content": "who?"}]
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    made = openai_client.chat.completions.create(model="tiny", messages=messages, n=6, seed=1, max_tokens=90, response_format=form)
    for choice in made.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), PERSON)
    assert len({choice.message.content for choice in made.choices}) > 1


def test_openais_client_raises_what_it_is_told(openai_client, url):
    messages = [{"role": "user", "content": "who?"}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys"):
        openai_client.chat.completions.create(model="tiny", messages=messages, response_format=form)
    with pytest.raises(openai.BadRequestError, match="json_schema is required with"):
        openai_client.chat.completions.create(model="tiny", messages=messages, response_format={"type": "json_schema"})
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        openai_client.chat.completions.create(model="gpt", messages=messages)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


# --- tools ---

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "look")]
TELLING = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot_id|>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"


def scripted(*texts):
    """A client of a server whose answer number i is `texts[i]`, token by token; its chat template mentions tools."""
    tokenizer = TOKENIZER.with_template(TELLING)
    scripts = [[*tokenizer.encode(text), tokenizer.stop_ids[0]] for text in texts]
    engine = Engine(Transformer(SHAPE.replace(max_position_embeddings=1024), seed=0), tokenizer)
    take = engine._take

    def write(answer, drawn, errors):
        return take(answer, iter([(scripts[answer.number][len(answer.logprobs)], *next(drawn)[1:])]), errors)

    engine._take = write
    return TestClient(application(engine, "tiny"))


def called(calls):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


ANSWERS = [
    ('Sure. <tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>\n<tool_call>{"name": "look", "arguments": {}}</tool_call>', "Sure. ", [("add", {"a": [1, "é"]}), ("look", {})]),
    ('{"name": "add", "parameters": {"a": 2}}', "", [("add", {"a": 2})]),
    (' {"name": "sub", "parameters": {"a": 2}}', None, []),
    ('<tool_call>{"name": "add", "arguments": "a"}</tool_call>', None, []),
    ("<tool_call>{name: add}</tool_call>", None, []),
    ("3 < 4, not a <tool_cal", None, []),
]


@pytest.mark.parametrize(("text", "content", "calls"), ANSWERS)
def test_calls_of_tools_are_told_in_openais_shape(text, content, calls):
    """Text that is not a call of one of the request's tools stays text."""
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "max_tokens": 200, "n": 2}
    with scripted(text, "Hello") as client:
        choice, other = client.post("/v1/chat/completions", json=body).json()["choices"]
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True, "tool_choice": "auto"}) as reply:
            chunks = [chunk["choices"][0] for chunk in streamed(reply.iter_lines())]
        (plain,) = client.post("/v1/chat/completions", json={**body, "n": 1, "tool_choice": "none"}).json()["choices"]
    assert other["message"] == {"role": "assistant", "content": "Hello"} and other["finish_reason"] == "stop"
    assert plain["message"] == {"role": "assistant", "content": text}
    message, own = choice["message"], [chunk for chunk in chunks if chunk["index"] == 0]
    written = "".join(chunk["delta"]["content"] for chunk in own)
    assert "".join(chunk["delta"]["content"] for chunk in chunks if chunk["index"] == 1) == "Hello"
    assert choice["finish_reason"] == own[-1]["finish_reason"] == ("tool_calls" if calls else "stop")
    if not calls:
        assert message == {"role": "assistant", "content": text} and written == text and not any("tool_calls" in chunk["delta"] for chunk in own)
        return
    assert (message["content"] or "") == written == content and (message["content"] is None) == (not content)
    assert called(message["tool_calls"]) == called(own[-1]["delta"]["tool_calls"]) == calls
    assert [call["index"] for call in own[-1]["delta"]["tool_calls"]] == [*range(len(calls))]
    assert len({call["id"] for call in message["tool_calls"]}) == len(calls) and {call["type"] for call in message["tool_calls"]} == {"function"}


def test_a_call_that_is_cut_off_stays_text():
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}'
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
    with scripted(text) as client:
        for change in ({"max_tokens": len(TOKENIZER.encode(text))}, {"max_tokens": 200, "stop": "arguments"}):
            (choice,) = client.post("/v1/chat/completions", json=body | change).json()["choices"]
            assert choice["message"] == {"role": "assistant", "content": text.partition(change.get("stop", "\0"))[0]}
        reply = client.post("/v1/chat/completions", json=body | {"tools": [{"type": "function"}]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools"
