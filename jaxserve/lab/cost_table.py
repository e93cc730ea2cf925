"""A cost table as a file: a cost model, and what it was measured on or taken from.

JSON, for people to read and to write by hand:

    {"jaxserve_costs": 2, "source": "...", "device": "...", "model": "...",
     "costs": {"tokens": [8, 64], "program": [0.006, 0.017], "chunk_pair": 1e-9, ...},
     "facts": {...}}

`costs` are the fields of `jaxserve.costs.CostModel`, in seconds.
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.costs import CostModel

FORMAT = 2


class CostTableError(ValueError):
    """A file that is no cost table; the message names it."""


class CostTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`source` says how the numbers came about: a measurement, or the publication they are from."""

    jaxserve_costs: int = FORMAT
    source: str
    device: str
    model: str
    costs: CostModel
    facts: dict[str, Any] = {}  # whatever else is to be known: versions, errors of the fit


def save(path: Path, table: CostTable) -> None:
    """Whole or not at all; makes the folder.  OSError as files do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: Path) -> CostTable:
    """Raises CostTableError for a file that cannot be read or is no table."""
    try:
        table = msgspec.json.decode(path.read_bytes(), type=CostTable)
    except OSError as error:
        raise CostTableError(f"{path}: cannot be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise CostTableError(f"{path}: not a cost table: {error}") from error
    if table.jaxserve_costs != FORMAT:
        raise CostTableError(
            f"{path}: a cost table of format {table.jaxserve_costs}, not {FORMAT}; measure again "
            f"with `jaxserve lab profile`"
        )
    return table


def file_name(facts: dict[str, Any]) -> str:
    """One for each set of facts that times depend on."""
    text = msgspec.json.encode(facts, order="deterministic")
    return f"{hashlib.blake2b(text, digest_size=12).hexdigest()}.json"
