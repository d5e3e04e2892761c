"""A recipe: one configuration of every stage, from a YAML file, checked as a whole before anything runs."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import Field

from puna.stages.align.average import AverageConfig
from puna.stages.align.data_quality import DataQualityConfig
from puna.stages.align.dpo import DpoConfig
from puna.stages.align.instructions import InstructionsConfig
from puna.stages.align.ppo import PpoConfig
from puna.stages.align.preferences import PreferencesConfig
from puna.stages.align.prompts import PromptsConfig
from puna.stages.align.rejection_sample import RejectionSampleConfig
from puna.stages.align.reward_model import RewardModelConfig
from puna.stages.align.sample import SampleConfig
from puna.stages.align.sft import SftConfig
from puna.stages.contract import REGISTRY, SeededConfig, Stage, StageConfig, parse
from puna.stages.curate.code_reasoning import CodeReasoningConfig
from puna.stages.curate.decontaminate import DecontaminateConfig
from puna.stages.curate.domains import DomainsConfig
from puna.stages.curate.extract import ExtractConfig
from puna.stages.curate.heuristics import HeuristicsConfig
from puna.stages.curate.ingest import IngestConfig
from puna.stages.curate.language import LanguageConfig
from puna.stages.curate.line_dedup import LineDedupConfig
from puna.stages.curate.minhash_dedup import MinhashDedupConfig
from puna.stages.curate.mix import MixConfig
from puna.stages.curate.pii import PiiConfig
from puna.stages.curate.quality import QualityConfig
from puna.stages.curate.select import SelectConfig
from puna.stages.curate.semantic_dedup import SemanticDedupConfig
from puna.stages.curate.substring_dedup import SubstringDedupConfig
from puna.stages.curate.url_dedup import UrlDedupConfig
from puna.stages.curate.url_filter import UrlFilterConfig
from puna.stages.experiments.mix_experiment import MixExperimentConfig
from puna.stages.experiments.scaling_law import ScalingLawConfig
from puna.stages.pretrain.evaluate import EvaluateConfig
from puna.stages.pretrain.pretrain import PretrainConfig
from puna.stages.pretrain.split import SplitConfig
from puna.stages.pretrain.tokenize import TokenizeConfig
from puna.stages.pretrain.tokenizer import TokenizerConfig
from puna.storage import PunaError

FLOWS = ("pipeline", "curate", "base", "align")
RECIPES = Path(__file__).with_name("recipes")


class Recipe(StageConfig):
    """Every stage's configuration. A stage that runs twice in a flow has a field for each time."""

    name: str = Field(description="Name of the recipe")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of every stage that does not set its own")
    rounds: int = Field(2, ge=0, le=20, description="Rounds of alignment")
    ingest: IngestConfig = Field(IngestConfig(), description="Reading pages")
    extract: ExtractConfig = Field(ExtractConfig(), description="HTML to text")
    url_filter: UrlFilterConfig = Field(UrlFilterConfig(), description="Dropping sites by address")
    url_dedup: UrlDedupConfig = Field(UrlDedupConfig(), description="Newest version of each address")
    language: LanguageConfig = Field(LanguageConfig(), description="Language of each document")
    heuristics: HeuristicsConfig = Field(HeuristicsConfig(), description="Numbers about each document")
    code_reasoning: CodeReasoningConfig = Field(CodeReasoningConfig(), description="Classifiers of pages with code and pages that reason")
    select: SelectConfig = Field(SelectConfig(), description="Rules on those numbers")
    pii: PiiConfig = Field(PiiConfig(), description="Masking personal data")
    minhash_dedup: MinhashDedupConfig = Field(MinhashDedupConfig(), description="Near-duplicate documents")
    semantic_dedup: SemanticDedupConfig | None = Field(None, description="Documents in nearly the same words, in any order; null: none")
    line_dedup: LineDedupConfig = Field(LineDedupConfig(), description="Lines that repeat across documents")
    substring_dedup: SubstringDedupConfig | None = Field(None, description="Passages that repeat across documents; null: none")
    quality: QualityConfig | None = Field(
        QualityConfig(), description="Quality classifier, learned from the sources that it names as good; null: none"
    )
    domains: DomainsConfig | None = Field(DomainsConfig(), description="Knowledge types; null: none, in the flow curate alone")
    select_model: SelectConfig = Field(SelectConfig(), description="Rules on the classifiers' scores")
    decontaminate: DecontaminateConfig = Field(DecontaminateConfig(), description="Removing evaluation data")
    split: SplitConfig = Field(SplitConfig(), description="Pages held out from all training, and their knowledge types")
    tokenizer: TokenizerConfig = Field(TokenizerConfig(), description="Training the tokenizer")
    mix_experiment: MixExperimentConfig = Field(MixExperimentConfig(), description="Small runs that choose the mixture")
    mix: MixConfig = Field(MixConfig(), description="Weights of knowledge types")
    tokenize: TokenizeConfig = Field(TokenizeConfig(), description="Packing tokens")
    scaling_law: ScalingLawConfig = Field(ScalingLawConfig(), description="Small runs that predict the large one")
    pretrain: PretrainConfig = Field(PretrainConfig(), description="Pretraining")
    evaluate_base: EvaluateConfig = Field(EvaluateConfig(), description="Evaluating the base model")
    prompts: PromptsConfig = Field(description="Tasks, and the prompts whose gold answers the first finetuning learns")
    round_prompts: int = Field(400, ge=1, description="New training prompts of each task in each round")
    instructions: InstructionsConfig = Field(InstructionsConfig(), description="First instructions, from gold answers")
    sft_first: SftConfig = Field(SftConfig(), description="First supervised finetuning")
    sft_lora: SftConfig = Field(SftConfig(method="lora"), description="Finetuning of the second model that answers in round 1")
    sample: SampleConfig = Field(SampleConfig(), description="Answers from two models")
    preferences: PreferencesConfig = Field(PreferencesConfig(), description="Ranked answers")
    reward_model: RewardModelConfig = Field(RewardModelConfig(), description="Reward model")
    rejection_sample: RejectionSampleConfig = Field(RejectionSampleConfig(), description="Best of K answers")
    data_quality: DataQualityConfig = Field(DataQualityConfig(), description="Rules on instructions")
    sft: SftConfig = Field(SftConfig(), description="Supervised finetuning of each round")
    dpo: DpoConfig = Field(DpoConfig(), description="Direct preference optimization of each round")
    ppo: PpoConfig | None = Field(None, description="PPO of the last round, after DPO; null: none")
    average: AverageConfig = Field(AverageConfig(), description="Averaging of weights")
    evaluate: EvaluateConfig = Field(EvaluateConfig(), description="Evaluating an aligned model")


