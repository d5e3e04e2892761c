"""Verifiers in data that name code, and a count of the accepted ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from puna.stages.verifiers.registry import from_json
from puna.storage import PunaError

EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n\ndef go(answer):\n    return 1.0\n"
FUNCTIONS = (
    "puna.stages.curate.signals.user_signals:_definition", "puna.stages.plugins:add", "puna:open", "evil_module:go", "evil_package.evil:go",
    "os:system", "builtins:exec", "pickle:loads", "cloudpickle:loads", "torch:load", "numpy:load", "runpy:run_path", "__main__:go",
    "evil_module", ":go", "..evil_module:go", "evil_module:__builtins__.exec", "kind_module:system", "kind_module:Path", "kind_module:os.system",
)  # fmt: skip


def write_modules(folder: Path) -> None:
    """Write modules whose import leaves a file `ran`, and `kind_module`, which a user may allow and which imports libraries."""
    (folder / "evil_module.py").write_text(EVIL)
    (folder / "evil_package").mkdir()
    (folder / "evil_package/__init__.py").write_text("")
    (folder / "evil_package/evil.py").write_text(EVIL)
    (folder / "kind_module.py").write_text(
        "import os\nfrom os import system\nfrom pathlib import Path\n\ndef kind(answer):\n    return answer == 'a'\n"
    )


def accepted(folder: Path) -> Iterator[str]:
    """Yield the functions that a verifier can name although nobody allowed them; `folder`, with the modules, is importable."""
    for function in FUNCTIONS:
        verifier: dict[str, object] = {"name": "python", "function": function}
        for given in (verifier, {"name": "product", "of": [{"name": "exact"}, verifier]}):
            try:
                from_json(given)
            except PunaError:
                if not list(folder.rglob("ran")):
                    continue
            yield function
