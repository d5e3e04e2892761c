"""Generation: a paged cache, continuous batching, sampling; see `engine.py`."""

from puna.models.generation.engine import Completion, Engine
from puna.models.sampling_params import SamplingParams

__all__ = ["Completion", "Engine", "SamplingParams"]
