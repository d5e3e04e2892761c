"""Definitions of all heuristic signals in plain Python, one function per signal. The compiled measurement must give equal values.

`puna.kernels.text.words` splits texts into words. Importing this package declares the signals.
"""

from puna.stages.curate.signals.definitions import counts, gopher, lines, notices

__all__ = ["counts", "gopher", "lines", "notices"]
