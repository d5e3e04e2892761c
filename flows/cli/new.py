"""The command `puna new`: a small project with a stage, a signal, a rule and a verifier of one's own."""

from __future__ import annotations

import keyword
import os
import shutil
from pathlib import Path

from puna.storage import PunaError

TEMPLATES = Path(__file__).with_name("new_project")
PLACES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "recipe.yaml.txt": "recipe.yaml",
    "stages.py.txt": "PROJECT/stages.py",
    "rules.py.txt": "PROJECT/rules.py",
    "verifiers.py.txt": "PROJECT/verifiers.py",
    "test_project.py.txt": "tests/test_PROJECT.py",
}


def new(folder: Path) -> list[Path]:
    """Write a project to a new folder, whose name is the package's; return the files.

    PunaError where the name is none that Python can import, or the folder is there.
    """
    name = folder.name
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name == "puna":
        raise PunaError(f"new {folder}: the name is the package's: lower-case letters, digits and _, for example my_rules")
    if folder.exists():
        raise PunaError(f"new {folder}: is there already; choose another name")
    part = folder.with_name(f".{name}.{os.getpid()}")
    try:
        for template, place in PLACES.items():
            file = part / place.replace("PROJECT", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text((TEMPLATES / template).read_text(encoding="utf-8").replace("PROJECT", name), encoding="utf-8")
        (part / name / "__init__.py").write_text(f'"""{name}: stages, rules and verifiers for Puna."""\n', encoding="utf-8")
        os.replace(part, folder)
    except OSError as error:
        raise PunaError(f"new {folder}: cannot be written ({error}); choose another place") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sorted(file for file in folder.rglob("*") if file.is_file())
