"""Generation: a paged cache, continuous batching, sampling; see `engine.py`."""

from puna.models.generation.engine import Completion, Engine
from puna.models.generation.sampling import SamplingParams

__all__ = ["Completion", "Engine", "SamplingParams"]
