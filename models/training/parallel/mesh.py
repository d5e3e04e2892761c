"""The ranks of a layout: this process's place on each axis, and its process groups."""

from __future__ import annotations

import atexit
import copy
import itertools
import json
import math
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from puna.models import progress
from puna.models.training.parallel.layout import AXES, BUCKET, READERS, Layout

T = TypeVar("T")

together = False  # true while all processes share one training run. Otherwise each process trains its own model.
TIMEOUT = timedelta(minutes=10)  # time after which a rank that waits for another rank raises an error
JOINING = timedelta(minutes=10)  # time within which all processes must join
POLL, LONGEST_POLL, CHECK = 0.01, 0.25, 20  # seconds between looks for other ranks, at first and later; looks between checks of progress
MISSING = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_store: Any = None
_meetings: Counter[str] = Counter()  # of each group


def store() -> Any:
    """Return the key-value store that all processes share; None before `join`."""
    return _store


def join(device: str = "cpu", backend: str = "") -> None:
    """Join the process group of the processes that torchrun started; return at once if this process has joined. backend: in place of NCCL.

    Raise ValueError if an environment variable is missing, ConnectionError if rank 0 or another rank cannot be reached."""
    if dist.is_initialized():
        return
    if missing := [name for name in MISSING if not os.environ.get(name)]:
        raise ValueError(f"this process has no layout: {', '.join(missing)} not set, or empty; start it with torchrun, or with --processes")
    host, port, rank, world = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(host, int(port), world, first, JOINING, wait_for_workers=False)  # type: ignore[attr-defined]
    except (dist.DistError, RuntimeError, ValueError) as error:
        does, remedy = ("listen", "; set MASTER_PORT to a free port") if first else ("reach rank 0", "")
        why = str(error).splitlines()[0]
        raise ConnectionError(f"rank {rank} of {world} cannot {does} at {host}:{port}: {why}{remedy}") from error
    if device == "cuda":  # "cuda" is then this rank's own GPU
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    backend = backend or ("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")  # texts and counts are exchanged in the host's memory
    global _store
    try:
        _store = dist.PrefixStore(_attempt(store, rank, world), store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=_store, rank=rank, world_size=world, timeout=TIMEOUT)
    except (TimeoutError, RuntimeError) as error:
        hint = "; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface at which the others reach it"
        which = str(error).splitlines()[0] + hint * isinstance(error, RuntimeError)
        raise ConnectionError(f"rank {rank} of {world} found the store at {host}:{port}, but could not connect to all: {which}") from error
    atexit.register((ended := threading.Event()).set)
    threading.Thread(target=_beat, args=(f"beat-{rank}", ended), daemon=True).start()


def _beat(key: str, ended: threading.Event) -> None:
    """Tell the other ranks, until this process ends, that its work goes on: by heartbeats that stop if its thread hangs."""
    seen = -1
    with suppress(dist.DistError):  # the process that has the store is gone
        while not ended.wait(progress.BEAT):
            if progress.count != seen or time.monotonic() < progress.until:
                seen = progress.count
                _store.add(key, 1)


