"""Keys and values that come from a file in turn: the bits of a cache in memory, and nothing left behind."""

import dataclasses
import errno
import gc
import os
import threading
import time
import weakref
from contextlib import suppress

import pytest
import torch

from puna.models.config import ModelConfig, Moe
from puna.models.formats.checkpoint import load, save
from puna.models.generation import Engine, SamplingParams, step, streamed_cache
from puna.models.generation.cache import Cache
from puna.models.generation.draft import DraftedEngine
from puna.models.generation.streamed_cache import StreamedCache, cache_of, runs
from puna.models.memory.offload import Source, offloaded
from puna.models.transformer import Transformer

SHAPE = {"vocab_size": 83, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
FAMILIES = {
    "dense": {},
    "uneven": {"tie_word_embeddings": False, "qk_norm": True, "model_type": "qwen3", "head_dim": 12},
    "windows": {"model_type": "qwen2", "qkv_bias": True, "sliding_window": 9, "sliding_layers": (1, 3)},
    "experts": {"model_type": "mixtral", "moe": Moe(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)},
}
CPU = torch.device("cpu")
ASKED = [list(range(1, 20)), [3, 4, 5], [7] * 40, list(range(80)), list(range(40))]
PARAMS = SamplingParams(n=2, temperature=0.8, max_tokens=30, stop=())
WAYS = [  # pages, layers that come, limits
    (400, 5, {}), (400, 2, {"sequences": 3}), (14, 0, {"sequences": 5, "step_tokens": 11}), (14, 3, {}),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return checkpoint(tmp_path / "model")


def checkpoint(folder, **more):
    save(Transformer(ModelConfig(**SHAPE | more), generator=torch.Generator().manual_seed(0)), folder)
    return folder


def streaming(folder, streamed=0):
    return offloaded(Source(folder, torch.float32), "disk", streamed, CPU, keys=True)[0]


def unnamed_files():
    """The open files of this process that have no name, as that of a cache."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.endswith("(deleted)") for link in links)


def pages(model, count):
    return count * cache_of(model, 1).bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_have_the_bits_of_keys_in_memory(tmp_path, family):
    """With layers that come and without, in pauses and chunks, with prefixes found again; of the same pages, since the operators of
    experts round by what is computed together."""
    folder = checkpoint(tmp_path, **FAMILIES[family])
    whole = load(folder)
    for count, streamed, limits in WAYS if family != "experts" else WAYS[:2]:  # which are slow
        model = streaming(folder, streamed)
        engine, other = (Engine(network, memory=pages(network, count), **limits) for network in (model, whole))
        for asked in (ASKED, ASKED[::-1]):
            assert engine.generate(asked, PARAMS) == other.generate(asked, PARAMS)
        assert isinstance(engine.caches[0], StreamedCache) and engine.scheduler.preemptions == other.scheduler.preemptions
        assert (engine.scheduler.preemptions > 0) == (count < 20)


def test_exact_answers_guesses_branches_and_a_draft(folder):
    whole, model = load(folder), streaming(folder, 3)
    assert Engine(model, exact=True).generate(ASKED, PARAMS) == Engine(whole, exact=True).generate(ASKED, PARAMS)
    few = dataclasses.replace(PARAMS, temperature=0.0, max_tokens=60, logit_bias=dict.fromkeys(range(4), 30.0), frequency_penalty=0.1)
    for speculate, branches in ((4, 1), (5, 3)):
        guessing = dataclasses.replace(few, speculate=speculate, branches=branches)
        assert Engine(model).generate(ASKED, guessing) == Engine(whole).generate(ASKED, guessing)
    guessing = SamplingParams(temperature=0, max_tokens=12, stop=(), speculate=4)
    assert DraftedEngine(model, whole).generate(ASKED, guessing) == DraftedEngine(whole, whole).generate(ASKED, guessing)


def test_tokens_fall_out_behind_sinks(folder):
    """Keys that are turned back when their layer comes, on pages that were shared."""
    params = SamplingParams(n=2, temperature=0.7, max_tokens=150, stop=())
    wanted = Engine(load(folder), sinks=16, window=64).generate(ASKED, params)
    assert Engine(streaming(folder), sinks=16, window=64).generate(ASKED, params) == wanted


def test_weights_that_change_and_requests_that_end_early(folder):
    whole, model = load(folder), streaming(folder)
    engines = Engine(whole), Engine(model)
    for _ in range(2):
        told = []
        for engine in engines:
            request = engine.submit(ASKED[3], PARAMS)
            for _ in range(3):
                engine.step()
            engine.cancel(request)
            told.append(engine.generate(ASKED, PARAMS))
        assert told[0] == told[1]
        with torch.no_grad():
            for network in (whole, model):
                network.model.norm.weight.mul_(1.5)


def test_two_layers_are_in_memory_and_the_others_in_a_file_of_their_size(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(streamed_cache.tempfile, "tempdir", str(tmp_path / "spare"))
    (tmp_path / "spare").mkdir()
    model = streaming(folder)
    cache = cache_of(model, 10)
    assert cache.bytes == Cache(model, 10).bytes * 2 // 5
    status = os.fstat(cache._file.fileno())
    assert status.st_size == Cache(model, 10).bytes and status.st_mode & 0o777 == 0o600 and status.st_nlink == 0
    assert os.listdir(tmp_path / "spare") == []  # nothing to be left, however the process ends


def test_a_system_that_cannot_claim_room_gives_the_same(folder, monkeypatch):
    wanted = Engine(load(folder)).generate(ASKED, PARAMS)
    monkeypatch.delattr(os, "posix_fallocate")
    engine = Engine(streaming(folder), memory=pages(streaming(folder), 400))
    assert engine.generate(ASKED, PARAMS) == wanted
    (cache,) = engine.caches
    assert os.fstat(cache._file.fileno()).st_size == 5 * cache._layer_size


def test_nothing_is_left_behind(folder):
    def threads():
        return [thread for thread in threading.enumerate() if thread.name.startswith("puna-keys")]

    gc.collect()
    files = unnamed_files()
    model = streaming(folder)
    engine = Engine(model)
    engine.generate(ASKED, PARAMS)
    assert len(threads()) == 1 and unnamed_files() > files
    gone = weakref.ref(engine.caches[0])
    del engine, model
    gc.collect()
    assert gone() is None
    until = time.monotonic() + 10
    while (threads() or unnamed_files() > files) and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads() and unnamed_files() == files


def test_pages_of_a_cache_that_is_gone_go_to_no_other_file(folder, tmp_path):
    """The next file that is opened has the number of one that was closed."""
    cache, go_on = cache_of(streaming(folder), 4), threading.Event()
    cache._thread.submit(go_on.wait)
    written = cache.write(0, [(0, 4)])
    del cache
    gc.collect()
    with (tmp_path / "other").open("wb"):
        go_on.set()
        written.result()
    assert (tmp_path / "other").stat().st_size == 0


@pytest.mark.parametrize("kept", [{}, {"sinks": 16, "window": 64}], ids=["all", "window"])
@pytest.mark.parametrize("every", [7, 9])
def test_a_step_that_is_interrupted_is_computed_again(folder, monkeypatch, every, kept):
    """Each once, in its second or fourth layer of five: those with pages to copy and with keys to turn back, too."""
    params = dataclasses.replace(PARAMS, max_tokens=150)
    wanted = Engine(load(folder), **kept).generate(ASKED[:2], params)
    engine, own, calls, found = Engine(streaming(folder), **kept), step.kv_append_, [], {}

    def interrupted(*given):
        calls.append(given)
        if len(calls) % every == 0:
            raise KeyboardInterrupt
        own(*given)

    monkeypatch.setattr(step, "kv_append_", interrupted)
    requests = [engine.submit(prompt, params) for prompt in ASKED[:2]]
    while not engine.scheduler.idle:
        with suppress(KeyboardInterrupt):
            found |= {(event.request, event.number): event.completion for event in engine.step() if event.completion is not None}
    assert [[found[request, number] for number in range(2)] for request in requests] == wanted


def test_a_full_disk_is_told_at_the_start(folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = streaming(folder)
    files = unnamed_files()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"has no room for [\d.e-]+ GB of keys and values: set TMPDIR to another folder"):
        Engine(model)
    gc.collect()
    assert unnamed_files() == files


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_fails_ends_the_step_and_can_come_back(folder, monkeypatch, name):
    own, calls = getattr(os, name), []

    def failing(*given):
        calls.append(given)
        if len(calls) == 200:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return own(*given)

    engine, wanted = Engine(streaming(folder)), Engine(load(folder)).generate(ASKED, PARAMS)
    monkeypatch.setattr(os, name, failing)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        engine.generate(ASKED, PARAMS)
    engine.clear()
    assert engine.generate(ASKED, PARAMS) == wanted


def test_short_reads_go_on(folder, monkeypatch):
    own = {name: getattr(os, name) for name in ("preadv", "pwritev")}
    for name in own:
        monkeypatch.setattr(os, name, lambda file, parts, at, name=name: own[name](file, [part[:100] for part in parts], at))
    wanted = Engine(load(folder)).generate(ASKED[:2], PARAMS)
    assert Engine(streaming(folder)).generate(ASKED[:2], PARAMS) == wanted


def test_neighbouring_pages_are_moved_together():
    assert runs([3]) == [(3, 4)]
    assert runs([9, 3, 4, 4, 5, 8, 1]) == [(1, 2), (3, 6), (8, 10)]
