"""fastText's training and scoring by compiled loops, beside fastText itself."""

from __future__ import annotations

import platform

import fasttext
import numpy as np
import pytest

from puna.stages.curate.learned import fit as learned
from puna.stages.curate.learned.classifier import predict
from puna.stages.curate.learned.fit import Scorer, _zeroed_memory, fit, save, simple
from puna.storage import PunaError

WORDS = ["alpha", "beta", "gamma", "é", "naïve", "日本語", "слово", "x", "don't", "a b", "\U0001f600", *(f"w{n}" for n in range(60))]


@pytest.fixture
def lines(tmp_path):
    generator = np.random.default_rng(5)
    texts = [" ".join(generator.choice(WORDS[k % 3 :: 2], int(generator.integers(0, 40))).tolist()) for k in range(150)]
    texts[7] = "null\x00bar  two   spaces\ttab\rreturn"  # fastText ends words at each of these
    file = tmp_path / "lines.txt"
    labels = ("one", "two", "drei")
    file.write_bytes("".join(f"__label__{labels[k % 3]} {text}\n" for k, text in enumerate(texts)).encode())
    return file, texts


@pytest.mark.parametrize(
    ("rate", "epochs", "ngrams", "dimension", "min_count", "kept"),
    [(0.5, 7, 2, 16, 1, 1 << 20), (1.5, 3, 1, 16, 2, 200), (0.1, 4, 3, 10, 1, 5000), (0.3, 2, 2, 100, 4, 0)],
)
def test_models_are_fasttexts_own(lines, tmp_path, monkeypatch, rate, epochs, ngrams, dimension, min_count, kept):
    """However many of the lines a training keeps in memory as numbers: all, some or none."""
    monkeypatch.setattr(learned, "KEPT", kept)
    file, texts = lines
    ours = fit(file, rate, epochs, ngrams, dimension, min_count, 10_000, 3)
    with _zeroed_memory():
        theirs = fasttext.train_supervised(
            input=str(file), lr=rate, dim=dimension, epoch=epochs, wordNgrams=ngrams, minCount=min_count, bucket=10_000, loss="softmax",
            thread=1, seed=4, verbose=0,
        )  # fmt: skip
    start = fit(file, rate, 0, ngrams, dimension, min_count, 10_000, 3)
    assert not np.array_equal(start.get_output_matrix(), ours.get_output_matrix())
    save(ours, tmp_path / "ours.bin", epochs)
    theirs.save_model(str(tmp_path / "theirs.bin"))
    shown = [*texts, "", "nobody knows this", "alpha alpha alpha"]
    found, wanted = (predict(model, shown, ["drei", "one", "two"]) for model in (Scorer(ours), theirs))
    if platform.machine() == "x86_64":  # elsewhere compilers make one rounding of a product and a sum
        assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "theirs.bin").read_bytes()
        assert found.tolist() == wanted.tolist()
    else:
        np.testing.assert_allclose(ours.get_output_matrix(), theirs.get_output_matrix(), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert found.std() > 1e-4


def test_a_model_of_parts_of_words_is_left_to_fasttext(lines):
    file, _ = lines
    assert simple(fit(file, 0.5, 1, 2, 16, 1, 10_000, 0))
    for setting in ({"maxn": 3}, {"loss": "ova"}, {"loss": "hs"}):
        with _zeroed_memory():
            assert not simple(fasttext.train_supervised(input=str(file), dim=8, epoch=1, thread=1, bucket=1000, verbose=0, **setting))


def test_a_training_that_diverges_says_what_to_do(lines):
    with pytest.raises(PunaError, match="smaller learning_rate than 1e\\+30"):
        fit(lines[0], 1e30, 5, 2, 16, 1, 10_000, 0)
