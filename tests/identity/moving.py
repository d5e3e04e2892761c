"""Copies of Puna's source in which files are moved and renamed, together with every import of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("flows", "stages", "models", "kernels", "storage")
VERSIONS = """
import json
from puna.flows.engine.trace import load_stages
from puna.stages.identity import code
from puna.storage.manifest import code_version

stages = load_stages()
reached = {name: code.symbols(stage) for name, stage in stages.items()}
print(json.dumps({name: [code_version(symbols), list(symbols)] for name, symbols in reached.items()}))
"""


def copied(place: Path) -> Path:
    """Copy Puna's source into a folder."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, place / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / ".pkg", place / ".pkg", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return place


def versions(place: Path) -> dict[str, tuple[str, list[str]]]:
    """Return each stage's code version and the symbols that it reaches, as computed by a new process in a copy."""
    environment = os.environ | {"PYTHONPATH": str(place / ".pkg"), "PUNA_CACHE": str(place / "cache"), "NUMBA_CACHE_DIR": str(place / "loops")}
    done = subprocess.run([sys.executable, "-c", VERSIONS], env=environment, cwd=place, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return {name: (version, symbols) for name, (version, symbols) in json.loads(done.stdout).items()}


def rewrite(place: Path, change: Callable[[str], str]) -> None:
    """Apply a change to every source file of a copy."""
    for room in ROOMS:
        for file in (place / room).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if (now := change(text)) != text:
                file.write_text(now, encoding="utf-8")


def rename_files(place: Path, folder: str, prefix: str) -> None:
    """Rename the modules of a folder, and every import of them."""
    package = "puna." + folder.replace("/", ".")
    names = sorted(f.stem for f in (place / folder).glob("*.py") if f.stem != "__init__")
    for name in names:
        (place / folder / f"{name}.py").rename(place / folder / f"{prefix}{name}.py")
    one = re.compile(rf"\b{re.escape(package)}\.({'|'.join(names)})\b")
    several = re.compile(rf"from {re.escape(package)} import (\([^)]*\)|[^\n]*)")
    listed = re.compile(rf"\b({'|'.join(names)})\b(?! as)(?=\s*(,|\)|$|#))", re.MULTILINE)
    aliased = re.compile(rf"\b({'|'.join(names)}) as\b")

    def change(text: str) -> str:
        text = one.sub(lambda m: f"{package}.{prefix}{m[1]}", text)

        def renamed(match: re.Match[str]) -> str:
            names = listed.sub(lambda m: f"{prefix}{m[1]} as {m[1]}", aliased.sub(lambda m: f"{prefix}{m[1]} as", match[1]))
            return f"from {package} import {names}"

        return several.sub(renamed, text)

    rewrite(place, change)


def move_folder(place: Path, old: str, new: str) -> None:
    """Move a folder, and rewrite every import from it."""
    (place / new).parent.mkdir(parents=True, exist_ok=True)
    (place / old).rename(place / new)
    dotted = re.compile(rf"\bpuna\.{re.escape(old.replace('/', '.'))}\b")
    rewrite(place, lambda text: dotted.sub(f"puna.{new.replace('/', '.')}", text))


def move_rooms(place: Path) -> None:
    """Rename every file in kernels/text and in kernels, and move kernels/text to another folder."""
    rename_files(place, "kernels/text", "renamed_")
    move_folder(place, "kernels/text", "kernels/strings_and_words")
    rename_files(place, "kernels", "moved_")
