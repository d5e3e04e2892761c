"""Inference of a model larger than memory: some layers are resident, the others (streamed layers) are loaded for each pass.

Streamed layers are loaded in turn while the layers before them compute. A thread reads weights from disk into one of a few buffers; for a
GPU, a copy stream moves weights from pinned memory into one of two slots. `planner.py` chooses how many layers are resident. All operations
and their order equal those of a model in memory, so answers are bit-identical."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from puna.kernels.exact import exact_passes
from puna.kernels.paged_attention import PagedPlan
from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import CheckpointError, Entry, build, check_files, checkpoint_at, entries, read_config, weight_files
from puna.models.formats.families import from_disk
from puna.models.generation.dense import Layers, Pass, fits
from puna.models.generation.step import by_operators
from puna.models.layers import Attend, Block
from puna.models.memory.streams import Buffer, Layout, Loader, Reader
from puna.models.transformer import Transformer

Level = Literal["host", "disk"]
LAYERS = "model.layers."


class Source:
    """A checkpoint whose tensors are read on request. The constructor raises CheckpointError if files are damaged or unsupported."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: layers are read from the safetensors files of a model's folder; import the model first")
        self.folder, self.dtype, self.config = folder, dtype, read_config(folder)
        check_files(folder)
        by_name: dict[str, Entry] = {}
        with checkpoint_at(folder):
            for path, _ in weight_files(folder):
                by_name |= entries(path)
            meta = {name: torch.empty(one.shape, dtype=dtype, device="meta") for name, one in by_name.items()}
            self._empty: Transformer | None = build(self.config, from_disk(meta, self.config), "lm", folder)
        self._one_layer = self.config.replace(num_hidden_layers=1, sliding_layers=None)
        self._rest = {name: one for name, one in by_name.items() if not name.startswith(LAYERS)}
        own: list[dict[str, Entry]] = [{} for _ in range(self.config.num_hidden_layers)]
        for name, one in by_name.items():
            if name.startswith(LAYERS):
                number, _, part = name.removeprefix(LAYERS).partition(".")
                own[int(number)][part] = one
        self.layouts = [Layout.of(tensors) for tensors in own]
        first, layer = self.weights({name: torch.empty(one.shape, device="meta") for name, one in own[0].items()}), own[0]
        self.as_it_lies = first.keys() == layer.keys() and all(one.dtype == dtype for tensors in own for one in tensors.values())
        # Bytes: one layer's weights in the compute dtype, all weights outside the layers, the most that is read for one layer.
        whole, one_layer = (sum(p.numel() for p in part.parameters()) for part in (self._empty, self._empty.model.layers[0]))
        self.layer_bytes = one_layer * dtype.itemsize
        self.rest_bytes = whole * dtype.itemsize - self.config.num_hidden_layers * self.layer_bytes
        self.read_bytes = max(layout.size for layout in self.layouts)
        self.reader = Reader(sorted({one.path for one in by_name.values()}))

    def take_empty(self) -> Transformer:
        """Return the model without weights, and drop this reference: the layers' reader must not keep the model alive."""
        model, self._empty = self._empty, None
        assert model is not None
        return model

    def weights(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's tensors by their names in a `Block`. `tensors`: by their names in the files, without the layer's prefix."""
        state = from_disk({f"{LAYERS}0.{part}": tensor for part, tensor in tensors.items()}, self._one_layer)
        return {name.removeprefix(f"{LAYERS}0."): tensor for name, tensor in state.items()}

    def rest(self, device: torch.device) -> dict[str, Tensor]:
        return {name: self._read(Layout.of({name: one}), device)[name] for name, one in self._rest.items()}

    def layer(self, number: int, device: torch.device) -> dict[str, Tensor]:
        """Return a layer's weights by their names in a `Block`, read from disk into new memory."""
        return self.weights(self._read(self.layouts[number], device))

    def _read(self, layout: Layout, device: torch.device) -> dict[str, Tensor]:
        buffer = Buffer(layout.size)
        self.reader.fill(layout, buffer)
        return {name: tensor.to(device, self.dtype) for name, tensor in buffer.tensors(layout).items()}


class Disk:
    """Layers on disk that a thread reads ahead. `buffers`: number of buffers. `pinned`: pin the buffers, for copies to a GPU."""

    def __init__(self, source: Source, numbers: Sequence[int], buffers: int = 2, pinned: bool = False) -> None:
        self.source, self._held = source, list[Buffer]()
        self._loader = Loader(source.reader, {number: source.layouts[number] for number in numbers}, buffers, pinned)
        self.counts = self._loader.counts

    def take(self, number: int) -> dict[str, Tensor]:
        """Return a layer's weights by their names in a `Block`, valid until `give`, which releases the weights that were taken first."""
        self._held.append(self._loader.take(number))
        return self.source.weights(self._held[-1].tensors(self.source.layouts[number]))

    def give(self) -> None:
        self._loader.give(self._held.pop(0))


class Host:
    """Layers in the host's pinned memory, to be copied to a GPU."""

    def __init__(self, source: Source, numbers: Sequence[int]) -> None:
        place = torch.device("cpu")
        self._layers = {n: {name: t.pin_memory() for name, t in source.layer(n, place).items()} for n in numbers}

    def take(self, number: int) -> dict[str, Tensor]:
        return self._layers[number]

    def give(self) -> None:
        """Do nothing: the weights stay where they are."""


Shelf = Disk | Host  # the store that streamed layers are loaded from


class Shell:
    """A layer whose weights are attached before each use."""

    def __init__(self, config: ModelConfig) -> None:
        with torch.device("meta"):
            self.block = Block(config, 0)
        parts = {id(p): (module, name) for module in self.block.modules() for name, p in module._parameters.items() if p is not None}
        self._places = {name: parts[id(p)] for name, p in self.block.named_parameters()}

    def put(self, weights: dict[str, Tensor]) -> None:
        """Attach weights, by name, to the block without a copy."""
        for name, (module, part) in self._places.items():
            module._parameters[part] = nn.Parameter(weights[name], requires_grad=False)

    def copy(self, weights: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """Copy weights, by name, into the block's own memory, which the first call allocates in `dtype` on `device`."""
        if next(self.block.parameters()).is_meta:
            self.put({name: torch.empty(tensor.shape, dtype=dtype, device=device) for name, tensor in weights.items()})
        for name, (module, part) in self._places.items():
            own = module._parameters[part]
            assert own is not None
            own.data.copy_(weights[name].to(device, non_blocking=True))

    def compute(self, number: int, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor | None]:
        self.block.self_attn.layer = number
        output: tuple[Tensor, Tensor | None] = self.block(x_TD, cos, sin, attend)
        return output


Compute = Callable[[int, Tensor, Tensor, Tensor, Attend], tuple[Tensor, Tensor | None]]


def in_turn(shelf: Shelf, source: Source) -> Compute:
    """Return a function that computes a layer on a CPU, with the weights in the read buffer or, if necessary, converted copies."""
    shell = Shell(source.config)

    def compute(number: int, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor | None]:
        weights = shelf.take(number)
        try:
            if source.as_it_lies:
                shell.put(weights)
            else:
                shell.copy(weights, source.dtype, x_TD.device)
            return shell.compute(number, x_TD, cos, sin, attend)
        finally:
            shelf.give()

    return compute


class Slot:
    """A layer's weights on a GPU, with events: `copied` when they have arrived, `used` when they may be overwritten."""

    def __init__(self, config: ModelConfig) -> None:
        self.shell, self.number = Shell(config), -1
        self.copied, self.used = torch.cuda.Event(), torch.cuda.Event()


class Copies:
    """Layers on a GPU: while one layer computes, the next layer in `numbers` is copied into the other of two slots."""

    def __init__(self, shelf: Shelf, source: Source, numbers: Sequence[int], device: torch.device) -> None:
        self.shelf, self.dtype, self.device = shelf, source.dtype, device
        self._next = dict(zip(numbers, [*numbers[1:], *numbers[:1]], strict=True))
        self._slots = [Slot(source.config) for _ in range(2)]
        self._stream = torch.cuda.Stream(device)
        self._taken: list[Slot] = []  # slots whose weights are still being copied from the shelf

    def __call__(self, number: int, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor | None]:
        slot = next((slot for slot in self._slots if slot.number == number), None) or self._fetch(number)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(slot.copied)
        output = slot.shell.compute(number, x_TD, cos, sin, attend)
        slot.used.record(current)
        following = self._next[number]
        if all(slot.number != following for slot in self._slots):
            self._slots.sort(key=lambda other: other is slot)  # the other slot first
            self._fetch(following)
        return output

    def _fetch(self, number: int) -> Slot:
        """Start a copy of a layer's weights into the first slot, in the background; return the slot."""
        slot = self._slots[0]
        while self._taken:
            self._taken.pop(0).copied.synchronize()
            self.shelf.give()
        weights = self.shelf.take(number)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.used)
            slot.shell.copy(weights, self.dtype, self.device)
            slot.copied.record(self._stream)
        slot.number = number
        self._taken.append(slot)
        return slot


class Streamed(nn.Module):
    """A layer whose weights are loaded for each pass."""

    def __init__(self, compute: Compute, number: int) -> None:
        super().__init__()
        self._compute, self.number = compute, number

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor | None]:
        return self._compute(self.number, x_TD, cos, sin, attend)


