"""Errors with messages for users."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence


class PunaError(Exception):
    """An error in the input or the store. Its message names the file, row or field, and says what to do."""


class DamagedArtifact(PunaError):
    """The error for an artifact whose manifest, files or rows kept by reference were changed or removed."""

    @classmethod
    def of(cls, name: str, damage: Sequence[str], aside: Sequence[str] = ()) -> DamagedArtifact:
        """Return the error for the artifact `name`. `aside`: folders to which the artifact and its damaged sources were moved."""
        where = f" It was moved to {', '.join(aside)}." if aside else ""
        return cls(
            f"artifact {name} is damaged: {'; '.join(damage)}.{where} "
            "Run again: the stage that made it will make it again. Imported artifacts must be imported again; `puna verify` checks the rest"
        )


@contextlib.contextmanager
def errors_at(where: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of these classes inside the `with` block as a PunaError that begins with `where`, if given."""
    try:
        yield
    except kinds as error:
        raise PunaError(f"{where}: {error}" if where else str(error)) from error
