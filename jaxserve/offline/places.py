"""From what the command line names to files: paths, patterns, addresses, standard input."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from jaxserve import sources
from jaxserve.offline.codecs import MissingPackage, codec_of
from jaxserve.offline.errors import InputError
from jaxserve.offline.files import JobFiles
from jaxserve.offline.inputs import Input, InputFile, expand
from jaxserve.offline.output import Layout
from jaxserve.offline.remote import ObjectStorage, is_remote
from jaxserve.offline.storage import LocalStorage, Storage, local

STANDARD_INPUT = "-"
_SPOOL = "input.jsonl"


def storage_of(path: str) -> tuple[Storage, str]:
    """The storage that a path or address lies in, and the path there.  Raises InputError."""
    path = path.removeprefix("file://")
    if not is_remote(path):
        return LocalStorage(), local(path)
    try:
        return ObjectStorage(path), path
    except ValueError as error:  # MissingPackage too
        raise InputError(str(error)) from error


def find_inputs(arguments: Sequence[str], output: str | None = None) -> list[InputFile]:
    """What a job that writes `output` reads: a pattern does not name what the job wrote itself.

    Raises InputError when one is missing, is no file, or is named twice.
    """
    files: list[InputFile] = []
    is_own = _own_files(output)
    for argument in arguments:
        if argument == STANDARD_INPUT:
            raise InputError("standard input (-) cannot go with other inputs")
        storage, path = storage_of(argument)
        if isinstance(storage, ObjectStorage):
            files += _remote_inputs(storage, argument, is_own)
            continue
        for name in expand(argument.removeprefix("file://"), is_own):
            _check_local_input(name)
            files.append(InputFile(storage, local(name), name))
    seen: set[str] = set()
    for file in files:
        _check_codec(file.path)
        if file.path in seen:
            raise InputError(f"{file.name} is named twice")
        seen.add(file.path)
    return files


def find_output(path: str, inputs: Sequence[InputFile], *, rolled: bool) -> tuple[Storage, Layout]:
    """Where results go.  Raises InputError when they cannot, or when an input would be hit."""
    storage, where = storage_of(path)
    _check_codec(where)
    layout = Layout(where, rolled or not storage.appends)
    if storage.appends:
        _check_local_output(path, where)
    for file in inputs:
        same = file.path in (where, layout.part(1))
        if not same and storage.appends and os.path.exists(where) and os.path.exists(file.path):
            same = os.path.samefile(where, file.path)
        if same:
            raise InputError(f"--output {path} is the input file; name another file")
    return storage, layout


def check_apart(layout: Layout, model: Path) -> None:
    """Raises InputError when results would be taken for a part of the model, or replace one;
    ValueError for a damaged manifest."""
    where = layout.part(1)
    if not is_remote(where) and sources.is_file_of(model, Path(where)):
        raise InputError(
            f"--output {layout.output} lies among the files that the model {model} is loaded from; "
            f"name another file or folder"
        )


def spool(files: JobFiles, stream: BinaryIO, *, anew: bool) -> Input:
    """Standard input, kept beside the journal, so that the job can go on without it.

    When it is empty the copy of an earlier run is the input.  When it is not, it must be what the
    earlier run was given, unless it may be `anew`; the earlier copy stays until `files.settle`.
    Raises InputError.
    """
    storage = files.storage
    path = f"{files.layout.folder}/{_SPOOL}"
    data = stream.read(1)
    if not data:
        if storage.size(path) is None:
            raise InputError("standard input is empty")
        return Input([InputFile(storage, path, "standard input")])
    side = f"{path}.new"
    file = storage.append(side, 0)
    try:
        while data:
            file.write(data)
            data = stream.read(1 << 20)
        file.sync()
    except BaseException:
        storage.remove(side)  # the disk may be full of it
        raise
    finally:
        file.close()
    if storage.size(path) is None:
        storage.rename(side, path)
    elif storage.size(path) == storage.size(side) and _equal(storage, path, side):
        storage.remove(side)
    elif anew:
        files.replace(side, path)
        return Input([InputFile(storage, side, "standard input")])
    else:
        storage.remove(side)
        raise InputError(
            "standard input is not what this job was begun with; give the same again or nothing "
            "(< /dev/null), or add --restart or --accept-changes"
        )
    return Input([InputFile(storage, path, "standard input")])


def _own_files(output: str | None) -> Callable[[str], bool]:
    """Tells the results of a job that began before, which its journal shows, from other files."""
    if output is None:
        return lambda name: False
    storage, where = storage_of(output)
    layout = Layout(where, rolled=True)
    try:
        began = bool(storage.names(layout.folder))
    except OSError as error:
        raise InputError(f"--output {output} cannot be looked at: {error}") from error
    if not began:
        return lambda name: False
    before, _, after = layout.part(1).rpartition("00001")
    part = re.compile(re.escape(before) + r"\d{5,}" + re.escape(after))

    def is_own(name: str) -> bool:
        name = name if is_remote(name) else local(name)
        return name == where or part.fullmatch(name) is not None

    return is_own


def _equal(storage: Storage, first: str, second: str) -> bool:
    with storage.open(first) as a, storage.open(second) as b:
        while data := a.read(1 << 20):
            if b.read(1 << 20) != data:
                return False
    return True


def _check_local_input(name: str) -> None:
    if not os.path.exists(name):
        raise InputError(f"{name} does not exist")
    if not os.path.isfile(name):
        raise InputError(f"{name} is no regular file; a job reads its input twice")
    if not os.access(name, os.R_OK):
        raise InputError(f"{name} cannot be read: permission denied")


def _check_local_output(path: str, where: str) -> None:
    folder = os.path.dirname(where)
    if not os.path.isdir(folder):
        raise InputError(f"the folder of --output does not exist: {folder}")
    if os.path.isdir(where):
        raise InputError(f"--output {path} is a folder; name a file")
    if not os.access(where if os.path.exists(where) else folder, os.W_OK):
        raise InputError(f"--output {path} cannot be written: permission denied")


def _check_codec(path: str) -> None:
    try:
        codec_of(path)
    except MissingPackage as error:
        raise InputError(str(error)) from error


def _remote_inputs(
    storage: ObjectStorage, address: str, is_own: Callable[[str], bool]
) -> list[InputFile]:
    try:
        found = [address]
        if any(c in address for c in "*?["):
            found = [name for name in storage.glob(address) if not is_own(name)]
        missing = not found or (len(found) == 1 and storage.size(found[0]) is None)
    except OSError as error:
        raise InputError(f"{address} cannot be read: {error}") from error
    if missing:
        raise InputError(f"{address} does not exist")
    return [InputFile(storage, path, path) for path in found]
