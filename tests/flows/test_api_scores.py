"""Log-probs of prompts over HTTP: the response fields that evaluation harnesses read, compared with transformers on the exported model."""

import json

import pytest
import tokenizers
import torch
from fastapi.testclient import TestClient

from puna.flows.cli import openai as server
from puna.flows.cli.model import _print_answers
from puna.flows.cli.openai import Limits, application
from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import save
from puna.models.generation import Completion, Engine, SamplingParams
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.tokens.vocabulary import Vocabulary
from puna.models.transformer import Transformer

TOKENIZER = Tokenizer.train(["to be or not to be, that is the question"], 280)
SHAPE = ModelConfig(vocab_size=TOKENIZER.vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=96, initializer_range=0.3)


def encode(text):
    return TOKENIZER.encode(text)


def build():
    return Transformer(SHAPE, seed=0)


@pytest.fixture(scope="module")
def client():
    """Yield a client of a server whose passes take 24 tokens, so that long prompts and lists of prompts need several passes."""
    with TestClient(application(Engine(build(), TOKENIZER, sequences=8, step_tokens=24), "tiny", Limits(queue=20, body=9000))) as client:
        yield client


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """Return a function that gives transformers' log-probs [T, V] after each token of a sequence."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("export")
    save(build(), folder, TOKENIZER)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logprobs(ids):
        with torch.no_grad():
            return network(torch.tensor([ids])).logits[0].log_softmax(-1)

    return logprobs


def ask(client, **body):
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_scores_equal_transformers(client, peer):
    """Options of shared questions, an option given twice, a prompt within another one, a single token, a prompt of several passes."""
    question, long = encode("to be or not to be, that"), [5 + i % 250 for i in range(90)]
    prompts = [[*question, *encode(" is")], [*question, *encode(" the question")], [*question, *encode(" is")], question, [7], long, [*long[:80], 9]]
    made = ask(client, model="tiny", prompt=prompts, temperature=0, max_tokens=1, logprobs=3, seed=1234, echo=True)
    assert [choice["index"] for choice in made["choices"]] == list(range(len(prompts)))
    for prompt, choice in zip(prompts, made["choices"], strict=True):
        scores, expected = choice["logprobs"], peer(prompt)
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
        own = [expected[i - 1, prompt[i]].item() for i in range(1, len(prompt))] + [expected[-1].max().item()]
        assert scores["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
        for i, top in enumerate(scores["top_logprobs"][1:]):
            assert max(top.values()) == pytest.approx(expected[i].max().item(), abs=1e-4) and 1 <= len(top) <= 4
            assert scores["token_logprobs"][i + 1] in top.values() or "\ufffd" in top
    assert made["usage"] == {"prompt_tokens": (size := sum(map(len, prompts))), "completion_tokens": len(prompts), "total_tokens": size + len(prompts)}


def test_a_harness_reads_sums_and_greediness(client, peer):
    """lm-eval reads an answer's sum over [context, -1), and calls it greedy if each token's score is the largest of the alternatives."""
    context = encode("to be or")
    greedy = Engine(build(), TOKENIZER).generate([context], SamplingParams(temperature=0, max_tokens=3, stop=()))[0][0].tokens
    for option, is_greedy in ((greedy, True), (encode(" not"), False)):
        (choice,) = ask(client, prompt=[[*context, *option]], temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)["choices"]
        scores = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        expected = peer([*context, *option])[len(context) - 1 : -1]
        assert sum(scores) == pytest.approx(expected.gather(1, torch.tensor(option)[:, None]).sum().item(), abs=1e-4)
        assert all(score == max(top.values()) for score, top in zip(scores, tops, strict=True)) == is_greedy


def test_scoring_alone_draws_nothing(client, peer):
    made = ask(client, prompt="to be", max_tokens=0, echo=True, logprobs=0)
    (choice,) = made["choices"]
    ids = [TOKENIZER.bos, *encode("to be")]
    assert choice["text"] == "to be" and choice["finish_reason"] == "length" and made["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["tokens"] == [TOKENIZER.decode([token]) for token in ids] and choice["logprobs"]["top_logprobs"] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx([peer(ids)[i - 1, ids[i]].item() for i in range(1, len(ids))], abs=1e-4)


def test_alternatives_of_drawn_tokens_are_at_the_temperature_of_the_draw(client, peer):
    ids = encode("to be")
    (choice,) = ask(client, prompt=ids, max_tokens=4, seed=1, temperature=0.5, logprobs=2, logit_bias={str(TOKENIZER.eos): -100})["choices"]
    (answer,) = Engine(build(), TOKENIZER).generate([ids], SamplingParams(temperature=0.5, seed=1, max_tokens=4, logit_bias={TOKENIZER.eos: -100}))[0]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(answer.logprobs, abs=1e-4)
    expected = (2 * peer([*ids, *answer.tokens])[len(ids) - 1 : -1]).log_softmax(-1)
    assert [max(top.values()) for top in choice["logprobs"]["top_logprobs"]] == pytest.approx(expected.max(1).values.tolist(), abs=1e-4)


def test_prompts_of_a_list_answer_as_alone_and_echo_comes_first(client):
    prompts = ["to be", "or not", "to be"]
    together = ask(client, prompt=prompts, n=2, seed=3, max_tokens=5, echo=True)["choices"]
    assert [choice["index"] for choice in together] == list(range(6))
    for number, prompt in enumerate(prompts):
        alone = [choice["text"] for choice in ask(client, prompt=prompt, n=2, seed=3, max_tokens=5)["choices"]]
        assert [choice["text"] for choice in together[2 * number :][:2]] == [prompt + text for text in alone]


@pytest.mark.parametrize("prompt", [encode("to be é, not"), "to be é, not"])
def test_offsets_point_into_the_text(client, prompt):
    """A text is read after a begin token, which has no offset in the text."""
    (choice,) = ask(client, prompt=prompt, max_tokens=0, echo=True, logprobs=0)["choices"]
    scores = choice["logprobs"]
    assert choice["text"] == "to be é, not" and scores["text_offset"][0] == 0
    for token, begin in zip(scores["tokens"], scores["text_offset"], strict=True):
        part = "\ufffd" in token and choice["text"][begin] == "é"
        assert part or token == TOKENIZER.decode([TOKENIZER.bos]) or choice["text"][begin:].startswith(token)


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "0 generates nothing"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": -1}, "logprobs", "greater than or equal to 0"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[1], []]}, "prompt", "at least 1"),
        ({"prompt": [[1], [2, "a"]]}, "prompt", "prompt.1"),
        ({"prompt": [[True]]}, "prompt", "prompt.0"),
        ({"prompt": [[1], [99999]]}, "prompt", "token ids lie in"),
        ({"prompt": [[1]] * 21}, "prompt", "a request may have at most 20 answers"),
        ({"prompt": [[1]] * 11, "n": 2}, "prompt", "a request may have at most 20 answers"),
        ({"prompt": [[1] * 60] * 2}, "prompt", "120 tokens in total"),
        ({"prompt": [1] * 97, "echo": True, "max_tokens": 0}, "max_tokens", "exceed the model's context of 96"),
        ({"prompt": [[1], [2]], "stream": True}, "prompt", "leave stream out"),
        ({"echo": True, "stream": True}, "echo", "leave stream out"),
        ({"logprobs": 1, "stream": True}, "logprobs", "leave stream out"),
        ({"echo": "always"}, "echo", "valid boolean"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_its_field(client, change, field, message, monkeypatch):
    monkeypatch.setattr(server, "PROMPT_TOKENS", 100)
    reply = client.post("/v1/completions", content=json.dumps({"prompt": [1, 2], **change}), headers={"Content-Type": "application/json"})
    assert reply.status_code == 400 and message in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"].split(".")[0] == field


def test_a_prompt_that_breaks_its_scores_fails_its_request_alone():
    """The embedding of token 9 is not finite: requests with it fail, requests beside and after them do not."""
    model = build()
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = float("nan")
    with TestClient(application(Engine(model, TOKENIZER, sequences=8), "tiny")) as client:
        good, bad = ({"prompt": [[5, 6], [token, 7]], "max_tokens": 0, "echo": True, "logprobs": 1} for token in (8, 9))
        for _ in range(2):
            reply = client.post("/v1/completions", json=bad)
            assert reply.status_code == 500 and "not finite" in reply.json()["error"]["message"]
            assert len(ask(client, **good)["choices"]) == 2


def test_chat_tells_the_likeliest_tokens_as_openai_defines_them(client, peer):
    """`content` has token, logprob, bytes and top_logprobs of each token; the bytes join to the message; a special token has no bytes."""
    messages = [{"role": "user", "content": "to be?"}]
    ids = TOKENIZER.chat(messages)
    body = {"messages": messages, "seed": 3, "max_tokens": 6, "temperature": 0, "logprobs": True}
    reply = client.post("/v1/chat/completions", json={**body, "top_logprobs": 3}).json()
    (choice,) = reply["choices"]
    assert set(choice["logprobs"]) == {"content", "refusal"} and choice["logprobs"]["refusal"] is None
    for number, place in enumerate(content := choice["logprobs"]["content"]):
        assert set(place) == {"token", "logprob", "bytes", "top_logprobs"} and len(place["top_logprobs"]) == 3
        values, tokens = peer(ids)[-1].topk(3)
        assert [one["logprob"] for one in place["top_logprobs"]] == pytest.approx(values.tolist(), abs=1e-4)
        assert [one["token"] for one in place["top_logprobs"]] == [TOKENIZER.decode([token]) for token in tokens.tolist()]
        assert place["logprob"] == pytest.approx(values[0].item(), abs=1e-4), number  # temperature 0 takes the likeliest token
        assert {name: place[name] for name in ("token", "bytes")} == {name: place["top_logprobs"][0][name] for name in ("token", "bytes")}
        ids = [*ids, tokens[0].item()]
    assert len(content) == reply["usage"]["completion_tokens"]
    written = bytes(byte for place in content for byte in place["bytes"] or ())
    assert written.decode(errors="replace") == choice["message"]["content"]
    alone = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert [place["top_logprobs"] for place in alone] == [[]] * len(content) and [p["bytes"] for p in alone] == [p["bytes"] for p in content]


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", "greater than or equal to 0"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs: needs logprobs: true"),
        ({"top_logprobs": 2, "logprobs": True, "stream": True}, "top_logprobs", "without alternatives: leave stream out"),
    ],
)
def test_alternatives_of_a_chat_are_refused_by_their_field(client, change, field, message):
    reply = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "to be?"}], **change})
    assert reply.status_code == 400 and message in reply.json()["error"]["message"] and reply.json()["error"]["param"] == field


@pytest.fixture(scope="module")
def pieces():
    """A tokenizer like SentencePiece's, whose decoder drops the blank before a text's first word; and a client of a model with it."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁to", "▁be", "▁x", "to", "be", *"tobex,"]
    merges = [("t", "o"), ("b", "e"), ("▁", "to"), ("▁", "be"), ("▁", "x")]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: id_ for id_, token in enumerate(dict.fromkeys(tokens))}, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    backend.decoder = tokenizers.decoders.Sequence(steps)
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer = Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})
    model = Transformer(SHAPE.replace(vocab_size=tokenizer.vocab_size), seed=0)
    with TestClient(application(Engine(model, tokenizer), "tiny")) as client:
        yield tokenizer, client