def exact_pass(model: Transformer) -> Pass:
    """Return an offloaded model's generation pass on a CPU: exact operators, bit-identical to the compiled loops for models in memory."""
    decoder_of = weakref.ref(model.model)  # weak, because the decoder holds the pass

    def run(x_ND: Tensor, layers: Layers, plan: PagedPlan, windows: Sequence[int | None]) -> Tensor:
        decoder = decoder_of()
        assert decoder is not None
        with exact_passes(x_ND.dtype, x_ND.device):
            return by_operators(decoder, x_ND, layers, plan, windows)

    return run


def spread(streamed: int, layers: int) -> list[int]:
    """Return the indices of the streamed layers, spaced as evenly as possible, so that a layer is read while other layers compute."""
    return [i for i in range(layers) if (i + 1) * streamed // layers > i * streamed // layers]


def offload_layers(source: Source, level: Level, streamed: int, device: torch.device) -> tuple[Transformer, Shelf | None]:
    """Return the model with all but `streamed` layers on the device, and the shelf of streamed layers or None. Call once per source."""
    model, layers = source.take_empty(), source.config.num_hidden_layers
    numbers = spread(streamed, layers)
    state = source.rest(device)
    for number in sorted(set(range(layers)) - set(numbers)):
        state |= {f"{LAYERS}{number}.{name}": tensor for name, tensor in source.layer(number, device).items()}
    model.load_state_dict(state, assign=True, strict=False)
    if source.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.requires_grad_(False)
    cuda = device.type == "cuda"
    here = [p for p in model.parameters() if not p.is_meta]
    if numbers and not cuda and fits(source.config, nn.ModuleList([Shell(source.config).block]), here):
        model.model.by_loops = exact_pass(model)  # type: ignore[assignment]
    if not numbers:
        return model, None
    shelf = Host(source, numbers) if level == "host" else Disk(source, numbers, 3 if cuda else 2, cuda)
    compute: Compute = Copies(shelf, source, numbers, device) if cuda else in_turn(shelf, source)
    model.model.layers = nn.ModuleList(Streamed(compute, n) if n in numbers else block for n, block in enumerate(model.model.layers))
    return model, shelf
