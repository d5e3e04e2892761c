"""What every heuristic signal is, in plain Python: one function each, which the compiled measurement must equal.

Words are those of `puna.kernels.text.words` (HeuristicsConfig.words=universal); where other words are chosen, the same is
measured of those. Importing this package declares the signals.
"""

from puna.stages.curate.signals.definitions import counts, dolma, gopher, lines, notices

__all__ = ["counts", "dolma", "gopher", "lines", "notices"]
