"""Fixtures of all tests of stages."""

import sys

import pytest

from tests.stages import audit


@pytest.fixture(scope="session", autouse=True)
def audited():
    """Make the first run of each stage fail if it runs code or reads files that its key does not name."""
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules["puna.stages.contract.execute"]  # the package exports a function of this name
        patch.setattr(module, "_make", audit.watching(module._make))
        yield
