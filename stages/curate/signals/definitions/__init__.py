"""Definitions of the heuristic signals of a text in plain Python, one function per signal. Compiled measurements give equal values.

`puna.kernels.text.words` splits texts into words. Importing this package declares the signals."""

from puna.stages.curate.signals.definitions import counts, gopher, lines, notices

__all__ = ["counts", "gopher", "lines", "notices"]
