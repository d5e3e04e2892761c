"""Prompts that no round has used: the next slice of a pool."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from puna.stages.contract import Prompts, SeededConfig, StageRun, stage
from puna.stages.draws import hash_of


class NewPromptsConfig(SeededConfig):
    """Number and purpose of the prompts."""

    count: int = Field(400, ge=1, description="Number of prompts of each task; fewer if the pool has no more")
    split: Literal["train", "heldout"] = Field("train", description="Purpose of the prompts: training, or only comparisons")


@stage(kind="prompts")
def new_prompts(pool: Prompts, used: list[Prompts] | None, config: NewPromptsConfig, run: StageRun) -> None:
    """Take up to `count` training prompts of each task of `pool`, in the order of a hash of seed and id, and set their `split`.

    Prompts with an id or messages in `used`, or messages of a held-out prompt of the pool, are left out. A conversation under two
    ids is one prompt. The output may be empty. The metric `left` counts the prompts that could still be taken."""
    texts, ids = set[str](), set[str]()
    for artifact in used or ():
        columns = artifact.read(columns=["id", "messages"])
        ids.update(columns["id"].to_pylist())
        texts.update(columns["messages"].to_pylist())
    tasks: dict[str, list[dict[str, object]]] = {}
    # The name keeps this order independent of the held-out draws of other stages, which hash seed and id alone.
    rows = sorted(pool.read().to_pylist(), key=lambda row: (hash_of("new_prompts", config.seed, row["id"]), row["id"]))
    texts.update(row["messages"] for row in rows if row["split"] != "train")
    for row in rows:
        if row["split"] == "train" and row["id"] not in ids and row["messages"] not in texts:
            texts.add(row["messages"])
            tasks.setdefault(row["task"], []).append(row)
    prompts = [row for task in sorted(tasks) for row in tasks[task][: config.count]]
    run.write_rows([{**row, "split": config.split} for row in prompts])
    run.metric("prompts", len(prompts))
    run.metric("left", sum(len(rows) for rows in tasks.values()) - len(prompts))
