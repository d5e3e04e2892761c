"""The answers of a training by reinforcement: the best, the worst, and those of the prompts whose rewards changed most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from puna.flows.html.markup import Content, Html, details, excerpt, number, section, table
from puna.flows.web.frame import Here, artifact_link, pages
from puna.stages.conversations import messages_of, shown
from puna.storage import PunaError

SHOWN = 20
NUMBERS = ("score", "verifier", "reward_model", "advantage", "logprob", "reference_logprob")
router = pages()


@router.get("/rollouts/{key}")
def rollouts_page(site: Here, key: str) -> str:
    """Return the page of a model's rollouts."""
    model = site.store.resolve(f"model/{key}")
    if "rollouts" not in model.tables:
        raise PunaError(f"{model.id} has no table rollouts: only ppo and grpo write one")
    rows = model.read("rollouts", ["step", "prompt_id", "text", *NUMBERS]).to_pylist()
    asked = [site.store.find(one.kind, one.key) for one in model.manifest.inputs if one.name == "prompts"]
    prompts = {row["id"]: excerpt(shown(messages_of(row))) for one in asked if one is not None for row in one.read().to_pylist()}
    ranked, several = sorted(rows, key=lambda row: -row["score"]), defaultdict[str, list[dict[str, Any]]](list)
    for row in rows:
        several[row["prompt_id"]].append(row)
    gains = {}
    for name, own in several.items():
        first, last = ([row for row in own if row["step"] == step] for step in (own[0]["step"], own[-1]["step"]))
        gains[name] = fmean(row["score"] for row in last) - fmean(row["score"] for row in first), first, last
    changed = sorted((name for name in gains if gains[name][0]), key=lambda name: -abs(gains[name][0]))[:SHOWN]
    return site.page(
        "Rollouts",
        section("best", "Best", None, _answers(ranked[:SHOWN], prompts)),
        section("worst", "Worst", None, _answers(ranked[: -SHOWN - 1 : -1], prompts)),
        section(
            "changed", "Most changed", "The mean reward of a prompt's last rollout, less that of its first.",
            [details([f"{gains[name][0]:+.3g} ", prompts.get(name, name)], _answers([*gains[name][1], *gains[name][2]], {}), class_="more")
             for name in changed],
        ),
        here="artifacts", lead=[artifact_link(model), f": {len(rows):,} answers to {len(several):,} prompts"],
    )  # fmt: skip


def _answers(rows: Sequence[Mapping[str, Any]], prompts: Mapping[str, str]) -> Html:
    """Return answers as a table; with `prompts`, each beside its prompt."""
    head: list[Content] = ["rollout", *(["prompt"] if prompts else []), "answer", *(name.replace("_", " ") for name in NUMBERS)]
    cells: list[list[Content]] = [
        [row["step"], *([prompts.get(row["prompt_id"], row["prompt_id"])] if prompts else []), excerpt(row["text"]),
         *("–" if row[name] is None else number(row[name]) for name in NUMBERS)]
        for row in rows
    ]  # fmt: skip
    return table(head, cells, numeric=range(len(head) - len(NUMBERS), len(head)))
