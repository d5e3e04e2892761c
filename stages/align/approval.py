"""A person's word on a round's candidate."""

from __future__ import annotations

from pydantic import Field

from puna.stages.contract import Evaluation, StageConfig, StageRun, stage
from puna.storage import PunaError


class ApprovalConfig(StageConfig):
    """Who decides, and how."""

    by: str = Field(min_length=1, description="Who decides")
    approved: bool = Field(True, description="Whether the candidate takes the policy's place")
    reason: str = Field("", description="Why")


@stage(kind="evaluation")
def approval(gate: Evaluation, config: ApprovalConfig, run: StageRun) -> None:
    """Record a person's decision on the candidate of a `gate`; the next run of the flow `round` carries it out."""
    if gate.manifest.stage != "gate":
        raise PunaError(f"approval: {gate.id} was made by {gate.manifest.stage}, not by a round's gate")
    run.write_rows([{"task": "all", "metric": "approved", "value": float(config.approved), "low": None, "high": None, "n": 1}])
    said = f"{'approved' if config.approved else 'refused'} by {config.by}{': ' + config.reason if config.reason else ''}"
    run.metric("verdict", "passed" if config.approved else "refused")
    run.metric("reason", said)
