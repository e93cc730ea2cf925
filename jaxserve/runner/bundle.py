"""Compiled programs in a folder, to start without compiling: made by preflight, read by the runner.

A program is found by what it was lowered to, the kind and number of its devices, and the versions
of the compilers; whatever differs is compiled as if there were no bundle.  They are trusted as
code is: load bundles that you made.
"""

import hashlib
import os
import re
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.tree_util import PyTreeDef, default_registry

from jaxserve.runner import compile_cache

_DIGEST = 16  # bytes before a program
_LENGTH = 4  # bytes: how long the tree of its outputs is
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")


def folder_of(root: Path, devices: list[Any]) -> Path:
    """Where the programs for such devices lie, by kind, number and versions."""
    kind = re.sub(r"\W+", "-", devices[0].device_kind).strip("-").lower()
    found = [f"{kind}-x{len(devices)}"]
    for name in _COMPILERS:
        try:
            found.append(f"{name}-{version(name)}")
        except PackageNotFoundError:
            continue
    return root / "_".join(found)


def save(root: Path, spec: Any, lowered: Any, compiled: Any) -> int:
    """Writes a compiled program; returns its bytes.  It appears whole or not at all.

    Raises RuntimeError while the compile cache is on: a CPU's program that was read from there
    cannot be stored again (XLA leaves its functions out, and says so only when it is loaded).
    """
    if compile_cache.in_use():
        raise RuntimeError("a bundle cannot be made of cached programs; turn the compile cache off")
    data = pack(compiled)
    write(folder_of(root, _devices(spec)) / name_of(spec, lowered), data)
    return len(data)


def load(root: Path, spec: Any, lowered: Any) -> Any | None:
    """The compiled program, ready to run; None when the bundle does not have exactly this one.
    Raises ValueError for a damaged file."""
    path = folder_of(root, _devices(spec)) / name_of(spec, lowered)
    if not path.is_file():
        return None
    try:
        return unpack(path.read_bytes(), spec)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; make the bundle again") from error


def pack(compiled: Any) -> bytes:
    """A compiled program as a file: a digest of what follows, the tree of the outputs, the code."""
    code, _, outputs = serialize_executable.serialize(compiled)
    tree = outputs.serialize_using_proto()
    body = len(tree).to_bytes(_LENGTH, "big") + tree + code
    return _digest(body) + body


def unpack(data: bytes, spec: Any) -> Any:
    """The program of `spec`, ready to run.  Raises ValueError for bytes that `pack` did not make,
    and as XLA does for a program that it cannot load."""
    digest, body = data[:_DIGEST], data[_DIGEST:]
    if digest != _digest(body):
        raise ValueError("damaged")
    end = _LENGTH + int.from_bytes(body[:_LENGTH], "big")
    outputs = PyTreeDef.deserialize_using_proto(default_registry, body[_LENGTH:end])
    inputs = jax.tree.structure((spec.arguments, {}))
    return serialize_executable.deserialize_and_load(
        body[end:], inputs, outputs, execution_devices=_devices(spec)
    )


def write(path: Path, data: bytes) -> None:
    """Whole or not at all; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()


def _devices(spec: Any) -> list[Any]:
    mesh = spec.sharding.mesh
    return jax.devices()[:1] if mesh is None else list(mesh.devices.flat)


def name_of(spec: Any, lowered: Any) -> str:
    """The file of what `spec` was lowered to."""
    digest = hashlib.sha256(lowered.as_text().encode())
    digest.update(repr((spec.donate, spec.compiler_options)).encode())
    return f"{spec.kind}-{spec.bucket}-{digest.hexdigest()[:24]}.bin"
