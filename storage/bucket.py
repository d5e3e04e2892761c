"""Requests to a bucket of an object store, with retries where they may help, and errors without secrets.

Credentials, region and endpoint come only from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION,
AWS_ENDPOINT_URL and others). Credentials are never pickled, written or shown."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import TypeVar

import obstore
from obstore.store import S3Store

from puna.storage.errors import PunaError

T = TypeVar("T")

TRIES = 6
CREDENTIALS = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
SECRET = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True)
class Bucket:
    bucket: str
    prefix: str

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def _client(self) -> S3Store:
        return _connect(self.bucket, self.prefix, os.environ.get("AWS_ENDPOINT_URL", ""))

    def _request(self, name: str, request: Callable[[], T], *, written: bool = False) -> T:
        """Return a request's response. Retry it up to `TRIES` times, besides the client's own retries. Raise FileNotFoundError for a
        missing file, PunaError for other failures except a failed condition. `written`: the request writes, so a 404 means no bucket."""
        for attempt in range(TRIES):
            try:
                return request()
            except FileNotFoundError:
                if written:
                    raise self._no_bucket() from None
                raise FileNotFoundError(f"{self.uri}/{name}") from None
            except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
                raise
            except obstore.exceptions.BaseError as error:
                if attempt == TRIES - 1 or not passing(error):
                    raise self._failure(name, error) from None
                pause(attempt)
        raise AssertionError

    def _no_bucket(self) -> PunaError:
        return PunaError(f"{self.uri}: the bucket {self.bucket} does not exist; create it, or give another with --store")

    def _failure(self, name: str, error: Exception) -> PunaError:
        """Return the error for a failed request, which says what to do and contains no secrets."""
        text = " ".join(str(error).split())
        for variable in SECRET:
            if os.environ.get(variable):
                text = text.replace(os.environ[variable], "***")
        text = text[:300]
        if "NoSuchBucket" in str(error):
            return self._no_bucket()
        refused = isinstance(error, (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError))
        if refused or _status(error) in ("401", "403"):
            what = "access was denied; the AWS_… environment variables must hold credentials for the bucket"
            return PunaError(f"{self.uri}/{name}: {what} ({text})")
        return PunaError(f"{self.uri}/{name}: the request to the object store failed ({text}); run again, finished work is kept")


@lru_cache(maxsize=8)
def _connect(bucket: str, prefix: str, endpoint: str) -> S3Store:
    if not any(os.environ.get(name) for name in CREDENTIALS):
        raise PunaError(f"store s3://{bucket}/{prefix}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment")
    # The server compares uploads with this checksum and rejects those with flipped bits.
    return S3Store(
        bucket, prefix=prefix or None, config={"checksum_algorithm": "SHA256"},
        client_options={"allow_http": endpoint.startswith("http://"), "timeout": timedelta(seconds=120)},
        retry_config={"max_retries": 8, "retry_timeout": timedelta(seconds=120), "backoff": {"max_backoff": timedelta(seconds=8)}},
    )  # fmt: skip


def _status(error: Exception) -> str:
    """Return the HTTP status code in the message of a client error; empty if there is none."""
    match = re.search(r"status code: (\d+)", str(error))
    return match[1] if match else ""


def passing(error: Exception) -> bool:
    """True if the request that failed with `error` may succeed when retried."""
    return isinstance(error, obstore.exceptions.GenericError) and _status(error) in ("", "409", "429", "500", "502", "503", "504")


def pause(attempt: int) -> None:
    time.sleep(min(5.0, 0.05 * 2**attempt) * (0.5 + random.random()))
