"""A request cannot end or delay other requests' answers."""

import asyncio
import os
import random
import resource
import sys
import threading
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from puna.flows.cli import openai
from puna.flows.cli.openai import Limits, application
from puna.models.config import ModelConfig
from puna.models.generation import Engine, SamplingParams
from puna.models.generation.draft import DraftedEngine
from puna.models.generation.grammar import Grammar
from puna.models.generation.sampling import RowError
from puna.models.generation.schedule import Answer, Request
from puna.models.tokens.tokenizer import TextStream, Tokenizer
from puna.models.transformer import Transformer

sys.path.insert(0, str(Path(__file__).parent))
import cases_models


def test_hostile_requests_end_nobody_elses_answers():
    assert cases_models.answers_ended() == 0


def test_a_failed_request_says_why_and_leaves_the_others_at_work():
    engine = Engine(cases_models._model(), exact=True)
    (expected,) = engine.generate([[5, 6]], SamplingParams(max_tokens=6, stop=(), seed=1))
    with pytest.raises(RowError, match=r"^prompt 1: the model's logits are not finite"):
        engine.generate([[5, 6], [82]], SamplingParams(max_tokens=6, stop=(), seed=1))
    assert engine.scheduler.idle
    with pytest.raises(RowError, match=r"^the mask allows no token after \[\]$"):
        list(engine.stream([5], SamplingParams(mask=cases_models.HOSTILE[2]["mask"], stop=())))
    with pytest.raises(ValueError, match="names a token that the model does not have: token ids lie in 0 to 82"):
        engine.submit([5, 83], SamplingParams(stop=()))
    assert engine.generate([[5, 6]], SamplingParams(max_tokens=6, stop=(), seed=1)) == [expected] and not engine.take_failures()


def test_a_coldness_that_floats_cannot_tell_is_greedy():
    engine = Engine(Transformer(cases_models.SHAPE, seed=0))
    greedy = engine.generate([[1, 2]], SamplingParams(temperature=0, stop=()))
    assert engine.generate([[1, 2]], SamplingParams(temperature=1e-9, top_k=4, stop=())) == greedy
    (row,) = engine.generate([[1, 2]], SamplingParams(temperature=1e-4, stop=()))
    assert row[0].tokens == greedy[0][0].tokens and max(map(abs, row[0].logprobs)) < 0.1


def test_a_draft_that_diverges_fails_its_requests_alone():
    model = Transformer(cases_models.SHAPE, seed=0)
    engine = DraftedEngine(model, cases_models._model())
    params = SamplingParams(max_tokens=12, stop=(), speculate=2, temperature=0)
    good = engine.submit([5, 6], params)
    bad = engine.submit([5, 82], params)
    tokens = []
    while not engine.scheduler.idle:
        tokens += [event.token for event in engine.step() if event.request is good]
    assert [request for request, _ in engine.take_failures()] == [bad]
    assert tokens == Engine(model).generate([[5, 6]], SamplingParams(max_tokens=12, stop=(), temperature=0))[0][0].tokens


def test_the_server_tells_one_client_and_answers_the_next():
    tokenizer = Tokenizer.train(["to be or not to be"], 270)
    shape = ModelConfig(**{**cases_models.SHAPE.model_dump(), "vocab_size": tokenizer.vocab_size})
    engine = Engine(Transformer(shape, seed=0), tokenizer)
    with TestClient(application(engine, "tiny")) as client:
        ask = lambda **more: client.post("/v1/completions", json={"prompt": "to be", "max_tokens": 4, **more})  # noqa: E731
        assert ask(temperature=1e-9).json()["choices"] == ask(temperature=0).json()["choices"]
        answer = ask(logit_bias={"3": 1e308})
        assert answer.status_code == 400 and "leave no finite logit" in answer.json()["error"]["message"]
        assert ask().status_code == 200


