"""What a compiled program says about itself in its text: copies and collectives.  No jax here."""

import collections
import re
from collections.abc import Iterable, Sequence

_OPERATION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<op>[a-z][a-z0-9\-]*)\("
)
_ARRAY = re.compile(r"[a-z]\w*\[([\d,]*)\](\{[^}]*\})?")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_MOVES = ("copy", "copy-start", "transpose", "slice", "dynamic-slice", "convert", "custom-call")
_MOVING = re.compile(
    r"(loop_|wrapped_|input_)*(copy|transpose|dynamic[-_]slice|slice|all-gather)([-_.\d]|$)"
)
_ALIASED = "output_to_operand_aliasing="  # of a kernel that updates its operand
_FAST_MEMORY = re.compile(r"S\([1-9]\d*\)")  # on-chip: what is fetched there is used, not copied


def collectives(hlo: str) -> dict[str, int]:
    """Collective operations in the text, each counted once however often a loop runs it."""
    found: collections.Counter[str] = collections.Counter()
    for line in hlo.splitlines():
        match = _OPERATION.match(line)
        if match:
            name = match["op"].removesuffix("-start")
            if name in _COLLECTIVES:
                found[name] += 1
    return dict(found)


def kv_copies(hlo: str, num_blocks: int) -> list[str]:
    """Operations that make an array with `num_blocks` as one of its sizes out of another.

    `num_blocks` must be a number that no other size of the program is: a large prime.  Writing
    into the KV in place is a scatter (or a kernel, or a loop that carries the KV), and no copy.
    """
    found: list[str] = []
    for name, kind, arrays in _operations(hlo):
        whole = any(num_blocks in shape and not fast for shape, fast in arrays)
        moves = kind in _MOVES or (kind == "fusion" and not _in_place(name))
        if whole and moves:
            found.append(f"{kind} {name}")
    return found


def weight_copies(hlo: str, shapes: Iterable[Sequence[int]]) -> list[str]:
    """Operations that only move, and whose result is as large as a weight or as one layer of it.

    `shapes`: of the weights on one device.  What is fetched into on-chip memory is no copy.
    """
    sizes = {_sizes(shape) for shape in shapes}
    found: list[str] = []
    for name, kind, arrays in _operations(hlo):
        if not _MOVING.match(name if kind == "fusion" else kind):
            continue
        # What starts and ends later names its operand first, but for copy-start.
        later = kind.endswith("-start") and kind != "copy-start"
        for shape, fast in arrays[1:2] if later else arrays[:1]:
            if not fast and _sizes(shape) in sizes:
                found.append(f"{kind} {name} {list(shape)}")
    return found


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """Equal for arrays that differ in the order of their axes, or in axes of one."""
    return tuple(sorted(size for size in shape if size != 1))


def _in_place(name: str) -> bool:
    return "scatter" in name or "dynamic-update-slice" in name or "dynamic_update_slice" in name


def _operations(hlo: str) -> Iterable[tuple[str, str, list[tuple[tuple[int, ...], bool]]]]:
    """Name, kind and (sizes, in on-chip memory) of each array that an operation makes; the insides
    of fusions, which make nothing, are left out."""
    fused = False
    for line in hlo.splitlines():
        if not line.startswith(" "):
            header = line.split("(")[0]
            fused = "fused_computation" in header or "fused" in header.split(" ")[0]
            continue
        if fused:
            continue
        match = _OPERATION.match(line)
        in_place = match and match["op"] == "custom-call" and _ALIASED in line
        if match and not in_place:
            arrays = [
                (
                    tuple(int(size) for size in sizes.split(",") if size),
                    bool(_FAST_MEMORY.search(layout)),
                )
                for sizes, layout in _ARRAY.findall(match["type"])
            ]
            yield match["name"], match["op"], arrays
