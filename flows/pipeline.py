"""The flows, as their DAGs and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from puna.flows.adapter import publish, step
from puna.flows.recipe import Recipe, in_round, round_prompts
from puna.stages.align.average import average
from puna.stages.align.data_quality import data_quality
from puna.stages.align.dpo import dpo
from puna.stages.align.instructions import instructions
from puna.stages.align.ppo import ppo
from puna.stages.align.preferences import preferences
from puna.stages.align.prompts import prompts
from puna.stages.align.rejection_sample import rejection_sample
from puna.stages.align.reward_model import reward_model
from puna.stages.align.sample import sample
from puna.stages.align.sft import sft
from puna.stages.contract import External, Stage, StageConfig, Value
from puna.stages.curate.code_reasoning import code_reasoning
from puna.stages.curate.decontaminate import decontaminate
from puna.stages.curate.domains import domains
from puna.stages.curate.extract import extract
from puna.stages.curate.heuristics import heuristics
from puna.stages.curate.ingest import check_inputs, ingest
from puna.stages.curate.language import language
from puna.stages.curate.line_dedup import line_dedup
from puna.stages.curate.minhash_dedup import minhash_dedup
from puna.stages.curate.mix import mix
from puna.stages.curate.pii import pii
from puna.stages.curate.quality import quality
from puna.stages.curate.select import select
from puna.stages.curate.semantic_dedup import semantic_dedup
from puna.stages.curate.substring_dedup import substring_dedup
from puna.stages.curate.url_dedup import url_dedup
from puna.stages.curate.url_filter import url_filter
from puna.stages.experiments.mix_experiment import mix_experiment
from puna.stages.experiments.scaling_law import scaling_law
from puna.stages.pretrain.evaluate import evaluate
from puna.stages.pretrain.pretrain import pretrain
from puna.stages.pretrain.split import split
from puna.stages.pretrain.tokenize import tokenize
from puna.stages.pretrain.tokenizer import tokenizer
from puna.storage import Artifact, PunaError


@dataclass(frozen=True)
class Curated:
    """Clean documents, what they stand for as near-duplicates, their knowledge types, and the tasks kept out of them."""

    documents: Artifact
    deduplicated: Artifact
    domains: Artifact | None
    prompts: Artifact


@dataclass(frozen=True)
class Base:
    """The base model and what it was made of."""

    model: Artifact
    curated: Curated
    mixture: Artifact


def curate(r: Recipe, inputs: list[External]) -> Curated:
    """Pages to clean documents."""
    check_inputs(inputs, r.ingest)
    tasks = step(prompts, r.prompts)
    documents = step(extract, r.extract, pages=step(ingest, r.ingest, inputs=inputs))
    documents = step(url_dedup, r.url_dedup, documents=step(url_filter, r.url_filter, documents=documents))
    languages = step(language, r.language, documents=documents)
    technical = step(code_reasoning, r.code_reasoning, documents=documents)
    signals = [languages, technical, step(heuristics, r.heuristics, documents=documents, language=languages)]
    documents = step(select, r.select, documents=documents, signals=signals)
    documents = step(pii, r.pii, documents=documents)
    deduplicated = step(minhash_dedup, r.minhash_dedup, documents=documents)
    documents = deduplicated
    if r.semantic_dedup is not None:
        documents = step(semantic_dedup, r.semantic_dedup, documents=documents)
    documents = step(line_dedup, r.line_dedup, documents=documents)
    if r.substring_dedup is not None:
        documents = step(substring_dedup, r.substring_dedup, documents=documents)
    types = step(domains, r.domains, documents=documents) if r.domains is not None else None
    scores = [technical] if types is None else [types, technical]
    if r.quality is not None:
        scores.append(step(quality, r.quality, documents=documents, language=languages))
    documents = step(select, r.select_model, label="select_model", documents=documents, signals=scores)
    documents = step(decontaminate, r.decontaminate, documents=documents, prompts=[tasks])
    return Curated(documents, deduplicated, types, tasks)


def base(r: Recipe, inputs: list[External]) -> Base:
    """Clean documents to a base model, by way of the experiments that set its mixture and predict its loss."""
    if r.domains is None:
        raise PunaError("domains: null is for the flow curate alone; a base model's data are mixed by knowledge types")
    c = curate(r, inputs)
    sides = step(split, r.split, documents=c.documents, signals=c.domains)
    vocabulary = step(tokenizer, r.tokenizer, documents=c.documents, mixture=sides)
    weights = step(mix_experiment, r.mix_experiment, documents=c.documents, split=sides, tokenizer=vocabulary)
    mixture = step(mix, r.mix, documents=c.documents, split=sides, weights=weights, deduplicated=[c.deduplicated])
    tokens = step(tokenize, r.tokenize, documents=c.documents, mixture=mixture, tokenizer=vocabulary)
    step(scaling_law, r.scaling_law, tokens=tokens, tokenizer=vocabulary)
    model = step(pretrain, r.pretrain, tokens=tokens, tokenizer=vocabulary)
    step(evaluate, r.evaluate_base, label="evaluate_base", model=model, documents=c.documents, mixture=mixture, prompts=c.prompts)
    return Base(model, c, mixture)


@dataclass(frozen=True)
class Policies:
    """The aligned model, the second model that answers beside it, and the data gathered so far."""

    policy: Artifact
    other: Artifact
    instructions: tuple[Artifact, ...]
    preferences: tuple[Artifact, ...] = ()


def align(r: Recipe, inputs: list[External]) -> Artifact:
    """Base model to aligned model: supervised finetuning on gold answers, then rounds."""
    start = base(r, inputs)
    gold = step(instructions, r.instructions, prompts=start.curated.prompts)
    policy = step(sft, r.sft_first, label="sft_first", model=start.model, instructions=[gold])
    other = step(sft, r.sft_lora, label="sft_lora", model=policy, instructions=[gold])
    step(evaluate, r.evaluate, label="evaluate_sft", model=policy, prompts=start.curated.prompts)
    state = Policies(policy, other, (gold,))
    for number in range(1, r.rounds + 1):
        state = align_round(r, number, state, start.curated.prompts)
    return publish("policy", state.policy)


def align_round(r: Recipe, number: int, before: Policies, heldout: Artifact) -> Policies:
    """Answers, preferences, reward model, rejection sampling, SFT, DPO (PPO in the last round), averaging."""

    def at(stage: Stage, config: StageConfig, **inputs: Value) -> Artifact:
        return step(stage, in_round(config, number), label=f"{stage.name}_{number}", **inputs)

    tasks = step(prompts, round_prompts(r, number), label=f"prompts_{number}")
    answers = at(sample, r.sample, models=[before.policy, before.other], prompts=tasks)
    pairs = (*before.preferences, at(preferences, r.preferences, answers=answers, prompts=tasks))
    reward = at(reward_model, r.reward_model, model=before.policy, preferences=list(pairs))
    best = at(rejection_sample, r.rejection_sample, answers=answers, reward_model=reward, prompts=tasks)
    data = (*before.instructions, at(data_quality, r.data_quality, instructions=best, model=before.policy))
    tuned = at(sft, r.sft, model=before.policy, instructions=list(data))
    preferred = at(dpo, r.dpo, model=tuned, preferences=[pairs[-1]])
    last = [tuned, preferred]
    if r.ppo is not None and number == r.rounds:
        last = [preferred, at(ppo, r.ppo, policy=preferred, reward_model=reward, prompts=tasks)]
    policy = at(average, r.average, models=last)
    step(evaluate, r.evaluate, label=f"evaluate_round_{number}", model=policy, prompts=heldout)
    publish("policy", policy, f"round-{number}")
    return Policies(policy, tuned, data, pairs)


def pipeline(r: Recipe, inputs: list[External]) -> Artifact:
    """Everything: raw pages to an aligned model."""
    return align(r, inputs)