def test_a_request_cannot_hold_up_others_by_what_it_lists():
    """60,000 stop texts used to be searched at each token, for a minute; biases of all tokens were added in a Python loop."""
    tokenizer = Tokenizer.train(["to be or not to be"], 270)
    shape = ModelConfig(**{**cases_models.SHAPE.model_dump(), "vocab_size": tokenizer.vocab_size})
    engine = Engine(Transformer(shape, seed=0), tokenizer)
    with TestClient(application(engine, "tiny")) as client:
        ask = lambda stops: client.post("/v1/completions", json={"prompt": "to be", "stop": [f"x{n}" for n in range(stops)]})  # noqa: E731
        assert ask(64).status_code == 200 and ask(65).status_code == 400
        assert ask(65).json()["error"]["message"] == "stop: 65 texts; a request may have 64"
    biases = dict.fromkeys(range(270), -9.0) | {17: 1e4}
    (row,) = engine.generate([[1, 2]], SamplingParams(max_tokens=3, stop=(), logit_bias=biases))
    assert row[0].tokens == [17, 17, 17]


def test_a_large_reply_is_written_beside_the_event_loop(monkeypatch):
    """Encoding a million log-probs as JSON used to take seconds, in which no other client was answered."""
    tokenizer = Tokenizer.train(["to be or not to be"], 270)
    shape = ModelConfig(**{**cases_models.SHAPE.model_dump(), "vocab_size": tokenizer.vocab_size})
    engine = Engine(Transformer(shape, seed=0), tokenizer)

    def whole(replies):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return {"replies": len(replies)}

    monkeypatch.setattr(openai, "whole", whole)
    with TestClient(application(engine, "tiny")) as client:
        assert client.post("/v1/completions", json={"prompt": "to be", "max_tokens": 2}).json() == {"replies": 1}


@pytest.mark.parametrize("way", ["encode", "encode_markup"])
def test_other_threads_run_while_a_long_text_is_encoded(way):
    """A prompt of 900,000 characters used to block all clients of a server."""
    tokenizer, done, turns = Tokenizer.train(["to be or not to be"], 270), threading.Event(), 0
    thread = threading.Thread(target=lambda: (getattr(tokenizer, way)("a" * 1_000_000), done.set()))
    thread.start()
    while not done.wait(0.002):
        turns += 1
    thread.join()
    assert turns > 10


def test_a_body_that_is_nested_too_deeply_is_refused():
    tokenizer = Tokenizer.train(["to be or not to be"], 270)
    shape = ModelConfig(**{**cases_models.SHAPE.model_dump(), "vocab_size": tokenizer.vocab_size})
    with TestClient(application(Engine(Transformer(shape), tokenizer), "tiny"), raise_server_exceptions=False) as client:
        for more in ('"x": %s', '"tool_calls": %s'):
            body = '{"messages": [{"role": "user", "content": "hi", %s}]}' % (more % ("[" * 900 + "]" * 900))
            answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text


class Counting:
    """A tokenizer that counts the tokens that it decodes; each token is a letter."""

    def __init__(self):
        self.decoded = 0

    def decode(self, ids, skip_special_tokens):
        self.decoded += len(ids)
        return "".join("abc"[i] for i in ids)


def test_a_stream_decodes_each_token_a_few_times():
    """Each step used to decode the whole answer: half a million tokens for an answer of a thousand."""
    counting = Counting()
    stream = TextStream(counting, ("cab",))
    text = "".join(stream.add(n % 2) for n in range(1000))
    assert text == "ab" * 500 and counting.decoded <= 3000
    assert [stream.add(2), stream.add(0), stream.add(2, last=True)] == ["", "", "cac"]


@pytest.mark.parametrize("stops", [("ab" * 700 + "c",), ("\ufffdc", "cab", *("ab" * n + "c" for n in range(500, 530)))])
def test_the_engine_decodes_each_token_a_few_times(stops):
    """Each step used to decode as many tokens as the longest stop text has bytes, once per stop text."""
    counting, model = Counting(), Transformer(cases_models.SHAPE, seed=0)
    engine = Engine(model, counting)
    request = Request([1], SamplingParams(stop=stops), frozenset(), stops, ())
    answer = Answer(request, 0, [1])
    for n in range(1500):
        answer.tokens.append(n % 2)
        assert not engine._stops(answer)
    assert counting.decoded <= 4500 + 2 * len(request.prompt)
    answer.tokens.append(2)
    assert engine._stops(answer)


