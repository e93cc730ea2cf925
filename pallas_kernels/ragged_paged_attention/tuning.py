"""Sizes of the kernels' pieces: from tables keyed by device kind, else by rule.

`tuned/tpu.json` maps a device kind to a list of entries, the first that fits wins:
{"when": {"kv_heads": 8, "head_dim": 128}, "sizes": {"decode_span": 512}}.  What an entry does not
say comes from the rule.
"""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp

MIB = 2**20
TURN_BYTES = MIB  # KV of one turn: 1.3 us of a v5e's bandwidth (819 GB/s); no chip has tuned it
VMEM_BUDGET = 12 * MIB  # of the 16 that a TPU v5e gives a kernel by default
SMEM_BUDGET = 512 * 2**10  # for block tables
TILE_LINES = 256  # rows of a chunk's matmul: fewer would read the KV too often for its matmuls


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the sizes depend on; per device, after sharding."""

    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    block_size: int
    q_dtype: str
    kv_dtype: str

    @classmethod
    def of(cls, q: jax.Array, kv: jax.Array) -> "Problem":
        """That of queries [T, N, H] and a KV [L, blocks, K, block_size, 2H]."""
        return cls(q.shape[1], kv.shape[2], q.shape[2], kv.shape[3], str(q.dtype), str(kv.dtype))

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self.kv_heads * 2 * self.head_dim * jnp.dtype(self.kv_dtype).itemsize

    @property
    def lanes(self) -> int:
        """Minor axis W of queries and output in the TPU kernels."""
        return self.head_dim if self.head_dim % 128 == 0 else 2 * self.head_dim


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How a TPU kernel cuts its work."""

    decode_rows: int  # rows of one query that share a grid step
    decode_span: int  # positions a turn; rounded down to whole blocks, at least one
    tiles: tuple[int, ...]  # queries a tile, largest first
    tile_span: int
    cores: int = 1  # that share one device (megacore)

    def decode_blocks(self, block_size: int) -> int:
        """Blocks a turn of a pack."""
        return max(1, self.decode_span // block_size)

    def tile_blocks(self, block_size: int) -> int:
        """Blocks a turn of a tile."""
        return max(1, self.tile_span // block_size)


@dataclasses.dataclass(frozen=True)
class GpuSizes:
    """How the GPU kernel cuts its work."""

    span: int  # positions a turn; at least one block
    parts: int  # most parts that a decode's context is split into
    part_turns: int  # turns of a part, unless that makes more than `parts`

    def blocks(self, block_size: int) -> int:
        """Blocks a turn."""
        return max(1, self.span // block_size)


@functools.cache
def _table(name: str) -> dict[str, list[dict[str, Any]]]:
    folder = resources.files("pallas_kernels.ragged_paged_attention") / "tuned"
    return json.loads((folder / name).read_text())


def device_kind() -> str | None:
    """The kind of device that is compiled for, where the context says; no device is asked."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.device_kind


def tpu_sizes(problem: Problem, kind: str | None = None) -> Sizes:
    """Sizes for a device kind ("TPU v5 lite"), or by rule where it is unknown or untuned."""
    sizes = _rule(problem)
    for entry in _table("tpu.json").get(kind or "", []):
        if all(getattr(problem, name) == value for name, value in entry["when"].items()):
            tuned = {k: tuple(v) if k == "tiles" else v for k, v in entry["sizes"].items()}
            return dataclasses.replace(sizes, **tuned)
    return sizes


def gpu_sizes(problem: Problem, rows: int) -> GpuSizes:
    """Sizes for a step of up to `rows` decodes, by rule: four warpgroups for each of 132 SMs."""
    parts = -(-4 * 132 // (rows * problem.kv_heads))
    return GpuSizes(span=64, parts=max(1, min(32, parts)), part_turns=4)


def _rule(problem: Problem) -> Sizes:
    by_128 = TURN_BYTES // (128 * problem.token_bytes)
    rows = min(8, max(1, by_128))
    group = problem.heads // problem.kv_heads
    tile = 128
    while tile > 8 and tile * group > TILE_LINES:
        tile //= 2
    sizes = Sizes(
        decode_rows=rows,
        decode_span=min(512, max(1, by_128 // rows) * 128),
        tiles=(tile, 8) if tile > 8 else (8,),
        tile_span=min(256, max(1, by_128) * 128),
    )
    while sizes.decode_span > 16 and decode_vmem(problem, sizes) > VMEM_BUDGET:
        sizes = dataclasses.replace(sizes, decode_span=sizes.decode_span // 2)
    while sizes.tiles[0] > 8 and tile_vmem(problem, sizes, sizes.tiles[0]) > VMEM_BUDGET:
        tile = sizes.tiles[0] // 2
        sizes = dataclasses.replace(sizes, tiles=(tile, 8) if tile > 8 else (8,))
    return sizes


def _padded(rows: int, lanes: int, dtype: str) -> int:
    """Bytes of a matrix in VMEM, whose tiles are 8 x 128 of 4 bytes."""
    size = jnp.dtype(dtype).itemsize
    sublanes = 32 // size
    return -(-rows // sublanes) * sublanes * -(-lanes // 128) * 128 * size


def _turn_vmem(problem: Problem, lines: int, blocks: int) -> int:
    """Two buffers of a turn of `lines` rows."""
    block = _padded(problem.block_size, 2 * problem.head_dim, problem.kv_dtype)
    return 2 * lines * problem.kv_heads * blocks * block


def decode_vmem(problem: Problem, sizes: Sizes) -> int:
    """VMEM bytes of the decode kernel, scratch and its matmuls' operands included."""
    rows, blocks = sizes.decode_rows, sizes.decode_blocks(problem.block_size)
    span = problem.kv_heads * blocks * problem.block_size
    line = _padded(problem.heads, problem.lanes, problem.q_dtype)
    state = _padded(problem.heads, problem.lanes, "float32") + 2 * _padded(
        problem.heads, 1, "float32"
    )
    scores = _padded(problem.heads, span, "float32")
    operands = 2 * _padded(span, 2 * problem.head_dim, "float32")
    return _turn_vmem(problem, rows, blocks) + rows * (4 * line + state) + 4 * scores + operands


def tile_vmem(problem: Problem, sizes: Sizes, tile: int) -> int:
    """VMEM bytes of the tile kernel, scratch and its matmuls' operands included."""
    blocks = sizes.tile_blocks(problem.block_size)
    span = blocks * problem.block_size
    lines = tile * problem.heads // problem.kv_heads
    line = _padded(lines, problem.lanes, problem.q_dtype)
    state = _padded(lines, problem.lanes, "float32") + 2 * _padded(lines, 1, "float32")
    scores = _padded(lines, span, "float32")
    operands = 2 * _padded(span, 2 * problem.head_dim, "float32")
    pieces = problem.kv_heads * (4 * line + state)
    return _turn_vmem(problem, 1, blocks) + pieces + 4 * scores + operands
