"""Puna: raw web pages to an aligned language model.

    import puna
    store = puna.open("my-store")
    made = puna.run("heuristics", "documents@latest", store=store)
    puna.connect(store).sql("select rule, count(*) from newest.dropped group by rule").df()

Importing it loads nothing else; `open`, `run`, `run_flow` and `connect` load what they need when they are first used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Arrow's allocator reads these when it is loaded. A part's columns go where those of the part before were: what is freed is kept for
# a second (1,000 ms; given back after 10 else), and in pages of 4 kB, as the kernel clears those of 2 MB whole.
for _name, _value in (("MIMALLOC_PURGE_DELAY", "1000"), ("MIMALLOC_ALLOW_THP", "0")):
    os.environ.setdefault(_name, _value)

if TYPE_CHECKING:
    from puna.flows.cli.notebook import connect, open, run, run_flow

__all__ = ["connect", "open", "run", "run_flow"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'puna' has no attribute {name!r}")
    from puna.flows.cli import notebook

    return getattr(notebook, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
