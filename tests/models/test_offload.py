"""A model whose layers come from disk: bits equal to the model in memory, memory within the limit, and no leftovers."""

import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from puna.models.config import Mla, ModelConfig, Moe
from puna.models.forest import Forest
from puna.models.formats.checkpoint import CheckpointError, load, save
from puna.models.generation import Engine, SamplingParams
from puna.models.generation.draft import DraftedEngine
from puna.models.memory import Work, offload, streams
from puna.models.memory.offload import Copies, Disk, Host, Source, Streamed, offload_layers, spread
from puna.models.serving import ServingSettings, offloaded_model
from puna.models.transformer import Transformer

SHAPE = {"vocab_size": 83, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
MLA = Mla(kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10, q_lora_rank=16)
FAMILIES = {
    "dense": {},
    "apart": {"tie_word_embeddings": False, "qk_norm": True, "model_type": "qwen3"},
    "windows": {"model_type": "qwen2", "qkv_bias": True, "sliding_window": 9, "sliding_layers": (1, 3)},
    "experts": {"model_type": "mixtral", "moe": Moe(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)},
    "latent": {"model_type": "deepseek_v3", "num_key_value_heads": 4, "head_dim": 0, "mla": MLA},
}
CPU = torch.device("cpu")
ASKED = [list(range(1, 20)), [3, 4, 5], [7] * 40, list(range(80)), list(range(40))]
PARAMS = SamplingParams(n=2, temperature=0.8, max_tokens=12, stop=())


def checkpoint(folder, dtype=torch.float32, **more):
    model = Transformer(ModelConfig(**SHAPE | more), seed=0)
    save(model.to(dtype), folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_have_the_bits_of_the_model_in_memory(tmp_path, family, dtype):
    folder = checkpoint(tmp_path, dtype, **FAMILIES[family])
    wanted = Engine(load(folder)).generate(ASKED, PARAMS)
    for streamed in (5, 2, 0):
        source = Source(folder, torch.float32)
        assert source.as_it_lies == (dtype == torch.float32 and family != "experts")
        model, _ = offload_layers(source, "disk", streamed, CPU)
        assert sum(isinstance(layer, Streamed) for layer in model.model.layers) == streamed
        assert Engine(model).generate(ASKED, PARAMS) == wanted


def test_in_bf16_as_in_memory(tmp_path):
    folder = checkpoint(tmp_path, torch.bfloat16)
    model, _ = offload_layers(Source(folder, torch.bfloat16), "disk", 3, CPU)
    assert Engine(model).generate(ASKED, PARAMS) == Engine(load(folder, dtype=None)).generate(ASKED, PARAMS)


def test_exact_answers_guesses_and_a_draft(tmp_path):
    folder = checkpoint(tmp_path)
    whole, (model, _) = load(folder), offload_layers(Source(folder, torch.float32), "disk", 4, CPU)
    assert Engine(model, exact=True).generate(ASKED, PARAMS) == Engine(whole, exact=True).generate(ASKED, PARAMS)
    guessing = SamplingParams(temperature=0, max_tokens=12, stop=(), speculate=4)
    assert DraftedEngine(model, whole).generate(ASKED, guessing) == DraftedEngine(whole, whole).generate(ASKED, guessing)
    assert Engine(model).generate(ASKED, guessing) == Engine(whole).generate(ASKED, guessing)


def test_a_forward_pass_of_another_kind_than_generations(tmp_path):
    """As `evaluate` does on pages: passes and generation use the layers alternately."""
    folder = checkpoint(tmp_path)
    whole, (model, _) = load(folder), offload_layers(Source(folder, torch.float32), "disk", 4, CPU)
    forest = Forest.pack([torch.arange(70), torch.arange(30)])
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model.hidden(forest), whole.hidden(forest))
            assert Engine(model).generate(ASKED, PARAMS) == Engine(whole).generate(ASKED, PARAMS)


def test_files_in_parts_and_a_file_system_without_direct_reads(tmp_path, monkeypatch):
    """As in large checkpoints: layers are spread over several files, and one layer's tensors lie in two files."""
    from safetensors.torch import load_file, save_file

    whole = load(checkpoint(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[: len(names) // 2 + 1], "b.safetensors": names[len(names) // 2 + 1 :]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: file for file, own in parts.items() for name in own}}))
    wanted = Engine(whole).generate(ASKED, PARAMS)
    assert Engine(offload_layers(Source(tmp_path, torch.float32), "disk", 4, CPU)[0]).generate(ASKED, PARAMS) == wanted
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    source = Source(tmp_path, torch.float32)
    assert not source.reader.direct
    assert Engine(offload_layers(source, "disk", 4, CPU)[0]).generate(ASKED, PARAMS) == wanted


def test_what_the_page_cache_holds_is_taken_from_there(tmp_path, monkeypatch):
    """The first half of a file is in the page cache: the bytes are the same, and the second half, whose last page is partial, is read
    directly."""
    path, size, half = tmp_path / "file", 150 * streams.ALIGN + 100, 64 * streams.ALIGN
    wanted = os.urandom(size)
    path.write_bytes(wanted)
    reader, own, calls = streams.Reader([path]), os.preadv, []
    if not reader.direct:
        pytest.skip("this file system has no direct reads")

    def held(file, parts, offset, flags=0):
        """Simulate a page cache that holds the first half of the file and one page more."""
        calls.append((offset, flags))
        if flags and offset >= half + streams.ALIGN:
            raise BlockingIOError
        return own(file, [part[: half + streams.ALIGN - offset] for part in parts] if flags else parts, offset)

    monkeypatch.setattr(os, "preadv", held)
    layout = streams.Layout.of({"all": streams.Entry(path, torch.float32, (size // 4,), 0, size)})
    buffer = streams.Buffer(layout.size)
    assert reader.fill(layout, buffer) == size and bytes(buffer.bytes[:size]) == wanted
    assert calls == [(0, os.RWF_NOWAIT), (half + streams.ALIGN, os.RWF_NOWAIT), (half + streams.ALIGN, 0)]


def test_a_layout_reads_near_tensors_together_and_far_ones_apart():
    """Reads begin at multiples of 4,096: 10,000 lies at 8,192 + 1,808, 5,000,000 at 4,997,120 + 2,880."""
    at = lambda begin, size: streams.Entry(Path("x"), torch.float32, (size // 4,), begin, begin + size)  # noqa: E731
    layout = streams.Layout.of({"far": at(5_000_000, 400), "one": at(10_000, 4000), "two": at(14_000, 8)})
    assert layout.extents == (
        streams.Extent(Path("x"), 8192, 8192, 14_008 - 8192, 0),
        streams.Extent(Path("x"), 4_997_120, 4096, 5_000_400 - 4_997_120, 8192),
    )
    assert [(place.name, place.start) for place in layout.places] == [("one", 1808), ("two", 14_000 - 8192), ("far", 8192 + 2880)]
    assert layout.size == 8192 + 4096


def test_layers_that_go_lie_between_those_that_stay():
    assert spread(0, 6) == [] and spread(6, 6) == [0, 1, 2, 3, 4, 5]
    assert spread(2, 6) == [2, 5] and spread(3, 6) == [1, 3, 5]
    assert all(len(spread(count, 7)) == count for count in range(8))


def opened(folder):
    """Return the open files of this process in a folder."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return [link for link in links if link.startswith(str(folder))]


def test_nothing_is_left_behind(tmp_path):
    def loaders():
        return [thread for thread in threading.enumerate() if thread.name == "puna-loader"]

    gc.collect()
    time.sleep(0.1)  # for threads of other tests
    folder = checkpoint(tmp_path)
    model, shelf = offload_layers(Source(folder, torch.float32), "disk", 4, CPU)
    Engine(model).generate(ASKED, PARAMS)
    assert len(loaders()) == 1 and shelf.counts.bytes > 0 and opened(folder)
    gone = weakref.ref(model)
    del model, shelf
    assert gone() is None
    until = time.monotonic() + 10
    while (loaders() or opened(folder)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not loaders() and not opened(folder)


def test_each_pass_reads_each_layer_once(tmp_path):
    folder = checkpoint(tmp_path)
    source = Source(folder, torch.float32)
    model, shelf = offload_layers(source, "disk", 3, CPU)
    Engine(model).generate([[1, 2, 3]], SamplingParams(max_tokens=10, stop=()))
    each = [source.layouts[n].extents[0].needed for n in spread(3, 5)]
    until = time.monotonic() + 10
    while shelf.counts.bytes < 10 * sum(each) + sum(each[:2]) and time.monotonic() < until:
        time.sleep(0.01)
    # Ten passes, and the first two layers of the next pass, which the buffers hold; the last page of a file may be partial.
    assert 0 <= shelf.counts.bytes - 10 * sum(each) - sum(each[:2]) < 32 * streams.ALIGN


def test_a_file_that_changes_is_an_error_that_names_it_and_stays_one(tmp_path):
    folder = checkpoint(tmp_path)
    model, _ = offload_layers(Source(folder, torch.float32), "disk", 5, CPU)
    os.truncate(folder / "model.safetensors", 8192)
    engine = Engine(model)
    for _ in range(2):
        with pytest.raises(OSError, match=r"model\.safetensors has become shorter while it is in use"):
            engine.generate(ASKED, PARAMS)
        engine.clear()


def test_what_cannot_be_offloaded_is_refused_by_name(tmp_path):
    folder = checkpoint(tmp_path / "model")
    with pytest.raises(CheckpointError, match="layers are read from the safetensors files of a model's folder"):
        Source(folder / "model.safetensors", torch.float32)
    reward = Transformer(ModelConfig(**SHAPE), "scalar", seed=0)
    save(reward, tmp_path / "reward")
    with pytest.raises(CheckpointError, match="reward"):
        Source(tmp_path / "reward", torch.float32)
    with pytest.raises(ValueError, match=r"offload = 'host': on a cpu the model's memory is the host's; set offload to disk"):
        offloaded_model(folder, (CPU, torch.float32), "host", 1.0, Work())
    with pytest.raises(ValueError, match=r"memory = 0\.0001 GB is too little even with all layers offloaded: one answer of 90 tokens"):
        offloaded_model(folder, (CPU, torch.float32), "disk", 0.0001, Work(60, 30, 4))
    for wrong in ({"weights": "int8"}, {"engine": "vllm"}):
        with pytest.raises(ValueError, match="offload disk"):
            ServingSettings(offload="disk", **wrong)


CHILD = """
import sys, torch
from pathlib import Path
from puna.models.formats.checkpoint import load
from puna.models.config import ModelConfig
from puna.models.generation import Engine, SamplingParams
from puna.models.memory import Work
from puna.models.serving import offloaded_model
from puna.models.transformer import Transformer

torch.set_num_threads(1)
folder, memory, longest = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
prompts, params = [[i % 500 for i in range(longest)], [i % 500 for i in range(50, 50 + longest // 2)]], SamplingParams(n=2, max_tokens=6, stop=())
# What a process needs once, its loops above all, is there before anything is counted.
small = offloaded_model(folder / "small", (torch.device("cpu"), torch.float32), "disk", 0.05, Work(longest, 6, 1))
for engine in Engine(load(folder / "small"), exact=True), Engine(small.model, **small.limits):
    engine.generate(prompts, params)
del small, engine
def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) << 10
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
if memory:
    found = offloaded_model(folder, (torch.device("cpu"), torch.float32), "disk", memory, Work(longest, 6, 4))
    engine = Engine(found.model, **found.limits)
    print(found.plan, file=sys.stderr)
else:
    engine = Engine(load(folder), memory=1 << 28)
answers = engine.generate(prompts, params)
print(status("VmHWM") - before, [(one.tokens, one.logprobs) for row in answers for one in row])
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of resident memory is read and reset by Linux' /proc")
@pytest.mark.parametrize(
    ("shape", "longest", "told", "whole"),
    [
        # 12 layers of 15.3 MB and 1.6 MB outside the layers, 186 MB in all.
        ({"hidden_size": 768, "intermediate_size": 1024, "num_attention_heads": 12, "num_key_value_heads": 3}, 100, 80e6, 150e6),
    ],
)  # fmt: skip
def test_the_peak_of_memory_stays_under_the_limit(tmp_path, shape, longest, told, whole):
    for layers, folder in ((12, tmp_path), (2, tmp_path / "small")):
        config = ModelConfig(vocab_size=512, num_hidden_layers=layers, **shape)
        save(Transformer(config, seed=0), folder)
    ran = [subprocess.run([sys.executable, "-c", CHILD, tmp_path, memory, str(longest)], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) for memory in (str(told / 1e9), "0")]
    assert not any(one.returncode for one in ran), [one.stderr[-2000:] for one in ran]
    (peak, answers), (most, wanted) = (one.stdout.split(" ", 1) for one in ran)
    assert answers == wanted
    assert int(peak) < told and int(most) > whole, (peak, most, ran[0].stderr)


class Device:
    """A stub of a GPU whose streams and events are logged."""

    def __init__(self, monkeypatch):
        self.log, self.streams, self.number = [], ["computing"], 0
        device = self

        class Event:
            def __init__(self):
                device.number += 1
                self.name = device.number

            def record(self, stream):
                device.log.append((stream.name, "record", self.name))

            def synchronize(self):
                device.log.append(("host", "wait", self.name))

        class Stream:
            def __init__(self, name="copying"):
                self.name = name if isinstance(name, str) else "copying"

            def wait_event(self, event):
                device.log.append((self.name, "wait", event.name))

        @contextlib.contextmanager
        def inside(stream):
            device.streams.append(stream.name)
            yield
            device.streams.pop()

        for name, fake in {"Event": Event, "Stream": Stream, "stream": inside, "current_stream": lambda _: Stream(device.streams[-1])}.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        for name in ("copy", "compute"):
            own = getattr(offload.Shell, name)

            def logged(shell, *args, own=own, name=name):
                device.log.append((device.streams[-1], name, id(shell)))
                return own(shell, *args)

            monkeypatch.setattr(offload.Shell, name, logged)


@pytest.mark.parametrize("level", ["host", "disk"])
@pytest.mark.parametrize("streamed", [1, 2, 3, 5])
def test_copies_to_a_gpu_are_ordered_by_events(tmp_path, monkeypatch, level, streamed):
    """No layer computes before its weights have arrived, no weights are overwritten before they have been used, and the next copy is under
    way while a layer computes; checked in a log of streams and events, on a CPU."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    folder = checkpoint(tmp_path)
    whole, source, numbers = load(folder), Source(folder, torch.float32), spread(streamed, 5)
    model, _ = offload_layers(source, "disk", streamed, CPU)
    device = Device(monkeypatch)
    copies = Copies(Host(source, numbers) if level == "host" else Disk(source, numbers, 3), source, numbers, CPU)
    for layer in model.model.layers:
        if isinstance(layer, Streamed):
            layer._compute = copies
    assert Engine(model).generate(ASKED, PARAMS) == Engine(whole).generate(ASKED, PARAMS)
    known, ended, begun, log = {}, {}, 0, device.log
    for place, (stream, what, subject) in enumerate(log):
        if what == "copy":
            assert stream == "copying" and log[place - 1][:2] == ("copying", "wait") and log[place + 1][:2] == ("copying", "record")
            used = log[place - 1][2]
            assert ended.setdefault(subject, used) == used  # the event of the last computation with these weights
            known[subject] = log[place + 1][2]
            begun += 1
        elif what == "compute":
            assert log[place - 1] == ("computing", "wait", known[subject])
            assert log[place + 1] == ("computing", "record", ended[subject])
    computed = sum(what == "compute" for _, what, _ in log)
    # With at most two slots' worth of layers, all stay on the device; otherwise each is copied once per pass, and once for the pass that
    # never comes.
    assert begun == (streamed if streamed <= 2 else computed + 1)