def test_a_completion_goes_on_where_its_prompt_ends(pieces):
    """The blanks at the boundary are kept in the text, the tokens, their alternatives and offsets."""
    tokenizer, client = pieces
    bias = {str(tokenizer.id_of(token)): 600 for token in ("▁be", "▁x", "x")}
    some = [{"prompt": "to be é to", "max_tokens": 12, "seed": seed, "temperature": 10, "logit_bias": bias} for seed in range(9)]
    body, text = next((body, text) for body in some if (text := ask(client, **body)["choices"][0]["text"]).startswith((" b", " x")) and "xx" in text and " be" in text and " x" in text)
    (whole,) = ask(client, **body, echo=True, logprobs=20)["choices"]
    scores = whole["logprobs"]
    assert whole["text"] == body["prompt"] + text and {" be", " x", "x"} <= {*scores["tokens"]} <= {"<s>", " to", " be", " ", "\ufffd", "x", " x"}
    for token, begin, top in [*zip(scores["tokens"], scores["text_offset"], scores["top_logprobs"], strict=True)][2:]:
        assert whole["text"][begin:].startswith("é" if token == "\ufffd" else token) and token in top
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    stopped = ask(client, **body, stop=text[:2])
    assert stopped["choices"][0]["text"] == "" and stopped["choices"][0]["finish_reason"] == "stop" and stopped["usage"]["completion_tokens"] == 1