def wait_for(key: str, ranks: Iterable[int], name: Callable[[int], str], patience: float) -> str:
    """Return the text that the store has at `key`, once set. Until then, each of `ranks` without a key of its own (`KEY-RANK`) must make
    progress. Raise DistError if one of them fails, or makes none for `patience` seconds."""
    beats, since = dict[int, int](), dict[int, float]()
    for turn in itertools.count():
        if _store.check([key]):
            text: str = _store.get(key).decode()
            return text
        for rank in ranks if turn % CHECK == 0 else ():
            if _store.check([f"{key}-{rank}"]):
                continue
            if _store.check([f"words-{rank}"]):
                raise dist.DistError(f"{name(rank)} has failed")
            beat, now = _store.add(f"beat-{rank}", 0), time.monotonic()
            if beats.get(rank) != beat:
                if rank in beats:
                    progress.advance()  # ranks that wait for this one see that the work goes on
                beats[rank], since[rank] = beat, now
            elif now - since[rank] > patience:
                raise dist.DistError(f"{name(rank)} has made no progress for {now - since[rank]:.0f} s")
        time.sleep(min(POLL * (1 + turn // CHECK), LONGEST_POLL))  # many ranks may wait for long
    raise AssertionError


def _attempt(store: Any, rank: int, world: int) -> str:
    """Return the name that rank 0 draws for this start of all ranks, once all have learned it. Raise TimeoutError if a rank does not come.

    An agent's store keeps the keys of earlier starts, and no start number is common to all agents: so each rank asks with a random word."""
    own, until = uuid.uuid4().hex, time.monotonic() + TIMEOUT.total_seconds()
    if rank:
        store.set(f"asks-{rank}", own)
        try:
            store.wait([f"answer-{own}"], TIMEOUT)
        except dist.DistStoreError as error:
            raise TimeoutError(f"rank 0 did not join within {TIMEOUT}: start all {world}") from error
        name: str = store.get(f"answer-{own}").decode()
        store.set(f"{name}-{rank}", "")
        return name
    while late := [other for other in range(1, world) if not store.check([f"{own}-{other}"])]:
        if time.monotonic() > until:
            raise TimeoutError(f"rank {', '.join(map(str, late))} did not join within {TIMEOUT}: start all {world}")
        for other in late:
            if store.check([f"asks-{other}"]):
                store.set(f"answer-{store.get(f'asks-{other}').decode()}", own)
        time.sleep(0.05)
    return own


def is_of_exchange(error: RuntimeError) -> bool:
    """True if an error comes from an exchange between ranks. Gloo's errors have no class of their own, but name its source files."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


class Mesh:
    """A rank's place in a layout. The constructor raises ValueError unless as many processes run as the layout has.

    members: the processes, by their rank in the default group; None: all. `at` has this rank's place on each axis, `index` its place among
    the members. In a layout of one process there are no groups, and every exchange returns at once. Non-members only help to create the
    groups. `saving`: this mesh with a separate process group, for a thread that saves a state while the training continues."""

    def __init__(self, layout: Layout, members: Sequence[int] | None = None) -> None:
        self.layout = layout
        self._groups: dict[str, Any] = {}
        self._ranks: dict[str, list[int]] = {}
        self.lanes: list[Any] = []
        if layout.processes == 1:
            self.index, self.at, self.everyone = 0, dict.fromkeys(AXES, 0), None
            return
        if not dist.is_initialized():
            raise ValueError(f"the layout {layout} needs {layout.processes} processes, and this one runs alone: start it with torchrun")
        members = list(range(dist.get_world_size())) if members is None else list(members)
        if len(members) != layout.processes:
            raise ValueError(f"the layout {layout} needs {layout.processes} processes; {len(members)} were started")
        sizes = [layout.size(axis) for axis in AXES]
        places = list(itertools.product(*map(range, sizes)))
        self.index = members.index(dist.get_rank()) if dist.get_rank() in members else -1
        self.at = dict(zip(AXES, places[self.index], strict=True))
        self.everyone = group_of(members)
        self.saving = copy.copy(self)
        self.saving.everyone = group_of(members, "saving")
        if layout.pipeline > 1:
            self.lanes = [message_group(number) for number in range(2 if layout.virtual_stages == 1 else 4)]
        for number, axis in enumerate(AXES):
            if sizes[number] == 1:
                continue
            lines: dict[tuple[int, ...], list[int]] = {}
            for member, place in zip(members, places, strict=True):
                lines.setdefault(place[:number] + place[number + 1 :], []).append(member)
            for line in lines.values():  # all ranks make all groups, in one order
                group = group_of(line)
                if dist.get_rank() in line:
                    self._ranks[axis], self._groups[axis] = line, group

    def size(self, axis: str) -> int:
        return self.layout.size(axis)

    def group(self, axis: str) -> Any:
        """Return this rank's process group along an axis; None if the axis has size 1."""
        return self._groups.get(axis)

    def rank(self, axis: str, place: int) -> int:
        """Return the default-group rank of the process at `place` on an axis and at this rank's places on all other axes."""
        return self._ranks[axis][place]

    @property
    def reader(self) -> int:
        """Return this rank's data-parallel index. Ranks with the same index read the same micro-batches."""
        place = 0
        for axis in READERS:
            place = place * self.size(axis) + self.at[axis]
        return place

    @property
    def is_last_stage(self) -> bool:
        """True if this rank has the last layers of a model, and so its head."""
        return self.at["pipeline"] == self.size("pipeline") - 1

    @property
    def counts(self) -> bool:
        """True if this rank's losses and metrics enter the totals; the other ranks compute the same values again, or no loss."""
        return self.at["context"] == self.at["tensor"] == 0 and self.is_last_stage

    def add(self, values: torch.Tensor, axis: str) -> torch.Tensor:
        """Return `values` summed over the ranks of an axis, in place."""
        if (group := self.group(axis)) is not None:
            dist.all_reduce(values, group=group)
        return values

    def add_everywhere(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` summed over all ranks, in place; all ranks get the same bits."""
        if self.everyone is not None:
            dist.all_reduce(values, group=self.everyone)
        return values

    def of_first(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rank's values on all ranks, in place."""
        return self.add_everywhere(values if self.index == 0 else values.zero_())

    def agree(self, wish: bool) -> bool:
        """True if `wish` is true on any rank."""
        return wish if self.everyone is None else bool(self.add_everywhere(torch.tensor(float(wish))))

    def wait(self) -> None:
        """Wait until all ranks have called this method."""
        if self.everyone is not None:
            dist.barrier(group=self.everyone)

    def meet(self) -> None:
        """Wait for the other ranks, each of which may have work for longer than `TIMEOUT`; see `wait_for`."""
        if self.everyone is None:
            return
        ranks, own, group = dist.get_process_group_ranks(self.everyone), dist.get_rank(), self.everyone.group_name
        _meetings[group] += 1
        key, before = (f"met-{group}-{number}" for number in (_meetings[group], _meetings[group] - 1))
        if not (first := own == ranks[0]):
            _store.set(f"{key}-{own}", "")
        if _store.add(f"{key}-count", 1) == len(ranks):
            _store.set(key, "")
        # The first rank watches all; the others watch it, for a little longer, so that its error comes first.
        wait_for(key, ranks[1:] if first else ranks[:1], "rank {}".format, TIMEOUT.total_seconds() + (not first) * 2 * progress.BEAT)
        for old in (before, f"{before}-count") if first else (f"{before}-{own}",):  # all have left that meeting
            _store.delete_key(old)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait for all ranks after the work in the context; raise an error on all ranks if the work failed on one."""
        error: Exception | None = None
        try:
            yield
        except Exception as problem:  # noqa: BLE001 (raised once the others know)
            error = problem
        words = self.gather_texts("-" if error is None else f"{error} ")
        if failed := [f"rank {rank} could not read or write its part of the state: {one}" for rank, one in enumerate(words) if one != "-"]:
            raise error or OSError(failed[0].rstrip())

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, in order of rank; none may be empty. Ranks may come late, see `meet`."""
        if self.everyone is None:
            return [text]
        self.meet()
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.layout.processes, dtype=torch.int64)
        sizes[self.index] = len(own)
        self.add_everywhere(sizes)
        padded = [torch.zeros(int(sizes.max()), dtype=torch.uint8) for _ in sizes]
        padded[self.index][: len(own)] = own
        dist.all_gather(padded, padded[self.index].clone(), group=self.everyone)
        return [bytes(part[:size].numpy()).decode() for part, size in zip(padded, sizes.tolist(), strict=True)]

    def dealt(self, items: Sequence[T], compute: Callable[[list[T]], list[Any]], key: Callable[[T], Hashable]) -> list[Any]:
        """Return, on all ranks, `compute`'s JSON value per item. Data-parallel ranks share the items; items of equal key go to one rank."""
        if self.everyone is None:
            return compute(list(items))
        count, owners = self.layout.readers, dict[Hashable, int]()
        owner_of = [owners.setdefault(key(item), len(owners) % count) for item in items]
        own = [item for item, owner in zip(items, owner_of, strict=True) if owner == self.reader]
        values = json.dumps(compute(own) if own else [])
        parts = [iter(json.loads(text)) for text in self.gather_texts(values if self.counts else "-") if text != "-"]
        return [next(parts[owner]) for owner in owner_of]


def layout_of(layout: Layout) -> Layout:
    """Return `layout`, repeated over all processes if they train together."""
    return layout.repeated(dist.get_world_size()) if together else layout


def measured_by_rank_0(name: str, measure: Callable[[], bool]) -> bool:
    """Return rank 0's measurement `name` on all ranks that train together; a process that trains alone measures for itself."""
    if not together:
        return measure()
    if dist.get_rank() == 0:
        _store.set(name, str(int(measure())))
    return bool(int(_store.get(name)))


def broadcast_text(text: str, source: int, group: Any) -> str:
    """Return, on all ranks of a group, the text of the rank `source`."""
    size = torch.tensor(len(data := bytearray(text.encode())))
    dist.broadcast(size, source, group)
    content = torch.frombuffer(data, dtype=torch.uint8) if dist.get_rank() == source and data else torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(content, source, group)
    return bytes(content.numpy()).decode()


_GROUPS: dict[tuple[str | int, ...], Any] = {}


def group_of(ranks: Sequence[int], use: str = "") -> Any:
    """Return the process group of `ranks` for `use`; all processes must make the first call together. Groups for `saving` use gloo."""
    if not use and list(ranks) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    if (use, *ranks) not in _GROUPS:
        _GROUPS[use, *ranks] = dist.new_group(list(ranks), timeout=TIMEOUT, backend="gloo" if use == "saving" else None)
    return _GROUPS[use, *ranks]


def message_group(number: int) -> Any:
    """Return a process group of all processes, by its number; a pipeline divides its messages among such groups (`schedule.lane`).

    In one group, NCCL runs the exchanges of two ranks one after another: if both send first, each waits for the other to receive."""
    return group_of(range(dist.get_world_size()), f"messages {number}" if number else "")


def buckets(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of successive items whose sizes, in elements, add up to at least `BUCKET`; the last list may be smaller."""
    bucket, elements = list[T](), 0
    for item in items:
        bucket.append(item)
        elements += size(item)
        if elements >= BUCKET:
            yield bucket
            bucket, elements = [], 0
    if bucket:
        yield bucket


def by_load(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Return the indices of each part's items. The costliest items are assigned first, to the least loaded part (LPT rule, Graham 1969)."""
    loads, shares = [0] * parts, [list[int]() for _ in range(parts)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = loads.index(min(loads))
        loads[least] += costs[i]
        shares[least].append(i)
    return shares


def cut(size: int, parts: int) -> int:
    """Return the rows per part if `size` rows are divided into `parts` parts; only the last parts may be shorter or empty."""
    return math.ceil(size / parts)


def bounds(size: int, parts: int, part: int) -> tuple[int, int]:
    """Return the start and stop of part number `part` if `size` rows are divided into `parts` parts (see `cut`)."""
    step = cut(size, parts)
    return min(part * step, size), min((part + 1) * step, size)
