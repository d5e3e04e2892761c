"""Parameter averages of several models. The averaging weights are given, equal, or searched for on development prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from puna.stages.contract import Facts, Figure, Model, Prompts, SeededConfig, StageRun, stage
from puna.stages.conversations import prompt_ids
from puna.stages.training.bad_rows import BadRows, BadRowsConfig
from puna.stages.training.needs import one_tokenizer
from puna.stages.training.rewards import REWARDS, Reward, RewardSettings, rewards_of
from puna.stages.training.train import check_one_tokenizer, context_limit, load_model
from puna.stages.verifiers.scoring import Scorer, verifiers_named
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.config import ModelConfig
    from puna.models.generation import Completion
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

MOST_TRIALS = 500  # maximum number of candidate averages in one search
SCORED_TOKENS = 8192  # maximum tokens in a packed row that a reward model scores, unless a prompt with its answer is longer


class SearchConfig(RewardSettings):
    """Settings of the search for averaging weights: the candidates, and how their answers are sampled and scored."""

    steps: int = Field(4, ge=1, le=20, description="Number of equal parts that the total weight is split into; every split is tried")
    temperature: float = Field(0.0, ge=0, le=10, description="Sampling temperature; 0: greedy decoding")
    max_tokens: int = Field(64, ge=1, description="Maximum tokens of an answer, including its end token")
    reward: Reward = Field("verifier", description=REWARDS)


class AverageConfig(BadRowsConfig, SeededConfig):
    weights: tuple[float, ...] = Field((), description="Weight of each model, 0 or more; empty: search if prompts are given, else equal")
    search: SearchConfig = Field(SearchConfig(), description="Settings of the search")

    @model_validator(mode="after")
    def _searches_without_weights(self) -> Self:
        return self.refuse_unused("weights are given, so none are searched", "search") if self.weights else self


def needs(config: AverageConfig, facts: Facts) -> list[str]:
    """Return messages if the models have different tokenizers, or if the search needs a reward model and none is given."""
    chooses = config.search.reward != "verifier" and "prompts" in facts.inputs and not config.weights
    missing = [f"search.reward={config.search.reward} needs a reward_model; give one, or set search.reward=verifier"]
    return [*(missing if chooses and "reward_model" not in facts.inputs else []), *one_tokenizer(facts, "models")]


@stage(kind="model", needs=needs, named=verifiers_named)
def average(
    models: list[Model], prompts: Prompts | None, reward_model: list[Model] | None, judges: list[Model] | None, config: AverageConfig,
    run: StageRun,
) -> None:  # fmt: skip
    """Average models of one shape, trained on different data or settings (Llama 3, section 4.1.5).

    Reward models can be averaged, too (WARM, Ramé et al. 2024). `prompts`: a development set without the evaluation's prompts. If it has
    rows and `weights` is empty, the average whose answers have the highest mean reward is chosen; ties go to the most even weights.
    `search.reward`: verifiers, `reward_model` or both score the answers; with both, rewards are centered on the first model's answers if
    `search.center` is start. Metrics: `weight_N`; after a search `development_score`, also of equal weights."""
    from puna.models.training.average import average_checkpoints

    if config.weights and len(config.weights) != len(models):
        raise PunaError(f"average: {len(config.weights)} weights are given for {len(models)} models")
    check_one_tokenizer(models, "average: the models have different tokenizers, so their embedding rows stand for different tokens")
    check_one_tokenizer([models[0], *(reward_model or ())], "average: the reward models need the tokenizer of the averaged models")
    weights = config.weights or tuple(1 / len(models) for _ in models)
    if prompts is not None and prompts.rows() and not config.weights and len(models) > 1:
        weights = _search(models, prompts, reward_model or (), judges or (), config, run)
    try:
        average_checkpoints([m.path() for m in models], run.folder, weights)
    except ValueError as error:
        raise PunaError(f"average: {error}") from error
    run.metric("models", len(models))
    for number, weight in enumerate(weights, 1):
        run.metric(f"weight_{number}", weight / sum(weights))


def grid(models: int, steps: int) -> Iterator[tuple[float, ...]]:
    """Yield every split of a total weight of 1 among the models in steps of 1/`steps`, the most even first."""
    even = steps / models
    divisions = [
        tuple(b - a - 1 for a, b in itertools.pairwise((-1, *bars, steps + models - 1)))
        for bars in itertools.combinations(range(steps + models - 1), models - 1)
    ]
    for counts in sorted(divisions, key=lambda counts: (sum((count - even) ** 2 for count in counts), counts)):
        yield tuple(count / steps for count in counts)


def _search(
    models: Sequence[Artifact], prompts: Artifact, reward_models: Sequence[Artifact], judges: Sequence[Artifact], config: AverageConfig,
    run: StageRun,
) -> tuple[float, ...]:  # fmt: skip
    """Return the weights of the average with the highest mean reward on the prompts. Raise PunaError above `MOST_TRIALS` candidates."""
    from puna.models.training import average as averaging

    equal = tuple(1 / len(models) for _ in models)
    trials = list(dict.fromkeys([equal, *grid(len(models), config.search.steps)]))
    if len(trials) > MOST_TRIALS:
        raise PunaError(f"average: search.steps={config.search.steps} asks for {len(trials)} averages; the maximum is {MOST_TRIALS}")
    network, tokenizer = load_model(models[0], "lm", frozen=True)
    states = [load_model(model, "lm")[0].state_dict() for model in models]
    answering = _Development(prompts, reward_models, judges, tokenizer, network.config, config, run)
    if config.search.reward == "product" and config.search.center == "start":
        answering.center(network, run)
    scores = []
    for number, weights in enumerate(trials):
        try:
            merged = averaging.average(states, weights)
        except ValueError as error:
            raise PunaError(f"average: {error}") from error
        network.load_state_dict(merged)
        scores.append(answering.score(network))
        run.progress(number + 1, len(trials), "weights")
    best = max(range(len(trials)), key=lambda number: (scores[number], -number))
    run.metric("development_prompts", len(answering.rows))
    run.metric("checker_calls", answering.answers * (config.search.reward != "reward_model"))
    run.metric("sampled_tokens", answering.tokens)
    run.metric("development_score", scores[best])
    run.metric("development_score_of_equal_weights", scores[0])
    points: list[tuple[Any, float]] = [(" ".join(f"{w:.2f}" for w in t), s) for t, s in sorted(zip(trials, scores, strict=True))]
    run.figure("weights", Figure(title="Weights of the average", x="weights", y="development score", kind="bar", series={"score": points}))
    return trials[best]


class _Development:
    """Evaluation of candidate averages on development prompts, with the same random numbers for all candidates' answers."""

    def __init__(
        self, prompts: Artifact, reward_models: Sequence[Artifact], judges: Sequence[Artifact], tokenizer: Tokenizer, shape: ModelConfig,
        config: AverageConfig, run: StageRun,
    ) -> None:  # fmt: skip
        from puna.models.generation import SamplingParams

        rows = sorted(prompts.read().to_pylist(), key=lambda row: str(row["id"]))
        bad = BadRows(config, "average")
        within = context_limit(shape, config.search.max_tokens)
        questions = bad.examples(rows, partial(prompt_ids, tokenizer), lambda ids: len(ids) + config.search.max_tokens, within)
        bad.check_left(len(questions), f"{len(rows)} development prompts")
        if bad.dropped:
            bad.write(run)
        self.rows = [row for row, _ in questions]
        self._ids = [ids for _, ids in questions]
        self._tokenizer = tokenizer
        search = config.search
        scorer = None if search.reward == "reward_model" else Scorer(self.rows, search.scoring, run, judges, needed="average")
        if search.reward != "verifier" and not reward_models:
            raise PunaError(f"average: search.reward={search.reward} needs a reward_model")
        size = max(SCORED_TOKENS, max(map(len, self._ids)) + search.max_tokens)
        models = [] if search.reward == "verifier" else reward_models
        numbers = [load_model(one, "scalar", frozen=True)[0] for one in models]
        self._rewards = rewards_of(scorer, numbers, self.rows, self._ids, tokenizer, size, search.floor, search.ensemble)
        stop, seed = tokenizer.stop_ids, run.seed("development")
        self._checked = scorer is not None
        self.answers = self.tokens = 0
        self._params = SamplingParams(temperature=search.temperature, max_tokens=search.max_tokens, stop=stop, seed=seed)

    def center(self, network: Transformer, run: StageRun) -> None:
        """Center all later rewards on the rewards of this model's answers, and report the center (see `search.center`)."""
        self._rewards = self._rewards.center_by(self._ids, self._answers(network), run)

    def score(self, network: Transformer) -> float:
        """Return the mean reward of the model's answers. With verifiers, truncated answers and answers that cannot be scored count as 0."""
        answers = self._answers(network)
        pairs = [(reward, one.finished) for (reward,), (one,) in zip(self._rewards(self._ids, answers), answers, strict=True)]
        rewards = [reward if finished or not self._checked else 0.0 for reward, finished in pairs]
        return sum(rewards) / len(rewards)

    def _answers(self, network: Transformer) -> list[list[Completion]]:
        from puna.models.generation import Engine

        completions = Engine(network, self._tokenizer).generate(self._ids, self._params)
        self.answers += sum(map(len, completions))
        self.tokens += sum(len(one.tokens) for some in completions for one in some)
        return completions
