"""Quality by an encoder: the head checked by its optimality conditions, both kinds of encoder, labels from sources and judges."""

from __future__ import annotations

import os
import signal

import numpy as np
import pyarrow as pa
import pytest
import torch

from puna.models.training.state import load_record
from puna.stages.contract import External, StageConfig, execute
from puna.stages.curate.encoder_quality import (
    TrainEncoderQualityConfig,
    encoder_quality,
    fit,
    train_encoder_quality,
)
from puna.storage import PunaError, Store


@pytest.mark.parametrize("seed", range(3))
def test_the_head_is_at_its_optimum(seed):
    generator = np.random.default_rng(seed)
    vectors = generator.normal(size=(300, 7)).astype(np.float32)
    positive = vectors[:, 0] - vectors[:, 1] + generator.normal(size=300) > 0.3
    head = fit(vectors, positive, 0.05)
    p = head.probabilities(vectors)
    assert p.mean() == pytest.approx(positive.mean(), abs=1e-8)  # the bias has no penalty
    x = (vectors - head.mean) / head.scale
    slope = x.T @ (p - positive) / 300 + 0.05 * head.weights
    assert np.abs(slope).max() < 1e-8
    assert head.weights[0] > 0 > head.weights[1]


def test_separable_and_constant_columns_do_no_harm():
    vectors = np.array([[0.0, 5.0], [0.1, 5.0], [0.9, 5.0], [1.0, 5.0]], np.float32)
    p = fit(vectors, np.array([False, False, True, True]), 0.01).probabilities(vectors)
    assert np.isfinite(p).all() and (p[:2] < 0.5).all() and (p[2:] > 0.5).all()


def test_sources_and_judges_as_labels(tmp_path, make_documents, themed, small_model):
    store = Store.open(tmp_path)
    rows = themed(96)
    documents, model = make_documents(store, rows), small_model(store, [text for _, _, text in rows])
    config = TrainEncoderQualityConfig(max_tokens=64)
    classifier = execute(train_encoder_quality, config, {"documents": documents, "model": model}, store)
    assert classifier.manifest.metrics["auc"] > 0.99  # good sources have full stops, the others are in capitals
    assert "calibration" in classifier.manifest.figures
    given = {"documents": documents, "model": model}
    made = execute(encoder_quality, StageConfig(), {**given, "classifier": classifier}, store)
    table = made.read().to_pydict()
    source = {identity: name for identity, name, _ in rows}
    assert all((value is None) == (source[i] == "code") for i, value in zip(table["id"], table["quality"], strict=True))
    assert made.manifest.metrics["scored"] == sum(value is not None for value in table["quality"])
    # A judge who prefers sports and saw half of the documents.
    grades = [{"id": i, "judgement": 4.0 if "sports" in i else 1.0} for n, (i, _, _) in enumerate(rows) if n // 4 % 2]
    labels = store.import_table("signals", pa.Table.from_pylist(grades))
    learned = execute(train_encoder_quality, config, {**given, "labels": labels}, store)
    assert learned.manifest.metrics["labelled"] == sum(source[row["id"]] != "code" for row in grades)
    judged = execute(encoder_quality, StageConfig(), {**given, "classifier": learned}, store)
    quality = dict(zip(judged.read()["id"].to_pylist(), judged.read()["quality"].to_pylist(), strict=True))
    unseen = [i for n, (i, name, _) in enumerate(rows) if n // 4 % 2 == 0 and name != "code"]
    right = [(quality[i] > 0.5) == ("sports" in i) for i in unseen]
    assert np.mean(right) > 0.9


def test_a_new_crawl_needs_no_training_and_the_same_encoder(tmp_path, make_documents, themed, small_model):
    store = Store.open(tmp_path)
    rows = themed(96)
    model = small_model(store, [text for _, _, text in rows])
    config, trained = TrainEncoderQualityConfig(max_tokens=32), [make_documents(store, part) for part in (rows[:48], rows[48:])]
    classifier = execute(train_encoder_quality, config, {"documents": trained[0], "model": model}, store)
    made = execute(encoder_quality, StageConfig(), {"documents": trained[1], "model": model, "classifier": classifier}, store)
    table = made.read().to_pydict()
    good = {identity: name == "wikipedia" for identity, name, _ in rows}
    told = [(good[i], value) for i, value in zip(table["id"], table["quality"], strict=True) if value is not None]
    assert min(value for is_good, value in told if is_good) > max(value for is_good, value in told if not is_good)
    other = small_model(Store.open(tmp_path / "other"), ["some other text"] * 200)
    with pytest.raises(PunaError, match="was trained on another encoder"):
        execute(encoder_quality, StageConfig(), {"documents": trained[1], "model": other, "classifier": classifier}, store)


def test_a_hugging_face_encoder_by_its_folder(tmp_path, make_documents, themed):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    rows = themed(48)
    backend = Backend(models.WordLevel(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator([text for _, _, text in rows], trainers.WordLevelTrainer(special_tokens=["[UNK]", "[PAD]"]))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(tmp_path / "bert")
    torch.manual_seed(0)
    shape = BertConfig(vocab_size=backend.get_vocab_size(), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                       max_position_embeddings=48)  # fmt: skip
    BertModel(shape).save_pretrained(tmp_path / "bert")
    store = Store.open(tmp_path / "store")
    documents = make_documents(store, rows)
    encoder = External.resolve(f"bert={tmp_path / 'bert'}")[0]
    made = execute(train_encoder_quality, TrainEncoderQualityConfig(), {"documents": documents, "encoder": encoder}, store)
    assert made.manifest.metrics["auc"] > 0.95


def test_what_is_missing_is_named(tmp_path, make_documents, themed, small_model):
    store = Store.open(tmp_path / "store")
    rows = themed(24)
    documents = make_documents(store, rows)
    with pytest.raises(PunaError, match="give exactly one encoder"):
        execute(train_encoder_quality, TrainEncoderQualityConfig(), {"documents": documents}, store)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "x.txt").write_text("x")
    with pytest.raises(PunaError, match="no config.json"):
        encoder = External.resolve(str(tmp_path / "none"))[0]
        execute(train_encoder_quality, TrainEncoderQualityConfig(), {"documents": documents, "encoder": encoder}, store)
    model = small_model(store, [text for _, _, text in rows])
    with pytest.raises(PunaError, match="needs good documents and others"):
        execute(train_encoder_quality, TrainEncoderQualityConfig(positive_sources=("none",)), {"documents": documents, "model": model}, store)


def test_a_stopped_fit_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    random = np.random.default_rng(5)
    vectors = random.normal(size=(200, 6)).astype(np.float32)
    positive = vectors[:, 0] + random.normal(size=200) > 0.5
    plain, calls = np.linalg.solve, 0

    def solve(*args):
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(*args)

    whole = fit(vectors, positive, 0.05)
    monkeypatch.setattr(np.linalg, "solve", solve)
    with pytest.raises(KeyboardInterrupt):
        fit(vectors, positive, 0.05, tmp_path)
    assert load_record(tmp_path)["done"] == calls == 3
    head = fit(vectors, positive, 0.05, tmp_path)
    assert all(np.array_equal(one, other) for one, other in zip(head, whole, strict=True)) and calls > 4
