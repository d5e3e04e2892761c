"""Which page of the cache holds what: references, and the tree of prefixes that are kept between calls.

A page belongs to everybody who refers to it: sequences, and the tree. The tree has a node for each whole page of tokens
below the page before it (a radix tree whose edges are pages: SGLang's, Zheng et al. 2024). A page that only the tree refers
to is free to be taken when no other is left, the one unused for longest first; a node's parent is in use whenever it is, so
leaves go before what they hang on. Whoever writes to a page that others see writes to a copy.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from puna.kernels.paged_attention import PAGE


@dataclass(eq=False)
class Node:
    """A page of the tree; the root has none."""

    page: int = -1
    parent: Node | None = None
    key: tuple[int, ...] = ()
    used: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)


class OutOfPages(Exception):
    """Every page is in use."""


class PagePool:
    """`count` pages with their references and the tree of prefixes."""

    def __init__(self, count: int) -> None:
        self.references = [0] * count
        self.free = list(range(count - 1, -1, -1))  # the page freed last is the warmest
        self.root = Node()
        self.nodes: dict[int, Node] = {}  # by page
        self.spare = 0  # pages that only the tree refers to
        self.peak = 0  # most pages that sequences referred to at once
        self._clock = 0
        self._unused: list[tuple[int, int]] = []  # heap of (when last used, page): candidates, checked when taken

    @property
    def available(self) -> int:
        """Pages that can be had: free ones, and those of the tree that nobody else uses."""
        return len(self.free) + self.spare

    def take(self) -> int:
        """A page of one's own. OutOfPages when all are in use."""
        if not self.free:
            self._evict()
        page = self.free.pop()
        self.references[page] = 1
        self.peak = max(self.peak, len(self.references) - self.available)
        return page

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each."""
        for page in pages:
            if self.references[page] == 1 and page in self.nodes:
                self.spare -= 1
            self.references[page] += 1
        self.peak = max(self.peak, len(self.references) - self.available)

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each; the last before the first, so that a path is given up from its end."""
        self._clock += 1
        for page in reversed(pages):
            self.references[page] -= 1
            node = self.nodes.get(page)
            if node is None:
                if not self.references[page]:
                    self.free.append(page)
            elif self.references[page] == 1:
                self.spare += 1
                self._offer(node)

    def writable(self, pages: list[int], index: int) -> tuple[int, int] | None:
        """Make pages[index] its owner's alone. (copied from, copied to) where others see it, else None."""
        page = pages[index]
        if self.references[page] == 1:
            return None
        fresh = self.take()
        self.release([page])
        pages[index] = fresh
        return page, fresh

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest kept prefix of whole pages, with a reference to each."""
        node, pages = self.root, []
        for start in range(0, len(tokens) - PAGE + 1, PAGE):
            child = node.children.get(tuple(tokens[start : start + PAGE]))
            if child is None:
                break
            pages.append(child.page)
            node = child
        self.share(pages)
        return pages

    def keep(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Put a path's whole pages into the tree, as far as it has no other page of the same tokens."""
        node = self.root
        for index in range(len(tokens) // PAGE):
            key = tuple(tokens[index * PAGE : (index + 1) * PAGE])
            child = node.children.get(key)
            if child is None:
                page = pages[index]
                child = node.children[key] = Node(page, node, key)
                self.nodes[page] = child
                self.references[page] += 1
            elif child.page != pages[index]:  # below a page that this path does not hold, its own would be kept in vain
                return
            node = child

    def forget(self) -> None:
        """Empty the tree: what it holds was computed with other weights."""
        for page in list(self.nodes):
            del self.nodes[page]
            self.references[page] -= 1
            if not self.references[page]:
                self.free.append(page)
        self.root, self.spare, self._unused = Node(), 0, []

    def _offer(self, node: Node) -> None:
        if not node.children and node is not self.root and self.references[node.page] == 1:
            node.used = self._clock
            heapq.heappush(self._unused, (self._clock, node.page))

    def _evict(self) -> None:
        """Free the leaf of the tree that was unused for longest."""
        while self._unused:
            used, page = heapq.heappop(self._unused)
            node = self.nodes.get(page)
            if node is None or node.used != used or node.children or self.references[page] != 1:
                continue
            assert node.parent is not None
            del node.parent.children[node.key], self.nodes[page]
            self.references[page] = 0
            self.spare -= 1
            self.free.append(page)
            self._offer(node.parent)
            return
        raise OutOfPages
