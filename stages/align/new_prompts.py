"""The stage `new_prompts`: prompts that no earlier round has used."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from puna.stages.contract import Prompts, SeededConfig, StageRun, stage
from puna.stages.draws import hash_of


class NewPromptsConfig(SeededConfig):
    count: int = Field(400, ge=1, description="Number of prompts per task; fewer if the pool runs out")
    split: Literal["train", "heldout"] = Field("train", description="Purpose of the prompts: training, or only evaluation")


@stage(kind="prompts")
def new_prompts(pool: Prompts, used: list[Prompts] | None, config: NewPromptsConfig, run: StageRun) -> None:
    """Take up to `count` training prompts per task from `pool`, in the order of a hash of seed and id, and set their `split`.

    Prompts are left out if their id or messages occur in `used`, or their messages in a held-out prompt of the pool. A conversation with
    two ids is one prompt. The output may be empty. The metric `left` counts the prompts that remain for later rounds."""
    texts, ids = set[str](), set[str]()
    for artifact in used or ():
        columns = artifact.read(columns=["id", "messages"])
        ids.update(columns["id"].to_pylist())
        texts.update(columns["messages"].to_pylist())
    tasks: dict[str, list[dict[str, object]]] = {}
    # Other stages hold out prompts by a hash of seed and id alone; with the stage's name, the order here is independent of theirs.
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
