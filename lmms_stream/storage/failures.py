"""Kinds of failed requests, for all stores. error of any library -> throttled, out of reach, or neither.

Errors are classified by HTTP status, code, and wrapped errors of the operating system. No library of a store is
imported here.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import RemoteDisconnected
from typing import Any

from ..errors import LmmsStreamError, StorageError

_THROTTLED_OR_UNWELL = {408, 425, 429, 500, 502, 503, 504, 509, *range(520, 528)}  # 520 and more: Cloudflare's
_UNREACHABLE = {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
# Codes that services also send with status 400 or 403: botocore's own list, Google's and Databricks' reasons.
_THROTTLING_CODES = {
    "BandwidthLimitExceeded", "EC2ThrottledException", "LimitExceededException", "PriorRequestNotComplete",
    "ProvisionedThroughputExceededException", "REQUEST_LIMIT_EXCEEDED", "RequestLimitExceeded", "RequestThrottled",
    "RequestThrottledException", "RequestTimeout", "SlowDown", "TEMPORARILY_UNAVAILABLE", "ThrottledException",
    "Throttling", "ThrottlingException", "TooManyRequestsException", "TransactionInProgressException",
    "rateLimitExceeded", "userRateLimitExceeded",
}  # fmt: skip


def is_throttled(error: BaseException) -> bool:
    """Return whether the store answered that it is overloaded or unwell, which may pass."""
    status, codes = answer_of(error)
    return status in _THROTTLED_OR_UNWELL or not codes.isdisjoint(_THROTTLING_CODES)


def is_out_of_reach(error: BaseException) -> bool:
    """Return whether the store did not answer: refused, reset, closed or slow connections."""
    return any(_is_of_the_network(each) for each in causes(error))


def certificate_failure(error: BaseException) -> str | None:
    """Return the reason for refusing the server's certificate; None if the certificate was not refused."""
    return next((str(each) for each in causes(error) if isinstance(each, ssl.SSLCertVerificationError)), None)


def answer_of(error: BaseException) -> tuple[int | None, set[str]]:
    """Return the HTTP status (None: no answer) and the codes of the store's answer in an error.

    The first answer along the chain of errors counts; s3transfer, for example, wraps the client's error.
    """
    each: BaseException | None = error
    for _ in range(20):
        if each is None:
            break
        status, codes = _own_answer(each)
        if status is not None or codes:
            return status, codes
        each = each.__cause__ or each.__context__
    return None, set()


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all errors wrapped in it, by any attribute that libraries use."""
    left: list[object] = [error]
    known: set[int] = set()
    while left:
        each = left.pop()
        if not isinstance(each, BaseException) or id(each) in known:
            continue
        known.add(id(each))
        yield each
        inner = (getattr(each, name, None) for name in ("inner_exception", "reason", "__cause__", "__context__"))
        per_address = getattr(each, "errors", None)  # of paramiko
        left += [*inner, *each.args, *(per_address.values() if isinstance(per_address, dict) else ())]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, because libraries append whole answers."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _own_answer(error: BaseException) -> tuple[int | None, set[str]]:
    """Return the answer in the attributes of this error, for botocore, azure, google, oci, databricks and requests."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status, {str(response.get("Error", {}).get("Code", ""))}
    statuses = [getattr(error, name, None) for name in ("status_code", "status", "code")]
    statuses.append(getattr(response, "status_code", None))
    codes = {getattr(error, "code", None), getattr(error, "error_code", None)}
    errors = getattr(error, "errors", None)
    codes |= {each.get("reason") for each in errors if isinstance(each, dict)} if isinstance(errors, list) else set()
    found = [int(each) for each in statuses if isinstance(each, int) and 100 <= each < 600]
    return found[0] if found else None, {each for each in codes if isinstance(each, str)}


def _is_of_the_network(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError, RemoteDisconnected, ssl.SSLEOFError)):
        return True
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN  # an unknown name is not an outage
    return isinstance(error, OSError) and error.errno in _UNREACHABLE


# Errors of disks, with the path and the remedy.

FREE_SOME = "free some, or name another folder (as local, as --work, as the target), or set cache_limit"


def disk_error(where: str, error: OSError, *, room: str = FREE_SOME) -> StorageError:
    """Return the StorageError for an error of the disk, with the remedy. room: remedy for a full disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageError(f"{where}: no room on the disk of this node ({error.strerror}): {room}")
    file = f": {error.filename}" if error.filename else ""
    return StorageError(f"{where}: {error.strerror}{file}: check the path and its rights")


@contextmanager
def disk_errors(where: str, *, room: str = FREE_SOME) -> Iterator[None]:
    """Convert the disk's errors inside to StorageError, see disk_error."""
    try:
        yield
    except LmmsStreamError:
        raise
    except OSError as error:
        raise disk_error(where, error, room=room) from error
