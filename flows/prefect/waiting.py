"""`python -m puna.flows.prefect.waiting MODULE IMPORTED…`: imports modules, waits, and then is `python -m MODULE`; see `ready`.

Imports nothing of its own but the standard library, so that it can be ended while it imports.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import runpy
import sys
import time
import warnings


def main(module: str, *imported: str) -> None:
    """Wait for a line of JSON on standard input, `env` (variables) and `cwd` of the run, and be it; end where standard input does.

    Where a file of the imported modules was written since, all of them are read again.
    """
    began = time.time_ns()
    gc.disable()  # what is imported stays
    try:
        for name in imported:
            importlib.import_module(name)
        gc.enable()
        read = _written()
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        return
    if not line:
        return
    asked = json.loads(line)
    os.environ.update(asked["env"])
    if asked["cwd"] is not None:
        os.chdir(asked["cwd"])
    now = _written()
    if any(when > began or now.get(file) != when for file, when in read.items()):
        os.execv(sys.executable, [sys.executable, "-m", module])
    sys.argv = [module]
    # What was imported may have imported it; `python -m` would warn in the same way.
    warnings.filterwarnings("ignore", message=f".*{re.escape(repr(module))} found in sys.modules", category=RuntimeWarning)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _written() -> dict[str, int]:
    """When the file of each imported module was written, in nanoseconds."""
    found = {}
    for file in {file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}:
        with contextlib.suppress(OSError):
            found[file] = os.stat(file).st_mtime_ns
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
