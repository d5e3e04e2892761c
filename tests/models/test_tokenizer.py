"""The tokenizer: text survives encoding and decoding, ids equal transformers', and equal words give equal files."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.models.tokens.tokenizer import SMALLEST_VOCABULARY, SPECIAL_TOKENS, Tokenizer

EOT = 4
TEXTS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs.",
    "Él niño comió una manzana; où est la bibliothèque?",
    "def f(x):\n    return {'a': x + 1}\n\n\nprint(f(41))",
    "量子 コンピュータ 🙂🙂 — tabs\tand  spaces \r\n end",
    "Reverse the word: apple. What is 3 + 4 + 5?",
] * 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 400)


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_round_trip(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not tokenizer.special & set(ids)
    assert tokenizer.encode_batch([text, ""]) == [ids, []]


@pytest.mark.parametrize("text", [*SPECIAL_TOKENS, f"a{''.join(SPECIAL_TOKENS)}b", " <|eot_id|>\n"])
def test_text_never_becomes_a_special_token(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert not tokenizer.special & set(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.chat([{"role": "user", "content": text}], add_generation_prompt=False).count(EOT) == 1


def test_special_tokens_have_the_first_ids(tokenizer: Tokenizer):
    ids = [0, 1, 2, 3, 4, 5]
    assert tokenizer.special == set(ids)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (0, 1, 5)
    assert tokenizer.stop_ids == (1, EOT)
    assert tokenizer.decode(ids) == "".join(SPECIAL_TOKENS)
    assert tokenizer.decode([tokenizer.bos, *tokenizer.encode("hi")], skip_special_tokens=True) == "hi"


def test_digits_stand_alone():
    # Digits that occur together most often still never merge; only ASCII digits are tested as ids.
    trained = Tokenizer.train(["2024 2024 2024 1999"] * 50, 300)
    pieces = [trained.decode([i]) for i in trained.encode("in 2024, 19.99")]
    assert [p for p in pieces if any(c.isdigit() for c in p)] == list("20241999")


@given(st.text(alphabet="0123456789٣५② ab\n'.", max_size=20))
@settings(max_examples=100, deadline=None)
def test_no_token_holds_a_digit_and_anything_else(tokenizer: Tokenizer, text: str):
    for id_ in tokenizer.encode(text):
        piece = tokenizer.decode([id_])
        if any(unicodedata.category(c).startswith("N") for c in piece):
            assert len(piece) == 1


def test_bytes_that_are_no_text_decode(tokenizer: Tokenizer):
    lone = Tokenizer.train(["x"], SMALLEST_VOCABULARY).encode("é")[:1]
    assert tokenizer.decode(lone) == "\ufffd"


def test_vocabulary_size(tokenizer: Tokenizer):
    assert tokenizer.vocab_size == 400
    assert Tokenizer.train([], SMALLEST_VOCABULARY).vocab_size == SMALLEST_VOCABULARY == 262
    with pytest.raises(ValueError, match="262"):
        Tokenizer.train([], 261)


def test_training_does_not_depend_on_order_or_threads(tokenizer: Tokenizer, tmp_path: Path):
    rng = random.Random(0)
    # Many words of equal counts, so that ties decide merges.
    texts = ["".join(rng.choice("abcdefgh") for _ in range(5)) for _ in range(3000)]
    Tokenizer.train(texts, 1200).save(tmp_path / "a")
    expected = (tmp_path / "a" / "tokenizer.json").read_bytes()
    rng.shuffle(texts)
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    program = (
        "import json, sys; from puna.models.tokens.tokenizer import Tokenizer; "
        "Tokenizer.train(json.load(open(sys.argv[1])), 1200).save(sys.argv[2])"
    )
    for threads in ("1", "7"):
        environment = {
            **os.environ,
            "RAYON_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "true",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        target = tmp_path / threads
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "texts.json"), str(target)],
            check=True,
            env=environment,
        )
        assert (target / "tokenizer.json").read_bytes() == expected


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert [again.encode(t) for t in TEXTS] == [tokenizer.encode(t) for t in TEXTS]
    again.save(tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path / "nowhere")


def by_hand(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Return the ids of Llama 3's dialogue format, token by token."""
    ids = [0]
    for message in messages:
        header = [2, *tokenizer.encode(message["role"]), 3, *tokenizer.encode("\n\n")]
        ids += [*header, *tokenizer.encode(message["content"].strip()), EOT]
    return ids


CONTENT = st.lists(st.sampled_from([*SPECIAL_TOKENS, " ", "\n", "a", "'s", "12", "é", "\ufdd0", "<|", "|>"]) | st.text(max_size=3)).map("".join)


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), CONTENT), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_chat_by_hand(tokenizer: Tokenizer, turns: list[tuple[str, str]]):
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = by_hand(tokenizer, messages)
    assert tokenizer.chat(messages, add_generation_prompt=False) == expected
    header = [2, *tokenizer.encode("assistant"), 3, *tokenizer.encode("\n\n")]
    assert tokenizer.chat(messages) == [*expected, *header]


@given(CONTENT, CONTENT, st.booleans())
@settings(max_examples=200, deadline=None)
def test_render_pair(tokenizer: Tokenizer, asked: str, said: str, finished: bool):
    prompt, answer, mask = tokenizer.render_pair(asked, said, finished)
    assert prompt == tokenizer.chat([{"role": "user", "content": asked}])
    assert answer == tokenizer.encode(said.strip()) + [EOT] * finished
    assert mask == [False] * (len(answer) - finished) + [True] * finished


def test_transformers_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    twin = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(twin) == tokenizer.vocab_size
    assert (twin.bos_token_id, twin.eos_token_id, twin.pad_token_id) == (
        tokenizer.bos,
        tokenizer.eos,
        tokenizer.pad,
    )
    for text in [*TEXTS[:5], "  leading", "a <|eot_id|> b", "\r\n\n x", "e\u0301 \u00a0 1'S"]:
        ids = twin(text, split_special_tokens=True)["input_ids"]
        assert ids == [tokenizer.bos, *tokenizer.encode(text)]
        assert twin(text, split_special_tokens=True, add_special_tokens=False)[
            "input_ids"
        ] == tokenizer.encode(text)
        assert twin.decode(tokenizer.encode(text)) == text
    messages = [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "What is 3 + 4?\n\nThink."},
        {"role": "assistant", "content": "7"},
    ]
    for prompt in (False, True):
        ids = twin.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert ids == tokenizer.chat(messages, add_generation_prompt=prompt)
