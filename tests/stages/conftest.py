"""Settings of all tests of stages."""

from hypothesis import settings

# A test asserts no time: on a busy machine any example may be slow.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
