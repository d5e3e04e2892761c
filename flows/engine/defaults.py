"""The default store and recipe, and the settings that keep Prefect offline, without telemetry, and with its state in the store."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_STORE = ".puna"
DEFAULT_RECIPE = "demo"  # recipe of a flow if --recipe is not given
OFFLINE = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_RUNNER_POLL_FREQUENCY": "1",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
ADDRESSES, ALLOWED, REFUSED = "PUNA_FORM_ADDRESSES", "allowed", "refused"
"""The environment variable that says whether forms may name inputs by URL, and its values."""
SERVED = "PUNA_SERVED_STORE"  # the environment variable that names a server's store to its worker. Forms may always name this store.
MODULES = "PUNA_SERVED_MODULES"  # environment variable: a server's `--module` arguments for its child processes, as a JSON list


def prepare(store: Path, terminal: str = "CRITICAL") -> None:
    """Set environment variables that are unset: Prefect's folder in `store`, its log level on the terminal (`terminal`), and `OFFLINE`.
    Call this before Prefect is imported. A Prefect server gets all log lines of a run; on the terminal, Puna prints its own progress."""
    os.environ.setdefault("PREFECT_HOME", str(store / "prefect"))
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", terminal)
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
