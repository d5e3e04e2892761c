"""The contract between a stage and its caller: declaration, configuration, inputs, and execution."""

from puna.models.settings import did_you_mean
from puna.stages.contract.config import SeededConfig, StageConfig, parse
from puna.stages.contract.declaration import (
    REGISTRY,
    Answers,
    Classifier,
    Documents,
    Evaluation,
    Facts,
    InputFacts,
    Instructions,
    Kind,
    Lists,
    Mixture,
    Model,
    Pages,
    Preferences,
    Prompts,
    Reads,
    Signals,
    Stage,
    TextSample,
    Tokenizer,
    Tokens,
    Value,
    stage,
)
from puna.stages.contract.execute import Outcome, execute, identify, perform, reusable
from puna.stages.contract.external import External, ExternalFile
from puna.stages.contract.run import MACHINE_ERRORS, Figure, Listener, StageRun
from puna.stages.contract.signals import FAILURE, SIGNALS, Signal, declare_signal, signal, signals_of

__all__ = [
    "FAILURE", "MACHINE_ERRORS", "REGISTRY", "SIGNALS", "Answers", "Classifier", "Documents", "Evaluation", "External", "ExternalFile",
    "Facts", "Figure", "InputFacts", "Instructions", "Kind", "Listener", "Lists", "Mixture", "Model", "Outcome", "Pages",
    "Preferences", "Prompts", "Reads", "SeededConfig", "Signal", "Signals", "Stage", "StageConfig", "StageRun", "TextSample", "Tokenizer",
    "Tokens", "Value", "declare_signal", "did_you_mean", "execute", "identify", "parse", "perform", "reusable", "signal", "signals_of",
    "stage",
]  # fmt: skip
