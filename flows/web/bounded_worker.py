"""The child process that answers questions of pages; see `bounded`."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from puna.flows.web import forms, questions
from puna.flows.web.bounded import IDLE_SECONDS, MEMORY_BYTES
from puna.storage import PunaError, Store


def _answered(question: Mapping[str, Any]) -> dict[str, Any]:
    store = Store.existing(question["store"])
    try:
        if question["question"] == "sql":
            return {"html": str(questions.answered(store, question["q"]))}
        if question["question"] == "plan":
            return {"html": str(forms.plan_view(store, question["name"], question["asked"]))}
        forms.checked(store, question["name"], question["asked"])
        return {"html": ""}
    except PunaError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": f"stopped: it needs more than {MEMORY_BYTES >> 20:,} MB of memory", "last": True}
    except Exception as error:  # noqa: BLE001  what breaks here is told by the page that asked
        return {"broken": f"{type(error).__name__}: {error}", "last": True}


def _data_bytes() -> int:
    """Return the memory that this process has at its start; 0 if it is not Linux."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[5]) * resource.getpagesize() if status.is_file() else 0


def main() -> None:
    """Answer the questions on standard input until it ends, or none comes for a while."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = MEMORY_BYTES + _data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    answers.write(b"{}\n")
    answers.flush()
    while select.select([0], [], [], IDLE_SECONDS)[0] and (line := sys.stdin.buffer.readline()):
        question = json.loads(line)
        # Where the process that asked is killed, nobody else ends a long answer.
        signal.alarm(int(question["seconds"]) + 5)
        answers.write(json.dumps(_answered(question)).encode() + b"\n")
        answers.flush()
        signal.alarm(0)


if __name__ == "__main__":
    main()
