"""The flow `round`: one more round of alignment. The round's candidate becomes `policy@latest` if it passes a gate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from puna.flows.engine.declare import Files, Instructions, Model, Output, Preferences, Prompts, current_walk, flow, setting, step, tell
from puna.flows.engine.recipe import Step
from puna.flows.engine.rounds import History, Round, rounds_of, settle, unsettled_round
from puna.flows.rounds import DEVELOPMENT, State, learned_from, new_prompts_per_round, one_round, prompts_taken, unseen
from puna.stages.align.gate import gate
from puna.stages.align.new_prompts import NewPromptsConfig, new_prompts
from puna.stages.evaluation.benchmark import benchmark
from puna.stages.evaluation.evaluate import evaluate
from puna.stages.prompts.prompts import PromptsConfig, prompts
from puna.storage import Artifact, PunaError, Store


@flow
def round(
    policy: Model, pretrained: Model | None = None, pool: Prompts | None = None,
    judged: list[Preferences] | None = None, demonstrations: list[Instructions] | None = None, tasks: list[Files] | None = None,
) -> None:  # fmt: skip
    """Run the next rounds of alignment (one by default): train a candidate on unused prompts, and make it `policy@latest` if it passes.

    A round continues from `policy@latest` or, if there is none, from the model given as `policy`. `pretrained`: the model that the reward
    model and SFT start from, unless `from_pretrained` is 0; by default the model at the start of the policy's lineage. `pool`: your own
    prompts, with held-out prompts for evaluation; by default prompts are generated. `tasks`: folders of task files with their data, on
    which the candidate must not get worse. Without unused prompts or enough new preferences, the flow says so and ends. An interrupted
    round is finished instead."""
    learned_from(judged or [])
    rounds = setting("rounds_per_run", 1, minimum=1, maximum=100, description="Number of rounds in one run of the flow `round`")
    with current_walk().alone("round") as mine:
        if not mine:
            return tell("another run is working on a round in this store; this run does nothing")
        for _ in range(rounds):
            if not _round(policy, pretrained, pool, judged or [], demonstrations or [], tasks or []):
                return None


def _round(
    model: Output, pretrained: Output | None, imported: Output | None, judged: Sequence[Output], demonstrations: Sequence[Output],
    tasks: Sequence[Output],
) -> bool:  # fmt: skip
    """Run the next round, or finish an interrupted round. Return True if another round may follow."""
    store = current_walk().store()
    history = History.of(store, model.items[0]) if store and model.items and isinstance(model.items[0], Artifact) else History()
    if store and (open_ := unsettled_round(store, history.rounds)):
        _carry_out(store, open_)
        return False
    number = history.number
    policy = _as_output(history.policy) if history.policy else model
    anew = setting(
        "from_pretrained", 1, minimum=0, maximum=1,
        description="Initial model of the reward model and of SFT in the flow `round`: 1, the pretrained model; 0, the last policy",
    )  # fmt: skip
    if anew and not pretrained and len(history.roots) > 1:
        several = ", ".join(root.id for root in history.roots)
        raise PunaError(f"round: the policy descends from {several}; choose the model for SFT and rewards: --input pretrained=ID")
    start = pretrained or (_as_output(history.roots[0]) if history.roots else policy)
    heldout = imported or step(prompts)
    unseen(heldout, [*demonstrations, *judged])
    count_config = NewPromptsConfig(count=new_prompts_per_round())
    counts = Counter(task for artifact in history.prompts for task in artifact.read(columns=["task"])["task"].to_pylist())
    enough = partial(_pool, used=counts, more=_more(count_config))
    pool = imported or step(prompts, f"pool_{number}", field="prompts", adapt=enough)
    used = [_as_output(item) for item in history.prompts]
    fresh = step(new_prompts, default=count_config, number=number, pool=pool, used=used)
    preferences, new = _preferences(history.preferences, judged)
    wait = setting(
        "min_new_preferences", 0, minimum=0, maximum=10_000_000,
        description="Minimum number of unused preferences in `judged` for a run of the flow `round`",
    )  # fmt: skip
    if store and new < wait:
        tell(f"waiting for preferences: {new} new of {wait} needed; no round is run")
        return False
    if any(isinstance(item, Artifact) and not item.rows() for item in fresh.items):
        tell(f"no unused prompts: the {number - 1} earlier rounds used the whole pool; add prompts with --input pool=ID")
        return False
    development = step(new_prompts, f"development_{number}", field="development", default=DEVELOPMENT, pool=pool, used=[*used, fresh])
    evaluation = step(evaluate, f"evaluate_policy_{number}", field="evaluate", model=policy, prompts=heldout)
    # The last policy was trained on earlier policies' answers and writes better ones; only a pretrained model can still learn from them.
    data = _all(history.instructions if anew else history.demonstrations, demonstrations)
    before = State(policy, Output("model", (), (), "other"), data, preferences, start=start if anew else None, judged=tuple(judged))
    after = one_round(number, before, fresh, heldout, development=development)
    benchmarks = [
        step(benchmark, f"benchmark_{name}_{number}", field="benchmark", model=one, tasks=tasks) if tasks else None
        for name, one in (("policy", policy), ("candidate", after.policy))
    ]
    verdict = step(
        gate, number=number, policy=policy, candidate=after.policy, before=evaluation, after=after.evaluation, prompts=heldout,
        benchmark_before=benchmarks[0], benchmark_after=benchmarks[1],
    )  # fmt: skip
    if not store or not verdict.items or not history.policy:
        return False
    finished = rounds_of(store, history.policy)[-1]
    _carry_out(store, finished)
    return finished.verdict != "waits" and current_walk().performs


def _carry_out(store: Store, finished: Round) -> None:
    """Carry out a round's verdict: move the aliases and report the outcome. In a plan, do nothing."""
    if current_walk().performs:
        tell(settle(store, finished))


