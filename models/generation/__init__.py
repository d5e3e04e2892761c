"""Generation: a paged cache, continuous batching, sampling; see `engine.py`."""

from puna.models.generation.engine import AnswerEngine, Completion, Engine
from puna.models.generation.sampling_params import SamplingParams

__all__ = ["AnswerEngine", "Completion", "Engine", "SamplingParams"]
