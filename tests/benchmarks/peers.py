"""Other toolkits, each in a separate virtual environment, because their dependencies conflict with Puna's and with each other's.

    run("datatrove", "peer_minhash_datatrove.py", texts=[...])

creates the environment on first use (in PUNA_PEERS, else `.peers`), runs the script in it on one thread, and returns the JSON that the
script prints. A script gets the path of a JSON file: {"texts": [...], ...}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS: dict[str, tuple[str, ...]] = {
    "datatrove": ("datatrove==0.10.1", "spacy==3.8.18", "xxhash<4", "regex", "nltk", "ftfy", "tokenizers", "orjson"),
    "rensa": ("rensa==0.5.0",),
    "trafilatura": ("trafilatura==2.3.1", "lxml_html_clean"),
}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


def python(name: str) -> Path:
    """Return the Python interpreter of a peer's environment; create the environment if it is missing. Exit if that fails."""
    folder = Path(os.environ.get("PUNA_PEERS", ".peers")).absolute() / name
    made, filled = folder / "bin" / "python", folder / "filled"
    if not filled.exists():
        install = [str(made), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEERS[name]]
        for command in ([sys.executable, "-m", "venv", str(folder)], install, [str(made), "-c", f"import {name}"]):
            if subprocess.run(command, stdout=sys.stderr, check=False, env=_apart()).returncode:
                sys.exit(f"{name} is missing, and this failed: {' '.join(command)}. Fill {folder} by hand and make the file {filled}")
        filled.touch()
    return made


def _apart() -> dict[str, str]:
    """Return the environment variables without those that lead to Puna's own packages."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def run(name: str, script: str, **given: Any) -> Any:
    """Return the JSON that `script` (beside this file) prints when run in the environment of peer `name` on the data `given`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "given.json"
        file.write_text(json.dumps(given), encoding="utf-8")
        command = [str(python(name)), str(HERE / script), str(file)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False, env=_apart() | ONE_THREAD)
    if done.returncode:
        sys.exit(f"{name} failed: {' '.join(command)}")
    return json.loads(done.stdout)
