"""The pages of the cache: references, and the tree of prefixes that stay between calls.

Sequences and the tree hold references to pages. Each whole page of tokens is a node below the page before it (a radix tree with a page per
node: SGLang, Zheng et al. 2024). When no page is free, pages held only by the tree are evicted, least recently used first. A page in use
keeps its predecessor in use, and paths are released from the end, so leaves are evicted first. Shared pages are copied before writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from puna.kernels.paged_attention import PAGE

Node = tuple[int, tuple[int, ...]]  # the previous page (-1 for the first page of a path), and this page's tokens


class OutOfPages(Exception):
    """An error: every page is in use."""


class PagePool:
    """A pool of `count` pages, with their references and the tree of prefixes."""

    def __init__(self, count: int) -> None:
        self.references = [0] * count
        self.free = list(range(count - 1, -1, -1))  # the page freed last, which may still be in the CPU's cache, is taken first
        self.tree: dict[Node, int] = {}  # the page of each node
        self.nodes: dict[int, Node] = {}  # the node of each page of the tree
        self.spare: dict[int, None] = {}  # pages that only the tree refers to, least recently used first
        self.peak = 0  # maximum number of pages that sequences referred to at once

    @property
    def available(self) -> int:
        return len(self.free) + len(self.spare)

    def take(self) -> int:
        """Return a page with one reference, evicted from the tree if none is free; raise OutOfPages if all pages are in use."""
        if not self.free:
            if not self.spare:
                raise OutOfPages
            page = next(iter(self.spare))  # the tree's least recently used
            del self.spare[page], self.tree[self.nodes.pop(page)]
            self.free.append(page)
        page = self.free.pop()
        self.references[page] = 1
        self.peak = max(self.peak, len(self.references) - self.available)
        return page

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.spare.pop(page, None)
            self.references[page] += 1
        self.peak = max(self.peak, len(self.references) - self.available)

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page, the last page first, so that a path is released from its end."""
        for page in reversed(pages):
            self.references[page] -= 1
            if not self.references[page]:
                self.free.append(page)
            elif self.references[page] == 1 and page in self.nodes:
                self.spare[page] = None

    def writable(self, pages: list[int], index: int) -> tuple[int, int] | None:
        """Replace `pages[index]` by another page if it is shared; return the pages (from, to) to copy, or None. Errors: see `take`."""
        page = pages[index]
        if self.references[page] == 1:
            return None
        fresh = self.take()
        self.release([page])
        pages[index] = fresh
        return page, fresh

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages of the longest cached prefix of whole pages, with a reference added to each."""
        pages: list[int] = []
        for node in _path(tokens, pages):
            if node not in self.tree:
                break
            pages.append(self.tree[node])
        self.share(pages)
        return pages

    def keep(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Put a path's whole pages into the tree, up to the first page whose tokens the tree already holds in another page."""
        for page, node in zip(pages, _path(tokens, pages), strict=False):
            owner = self.tree.setdefault(node, page)
            if owner != page:  # no lookup would find this path's pages below another path's page
                return
            if page not in self.nodes:
                self.nodes[page] = node
                self.references[page] += 1

    def forget(self) -> None:
        """Empty the tree, whose pages were computed with other weights."""
        for page in list(self.nodes):
            del self.nodes[page]
            self.release([page])
        self.tree, self.spare = {}, {}


def _path(tokens: Sequence[int], pages: Sequence[int]) -> Iterator[Node]:
    """Yield the tree node of each whole page of `tokens`: (previous page, this page's tokens). `pages` may grow between two nodes."""
    for index in range(len(tokens) // PAGE):
        yield pages[index - 1] if index else -1, tuple(tokens[index * PAGE : (index + 1) * PAGE])


class Room(NamedTuple):
    """The limits of generation on a device: concurrent answers, tokens per step, bytes of keys and values."""

    sequences: int
    step_tokens: int
    memory: int


USUAL_ANSWERS = {"cpu": 64, "cuda": 256}  # default number of concurrent answers, by device type
USUAL_STEP = {"cpu": 2048, "cuda": 8192}  # default tokens of a generation step, by device type
CPU_KEYS = 1 << 30  # default bytes of keys and values on a CPU; on a GPU half of the free memory


def generation_room(device: torch.device, sequences: int | None, step_tokens: int | None, memory: int | None) -> Room:
    """Return the given limits, with the device's defaults in place of None; raise ValueError for a limit below 1."""
    if any(own is not None and own < 1 for own in (sequences, step_tokens, memory)):
        raise ValueError(f"sequences, step_tokens and memory must be at least 1, not {sequences}, {step_tokens} and {memory}")
    key_bytes = CPU_KEYS
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # memory that torch has cached
        key_bytes = (torch.cuda.mem_get_info(device)[0] + unused) // 2
    usual = Room(USUAL_ANSWERS[device.type], USUAL_STEP[device.type], key_bytes)
    return Room(*(room if own is None else own for own, room in zip((sequences, step_tokens, memory), usual, strict=True)))
