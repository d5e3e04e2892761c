"""The report names the annotator and the tasks of its figures, and the baselines that answer without a model."""

from __future__ import annotations

from pathlib import Path

from puna.flows.report.page import measured_view
from puna.flows.report.run import Run
from tests.flows.report.conftest import Built, curated, everything


def test_the_report_names_annotator_and_tasks(tmp_path: Path) -> None:
    built = everything(tmp_path)
    page = str(measured_view(Run.open(built.store, "latest")))
    assert "simulated" in page and "20 held-out questions" in page and "no model" not in page.partition("</table>")[0]


def test_a_run_that_evaluates_no_model_says_nothing_of_its_prompts(tmp_path: Path) -> None:
    built = Built(tmp_path)
    curated(built)
    run = Run.open(built.store, "latest")
    assert run.kind("prompts") and measured_view(run) is None
