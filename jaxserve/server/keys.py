"""API keys."""

import hashlib
import hmac
from pathlib import Path


class Keys:
    """Those who may use the server.  Only digests are kept."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def allow(self, key: bytes) -> bool:
        """Takes the same time whatever `key` has in common with a key that is right."""
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, own) for own in self._digests]
        return any(matches)


def read(path: Path) -> Keys:
    """One key a line; blank lines and those that begin with # do not count.

    Raises ValueError for a file without keys or with one that no header can carry, OSError.
    """
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{path} holds no key; write one a line")
    for number, line in enumerate(lines, 1):
        if line in keys and not (line.isascii() and line.isprintable() and " " not in line):
            raise ValueError(f"{path}, line {number}: a key is printable ASCII without spaces")
    return Keys(keys)


def bearer(header: bytes) -> bytes:
    """The key of an Authorization header; empty when there is none."""
    scheme, _, key = header.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