def test_stop_texts_are_found_as_in_the_whole_text():
    """Tokens are single bytes, including invalid UTF-8; the stop texts lie within words, characters and special tokens."""
    tokenizer = Tokenizer.train(["to be or not to be"], 262)
    engine = Engine(Transformer(ModelConfig(**{**cases_models.SHAPE.model_dump(), "vocab_size": 270})), tokenizer)
    rng = random.Random(0)
    letters = [*tokenizer.encode("ab é字 to be"), *tokenizer.stop_ids]
    for _ in range(300):
        stops = tuple("".join(rng.choices("ab é字\ufffd", k=rng.randint(1, 3))) for _ in range(2))
        answer = Answer(Request([1], SamplingParams(stop=stops), frozenset(), stops, ()), 0, [1])
        for _ in range(60):
            answer.tokens.append(rng.choice(letters))
            text = tokenizer.decode(answer.own, skip_special_tokens=True)
            assert engine._stops(answer) == any(stop in text for stop in stops), (text, stops)
            if any(stop in text for stop in stops):
                break


def test_a_stream_of_broken_bytes_is_decoded_in_linear_time():
    """With a repeated token that is half a character, each step used to decode all of them."""
    class Broken(Counting):
        def decode(self, ids, skip_special_tokens):
            self.decoded += len(ids)
            return "\ufffd" * len(ids)

    broken = Broken()
    stream = TextStream(broken)
    text = "".join(stream.add(0, last=n == 1999) for n in range(2000))
    assert text == "\ufffd" * 2000 and broken.decoded <= 2000 * 150


COSTLY = {
    "multipleOf": {"type": "integer", "multipleOf": 50000017},
    "allOf": {"allOf": [{"type": "string", "pattern": f"a{{{n}}}|b"} for n in range(200, 260)]},
    "nested": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 50000017}}, "required": ["a"]}},
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_schema_that_is_costly_to_compile_is_refused(name):
    """A schema of 40 bytes used to take minutes and gigabytes; several at once stopped all requests."""
    tokenizer = Tokenizer.train(["to be or not to be"], 270)
    shape = ModelConfig(**{**cases_models.SHAPE.model_dump(), "vocab_size": tokenizer.vocab_size})
    with TestClient(application(Engine(Transformer(shape, seed=0), tokenizer), "tiny")) as client:
        ask = lambda schema: client.post("/v1/completions", json={"prompt": "to be", "max_tokens": 2, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}})  # noqa: E731
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        answer = ask(COSTLY[name])
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"
        assert "the JSON schema " in answer.json()["error"]["message"]
        assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 1
        assert ask({"type": "integer", "multipleOf": 7}).status_code == 200


def test_requests_go_on_while_schemas_wait(monkeypatch):
    """Schemas used to be compiled in the threads that every request needs."""
    begun, end, statuses = threading.Event(), threading.Event(), []
    monkeypatch.setattr(Grammar, "schema", lambda self, schema: begun.set() or (end.wait(60) and None))
    tokenizer = Tokenizer.train(["to be or not to be"], 270)
    shape = ModelConfig(**{**cases_models.SHAPE.model_dump(), "vocab_size": tokenizer.vocab_size})
    with TestClient(application(Engine(Transformer(shape, seed=0), tokenizer), "tiny", Limits(seconds=20))) as client:
        ask = lambda **more: statuses.append(client.post("/v1/completions", json={"prompt": "to be", "max_tokens": 2, **more}).status_code)  # noqa: E731
        threads = [threading.Thread(target=ask, kwargs={"response_format": {"type": "json_object"}}) for _ in range((os.cpu_count() or 1) + 6)]
        for thread in threads:
            thread.start()
        assert begun.wait(60)
        plain = threading.Thread(target=ask)
        plain.start()
        plain.join(10)
        alone = list(statuses)
        end.set()
        for thread in [*threads, plain]:
            thread.join()
    assert alone == [200]
