"""Definitions of all heuristic signals in plain Python: one function each, whose values the compiled measurement must equal.

Words are those of `puna.kernels.text.words`. Importing this package declares the signals.
"""

from puna.stages.curate.signals.definitions import counts, gopher, lines, notices

__all__ = ["counts", "gopher", "lines", "notices"]
