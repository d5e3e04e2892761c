"""Answers that must fit a JSON schema, checked with jsonschema."""

import json

import jsonschema
import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.generation import Engine, SamplingParams
from puna.models.generation.grammar import Grammar, Mask
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer

TOKENIZER = Tokenizer.train(['to be or not to be: {"a": 1, "b": [true, null]}'], 290)
SHAPE = ModelConfig(vocab_size=TOKENIZER.vocab_size + 7, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3)
GRAMMAR = Grammar(TOKENIZER, SHAPE.vocab_size)
SCHEMAS = [
    {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 40}, "minItems": 2, "maxItems": 4},
    {"type": "object", "properties": {"a": {"type": ["boolean", "null"]}, "b": {"$ref": "#/$defs/x"}}, "required": ["b"], "additionalProperties": False, "$defs": {"x": {"enum": ["to", "be", 3]}}},
    {"anyOf": [{"type": "string", "pattern": "^[ab]{2,5}$"}, {"const": {"k": [1]}}]},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_answer_that_ends_is_of_its_schema(schema):
    model = Transformer(SHAPE, seed=0)
    mask = GRAMMAR.schema(schema)
    rows = Engine(model, TOKENIZER, sequences=3).generate(["x", "x", "y"], SamplingParams(n=4, max_tokens=60, mask=mask, temperature=1.3))
    answers = [answer for row in rows for answer in row]
    assert all(answer.finished for answer in answers)
    texts = [TOKENIZER.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert len(set(texts)) > 1


def test_the_mask_is_of_the_tokens_alone():
    """A mask depends only on the tokens, not on earlier calls: a parser state that was evicted is recomputed."""
    text = TOKENIZER.encode('[12, 3]')
    once, other = GRAMMAR.schema(SCHEMAS[0]), GRAMMAR.schema(SCHEMAS[0])
    steps = [once(text[:size]) for size in range(len(text) + 1)]
    for size in reversed(range(len(text) + 1)):
        assert torch.equal(other(text[:size]), steps[size])
    for size, token in enumerate(text):
        assert steps[size][token] and not steps[size][TOKENIZER.vocab_size :].any() and not steps[size][list(TOKENIZER.stop_ids)].any()
    assert steps[-1].nonzero()[:, 0].tolist() == sorted(TOKENIZER.stop_ids)
    with pytest.raises(ValueError, match="does not fit its schema"):
        once(TOKENIZER.encode("{"))


@pytest.mark.parametrize(("schema", "said"), [({"type": "objekt"}, "Invalid type: objekt"), ({"not": {"type": "string"}}, "Unimplemented keys"), ({"type": "string", "format": "nope"}, "Unknown format"), ([1], "is an object, not list")])
def test_what_cannot_be_kept_to_is_refused(schema, said):
    with pytest.raises(ValueError, match=said):
        GRAMMAR.schema(schema)


def test_the_first_mask_is_computed_before_the_engine_asks(monkeypatch):
    """A large schema's first mask takes seconds; within an engine step it would delay all answers."""
    asked = []
    monkeypatch.setattr(Mask, "__call__", lambda self, answer: asked.append(answer))
    GRAMMAR.schema(SCHEMAS[0])
    assert asked == [()]