def test_raw_answers_are_printed_as_they_go_on(pieces, capsys):
    tokenizer, _ = pieces
    prompt, answer = tokenizer.encode("to be"), Completion([tokenizer.id_of("▁x"), tokenizer.eos], [0.0, 0.0], True)
    for raw in (True, False):
        _print_answers(tokenizer, [("to be", prompt, [(answer, {})])], False, False, raw)
    assert capsys.readouterr().out == " x\nx\n"


def test_the_bytes_of_tokens_are_those_of_their_text():
    """Byte-level tokens may hold parts of characters; SentencePiece tokens keep their leading space, and its byte tokens are one byte."""
    text = "to be é 日"
    ids = TOKENIZER.encode(text)
    assert b"".join(TOKENIZER.token_bytes(token) for token in ids) == text.encode() and "\ufffd" in [TOKENIZER.decode([token]) for token in ids]
    assert all(TOKENIZER.token_bytes(token) is None for token in TOKENIZER.special)
    pieces = {"<unk>": 0, "▁": 1, "▁a": 2, "a": 3, "b": 4, "▁b": 5, "<0xC3>": 6, "<0xA9>": 7}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    backend.decoder = tokenizers.decoders.Sequence(steps)
    vocabulary = Vocabulary(backend)
    assert [vocabulary.token_bytes(token) for token in (5, 4, 6, 7)] == [b" b", b"b", b"\xc3", b"\xa9"]