C = TypeVar("C", bound=StageConfig)


def in_round(config: C, number: int) -> C:
    """The configuration of a stage in round `number` (from 1): each round draws its own random numbers."""
    seed = getattr(config, "seed", None)
    return config if seed is None else config.model_copy(update={"seed": (seed + 1_000_003 * number) % 2**31})


def round_prompts(r: Recipe, number: int) -> PromptsConfig:
    """New training prompts for round `number`: the slice after those of the first finetuning and earlier rounds.

    The seed and the held-out share stay, so that no held-out question becomes a training question.
    """
    skip = r.prompts.train + (number - 1) * r.round_prompts
    return r.prompts.model_copy(update={"train": r.round_prompts, "heldout": 0, "skip": r.prompts.skip + skip})


def load_stages() -> dict[str, Stage]:
    """Every stage of Puna by name."""
    import puna.stages

    for module in pkgutil.walk_packages(puna.stages.__path__, "puna.stages."):
        if not module.name.startswith("puna.stages.contract"):
            importlib.import_module(module.name)
    return dict(sorted(REGISTRY.items()))


def load(name: str, changes: list[str] | None = None) -> Recipe:
    """A recipe by name or file, with `stage.field=value` changes; an unknown or wrong field is named."""
    file = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(f.stem for f in RECIPES.glob("*.yaml")))
        raise PunaError(f"recipe {name}: not found; recipes are {known}, or give a YAML file")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise PunaError(f"recipe {file}: {error}") from error
    if not isinstance(values, dict):
        raise PunaError(f"recipe {file}: is not a mapping of stages")
    values.setdefault("name", file.stem)
    for change in changes or []:
        overridden(values, change)
    seed = values.get("seed", 0)
    for field, info in Recipe.model_fields.items():
        kinds = get_args(info.annotation) or (info.annotation,)
        if any(isinstance(kind, type) and issubclass(kind, SeededConfig) for kind in kinds):
            # A stage that may be left out is not brought in by its seed.
            stage_values = values.get(field) if info.default is None else values.setdefault(field, {})
            if isinstance(stage_values, dict):
                stage_values.setdefault("seed", seed)
    try:
        return parse(Recipe, values, "")
    except PunaError as error:
        if file.parent == RECIPES:  # what is wrong there is what --set changed
            raise
        raise PunaError(f"recipe {file}: {error}") from error


def overridden(values: dict[str, Any], change: str) -> None:
    """Apply `a.b=value` (a YAML value) to nested values."""
    path, sign, text = change.partition("=")
    if not sign or not path:
        raise PunaError(f"--set {change}: write FIELD=VALUE, for example select.gopher_quality.min_words=60")
    *groups, field = path.split(".")
    for group in groups:
        inner = values.setdefault(group, {})
        if inner is None:
            inner = values[group] = {}
        if not isinstance(inner, dict):
            raise PunaError(f"--set {change}: {group} is not a group of fields")
        values = inner
    try:
        values[field] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PunaError(f"--set {change}: {error}") from error
