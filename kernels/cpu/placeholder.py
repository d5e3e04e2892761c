"""A kernel before its first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Compile = Callable[[Callable[..., Any]], Any]
_one_thread = threading.RLock()


class Placeholder:
    """A kernel that is compiled at its first use."""

    def __init__(self, function: Callable[..., Any], compile: Compile) -> None:
        self.function, self._compile = function, compile
        self._compiled: Any = None

    def compiled(self) -> Any:
        """Return the compiled function. Replace all placeholders among its file's globals before any thread gets it."""
        with _one_thread:
            if self._compiled is None:
                self._compiled = self._compile(self.function)
                scope = self.function.__globals__
                for name, value in list(scope.items()):
                    if isinstance(value, Placeholder):
                        scope[name] = value.compiled()
            return self._compiled

    def __getitem__(self, grid: Any) -> Any:
        return self.compiled()[grid]

    def __call__(self, *args: Any) -> Any:
        return self.compiled()(*args)
