"""Untrusted model files are refused with one clear error before anything of the claimed size is allocated."""

import json
import sys
from pathlib import Path

import pytest

from puna.models.formats.checkpoint import CheckpointError, load, load_with_tokenizer
from puna.models.formats.gguf import vocabulary
from puna.models.formats.gguf.files import check_header
from puna.models.tokens.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
import cases_models


def test_hostile_model_files_are_refused(tmp_path):
    assert cases_models.model_files_accepted(tmp_path) == 0


def test_hostile_adapters_are_refused(tmp_path):
    assert cases_models.adapters_merged(tmp_path) == 0


def test_texts_on_which_a_strangers_tokenizer_takes_too_long_are_refused(tmp_path):
    assert cases_models.texts_encoded(tmp_path) == 0


def test_an_unknown_pattern_cuts_as_the_library_does(tmp_path):
    import tokenizers

    tokenizer = Tokenizer.train(["to be or not to be"], 270)
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [cases_models._split(r"\w|\s"), cases_models._BYTES]}}))
    loaded, theirs = Tokenizer.load(tmp_path), tokenizers.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    assert loaded.encode("to be<|eot_id|> or") == theirs.encode("to be<|eot_id|> or", add_special_tokens=False).ids != tokenizer.encode("to be<|eot_id|> or")
    theirs.encode_special_tokens = False
    assert loaded.encode_markup("to be<|eot_id|>")[0] == theirs.encode("to be<|eot_id|>", add_special_tokens=False).ids


@pytest.mark.parametrize(("name", "content"), list(cases_models.gguf_files()), ids=lambda one: one if isinstance(one, str) else "")
def test_the_gguf_header_alone_shows_what_cannot_be(tmp_path, name, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    if name == "layers":
        check_header(path)
        with pytest.raises(CheckpointError, match=r"num_hidden_layers = 2,000,000,000 exceeds the maximum, 16,384"):
            load(path)
    else:
        with pytest.raises(ValueError, match="claim|elements|array of type|dimensions"):
            check_header(path)


def test_an_index_names_files_of_its_own_folder_alone(tmp_path):
    from puna.models.formats.checkpoint import save
    from puna.models.transformer import Transformer

    model = Transformer(cases_models.SHAPE, seed=0)
    save(model, tmp_path / "secret")
    save(model, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret/model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"a lies in '\.\./secret/model\.safetensors', not a safetensors file of this folder"):
        load(tmp_path / "model")
    (tmp_path / "model" / "one.safetensors").write_bytes((tmp_path / "secret" / "model.safetensors").read_bytes())
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert load(tmp_path / "model").config == cases_models.SHAPE


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer.json does not exist"):
        load_with_tokenizer(tmp_path)


def test_merges_of_a_small_vocabulary_are_bounded(monkeypatch):
    """Tokens a…ab…b have merges by the fourth power of their length: a file of 2.7 MB used to take 1.3 GB."""
    tokens = ["<unk>", *dict.fromkeys("a" * i + "b" * j for i in range(40) for j in range(41 - i) if i + j)]
    fields = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.scores": [0.0] * len(tokens), "tokenizer.ggml.token_type": [2] + [1] * (len(tokens) - 1),
    }  # fmt: skip
    assert vocabulary.read_tokenizer(fields).vocab_size == len(tokens)
    monkeypatch.setattr(vocabulary, "MERGES", 10_000)
    with pytest.raises(ValueError, match=r"^tokenizer\.ggml\.tokens has more than 10,000 merges, the maximum$"):
        vocabulary.read_tokenizer(fields)
