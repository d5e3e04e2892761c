"""Units of reading: files, and shards of the hub's data sets, which are streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from puna.stages.contract import External, ExternalFile
from puna.storage import PunaError


class Job(NamedTuple):
    """One file, or one shard of a data set on the hub."""

    source: str
    format: str
    name: str
    file: ExternalFile | None
    uri: str = ""
    subset: str | None = None
    split: str = ""
    shard: int = 0
    shards: int = 1

    @property
    def location(self) -> str:
        """Return the job's place, for people."""
        return self.file.location if self.file is not None else f"{self.uri}/{self.name}"

    def stream(self) -> Any:
        """Return the rows of the shard."""
        return hub_stream(self.uri, self.subset, self.split).shard(self.shards, self.shard)


def jobs_of(
    inputs: Sequence[External], subset: str | None, split: str, format_of: Callable[[External, ExternalFile], str | None]
) -> Iterator[Job]:
    """Yield one job per file, or per shard of a data set (an input without files); skip files without a format."""
    for external in inputs:
        if not external.files:
            shards = hub_stream(external.uri, subset, split).num_shards
            for shard in range(shards):
                yield Job(external.name, "hub", f"{split}/{shard}", None, external.uri, subset, split, shard, shards)
        for file in external.files:
            if (found := format_of(external, file)) is not None:
                yield Job(external.name, found, file.name, file)


def hub_stream(uri: str, subset: str | None, split: str) -> Any:
    """Return a streaming data set of the hub, `hf://datasets/OWNER/NAME[@REVISION]` (or of a local folder in tests)."""
    import datasets

    name, _, revision = uri.removeprefix("hf://").removeprefix("datasets/").partition("@")
    try:
        return datasets.load_dataset(name, subset, split=split, streaming=True, revision=revision or None)
    except (ValueError, OSError) as error:
        raise PunaError(f"input {uri}: {error}") from error