def _as_output(artifact: Artifact) -> Output:
    return Output(artifact.kind, (artifact.id,), (artifact,))


def _all(earlier: Sequence[Artifact], new_outputs: Sequence[Output]) -> tuple[Output, ...]:
    """Return the earlier and the new artifacts, without new artifacts whose content equals an earlier artifact's."""
    digests = {item.data_digest for item in earlier}
    new = [o for o in new_outputs if not any(isinstance(i, Artifact) and i.data_digest in digests for i in o.items)]
    return (*map(_as_output, earlier), *new)


def _preferences(earlier: Sequence[Artifact], new_outputs: Sequence[Output]) -> tuple[tuple[Output, ...], int]:
    """Return all preference datasets, and the number of new pairs. An earlier dataset is omitted if a new one contains all of its pairs."""
    items = [item for output in new_outputs for item in output.items if isinstance(item, Artifact)]
    ids = {item.key: set(item.read(columns=["id"])["id"].to_pylist()) for item in [*earlier, *items]}
    learned = set[str]().union(*(ids[item.key] for item in earlier))
    new = set[str]().union(*(ids[item.key] for item in items)) - learned
    left = [one for one in earlier if not any(ids[one.key] <= ids[item.key] and one.key != item.key for item in items)]
    return _all(left, new_outputs), len(new)


def _more(config: NewPromptsConfig) -> int:
    """Return the number of unused prompts of each task that a round takes, for training and for development together."""
    steps = (Step(field, field, new_prompts, default) for field, default in (("new_prompts", config), ("development", DEVELOPMENT)))
    return sum(prompts_taken(current_walk().configs(one)) for one in steps)


def _pool(config: PromptsConfig, used: Counter[str], more: int) -> PromptsConfig:
    """Return the prompt generators' configuration with at least `more` unused training prompts of each task, and no references."""
    most = max((used[task.name or task.task] for task in config.tasks), default=0)
    return config.model_copy(update={"train": max(config.skip + config.train, most) + more, "skip": 0, "references": False})
