"""Files of a checkpoint from outside, on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from puna.stages.contract import External
from puna.storage import PunaError


def local_folder(files: External, scratch: Path) -> Path:
    """The folder that the files lie in, or the one file; what lies elsewhere is fetched to the scratch folder."""
    places = {file.name: file.local() for file in files.files}
    if len(places) == 1 and (only := next(iter(places.values()))) is not None:
        return only
    if None not in places.values():
        name, place = next(iter(places.items()))
        return Path(str(place).removesuffix(name))
    for file in files.files:
        target = scratch / "fetched" / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with file.open() as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)
    return scratch / "fetched"


def snapshot(stage: str, uri: str, target: Path, patterns: Callable[[list[str]], tuple[str, ...]]) -> Path:
    """A repository of the hub, `hf://OWNER/NAME[@COMMIT]`: of its files those that match `patterns`, which is told all their names."""
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    repository, _, commit = uri.removeprefix("hf://").partition("@")
    try:
        names = [file.rfilename for file in HfApi().model_info(repository, revision=commit).siblings or []]
        return Path(snapshot_download(repository, revision=commit, allow_patterns=list(patterns(names)), local_dir=target))
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise PunaError(f"{stage}: {uri}: the hub does not give the model ({reason})") from error
