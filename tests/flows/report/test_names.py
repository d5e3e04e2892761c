"""Names on pages: models by arm and round, gates by the models that they compare."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi.testclient import TestClient

from puna.flows.report.alignment import models_by_step
from puna.flows.web import application
from tests.flows.report.conftest import everything


def test_the_leaderboard_names_arms_and_rounds(tmp_path: Path) -> None:
    built = everything(tmp_path)
    for step, model in (("evaluate_round_3", "average_1"), ("control_gold_1", "sft_1"), ("evaluate_base", "pretrain")):
        built.add(
            step, {"model": built.at[model], "prompts": built.at["prompts"]}, stage="evaluate", metrics={"accuracy": 0.3}, evaluation=[]
        )
    assert {"Round 3", "Base", "gold answers only (round 1)"} <= set(models_by_step(built.store).values())
    page = TestClient(application(built.store, prefect=None, auth="")).get("/rounds").text
    board = page.partition("Leaderboard")[2].partition("</table>")[0]
    assert "Round 3" in board and "Base" in board and "gold answers only (round 1)" in board
    assert not re.search(r">model/[0-9a-f]{6,}", board)
