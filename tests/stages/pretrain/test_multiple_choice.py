"""Questions from pages: valid options, independent of order; scored as option by option."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.evaluation import multiple_choice


def pages(n: int = 12) -> list[tuple[str, str, str]]:
    return [(f"{i:032x}", "code" if i % 3 else "news", " ".join(f"page{i}word{j}" for j in range(20 + i))) for i in range(n)]


def test_options_are_the_same_stretch_of_other_pages() -> None:
    items = multiple_choice.build(pages(), 100, 4, 6, 5, seed=1, fits=bool)
    assert len(items) == 12
    texts = {id_: text for id_, _, text in pages()}
    for item in items:
        assert len(item.options) == len(set(item.options)) == 4
        assert texts[item.id].startswith(item.prompt + item.options[item.answer])
        for option in item.options:
            (page,) = [id_ for id_, text in texts.items() if option in text]
            assert texts[page].split()[6:11] == option.split()
    # News has four pages: a question's three wrong options all come from its category.
    news = [item for item in items if item.category == "news"]
    assert len(news) == 4
    for item in news:
        for option in item.options:
            number = int(option.split()[0].removeprefix("page").split("word")[0])
            assert number % 3 == 0
    assert len({item.answer for item in items}) > 1


def test_order_of_pages_does_not_matter_and_short_pages_are_left_out() -> None:
    first = multiple_choice.build(pages(), 5, 3, 6, 5, seed=2, fits=bool)
    assert first == multiple_choice.build(pages()[::-1], 5, 3, 6, 5, seed=2, fits=bool)
    assert first != multiple_choice.build(pages(), 5, 3, 6, 5, seed=3, fits=bool)
    assert [len(multiple_choice.build(pages(), 100, 3, 20, n, seed=0, fits=bool)) for n in (6, 8, 9, 10, 12)] == [6, 4, 3, 0, 0]


@pytest.mark.parametrize("text", ["この川の古い橋を来週修理する", "市议会将于下周修理河上的旧桥", "ที่ดินของเขาอยู่ใกล้แม่น้ำ"])
def test_pages_in_scripts_without_spaces_give_questions(text: str) -> None:
    documents = [(f"{i:032x}", "page", "".join(random.Random(i).sample(text, len(text)))) for i in range(4)]
    items = multiple_choice.build(documents, 100, 3, 3, 2, seed=1, fits=bool)
    texts = {id_: text for id_, _, text in documents}
    assert len(items) == 4 and all(texts[item.id].startswith(item.prompt + item.options[item.answer]) for item in items)


def test_words_are_the_text_with_its_white_space() -> None:
    """White space at the end belongs to no word; a search for the next word would look at it once for each of its characters."""
    assert multiple_choice.words("a  b\nc" + " " * 1_000_000) == ["a", "  b", "\nc"] and multiple_choice.words("a b c", 2) == ["a", " b"]
    for seed in range(50):
        text = "".join(random.Random(seed).choices("ab \n\u3000é手机ที่ន។、", k=60)).rstrip()
        assert "".join(multiple_choice.words(text)) == text


def test_options_that_may_not_fit_the_context_are_left_out() -> None:
    """A long word, such as encoded data, makes an option of many tokens."""
    long = ("f" * 32, "news", " ".join(["word"] * 6 + ["x" * 300] + ["word"] * 20))
    items = multiple_choice.build([*pages(), long], 100, 4, 6, 5, seed=1, fits=lambda option: len(option) < 200)
    assert len(items) == 12 and all(len(option) < 200 for item in items for option in item.options)


def test_likelihoods_equal_each_option_alone(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train([text for _, _, text in pages()], 290)
    model = Transformer(
        ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3), seed=0
    )
    items = multiple_choice.build(pages(), 4, 3, 3, 2, seed=0, fits=bool)
    found = multiple_choice.likelihoods(model, tokenizer, items, 200)
    for item, values in zip(items, found, strict=True):
        prompt = [tokenizer.bos, *tokenizer.encode(item.prompt)]
        for option, value in zip(item.options, values, strict=True):
            ids = tokenizer.encode(option)
            assert tokenizer.encode(item.prompt + option) == prompt[1:] + ids
            row = prompt + ids
            logprobs = torch.log_softmax(model.logits(model.hidden(Forest.pack([row]))).double(), -1)
            alone = sum(float(logprobs[len(prompt) - 1 + i, t].detach()) for i, t in enumerate(ids))
            assert value == pytest.approx(alone, abs=1e-4)
    assert found == [pytest.approx(values, abs=1e-4) for values in multiple_choice.likelihoods(model, tokenizer, items, 10_000)]


def test_normalized_choice_divides_by_bytes() -> None:
    item = multiple_choice.Item("a", "c", "p", ("four", "eighteen bytes long", "é"), 0)
    assert multiple_choice.likeliest(item, [-4.0, -9.5, -3.0], normalized=False) == 2
    # Per byte: -1, -0.5, -1.5 (two bytes).
    assert multiple_choice.likeliest(item, [-4.0, -9.5, -3.0], normalized=True) == 1
    assert multiple_choice.likeliest(item, [-4.0, -19.0, -2.0], normalized=True) == 0
