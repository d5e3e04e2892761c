"""Prefect's settings, made before it is imported: offline, without telemetry, its state inside the store."""

from __future__ import annotations

import os
from pathlib import Path

OFFLINE = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_RUNNER_POLL_FREQUENCY": "2",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def prepare(store: Path) -> None:
    """Set what is not set already; call before anything imports Prefect."""
    os.environ.setdefault("PREFECT_HOME", str(store / "prefect"))
    # A failed stage is told once, by the command line, not also as log lines.
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
