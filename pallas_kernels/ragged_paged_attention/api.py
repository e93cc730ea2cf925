"""Ragged paged attention and the KV it reads: the one entrance for all back ends.

The KV is one array for all layers, K and V side by side in the minor axis:
[L, blocks, K, block_size, 2H].  Nothing outside `pallas_kernels` knows that.  A block of all kv
heads is contiguous, so a TPU or GPU kernel fetches it (or one head of it) in one copy.  Above 64, H
is rounded up to a multiple of 64 with zeros: a minor axis of 2 x 96 makes XLA lay the KV out in
another order on a TPU and copy all of it around every kernel.

Its dtype is float32 or bfloat16, that of the queries or not (kernels take only the same), or one
byte: int8, float8_e4m3fn, float8_e5m2.  One-byte
KV holds k / kv_scales[layer, head, 0] and v / kv_scales[layer, head, 1]: the scales are
f32[L, K, 2], constant while anything written with them is in the cache.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import xla
from pallas_kernels.ragged_paged_attention.plan import Mask, Rows

Implementation = Literal["auto", "xla", "tpu", "gpu"]

KV_AXES = ("layers", "blocks", "kv_heads", None, None)  # what the axes of the KV array are


def kv_shape(
    layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int
) -> tuple[int, ...]:
    """Shape of the KV array."""
    return (layers, num_blocks, kv_heads, block_size, 2 * cache_width(head_dim))


def cache_width(head_dim: int) -> int:
    """H as the KV holds it."""
    return head_dim if head_dim <= 64 else -(-head_dim // 64) * 64


def side_by_side(k: jax.Array, v: jax.Array) -> jax.Array:
    """[..., H] and [..., H] as the KV holds them."""
    pad = cache_width(k.shape[-1]) - k.shape[-1]
    padding = (*((0, 0),) * (k.ndim - 1), (0, pad))
    return jnp.concatenate([jnp.pad(k, padding), jnp.pad(v, padding)], axis=-1)


def init_kv(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """An empty KV of a shape from `kv_shape`."""
    return jnp.zeros(shape, dtype)


def num_kv_heads(kv: jax.Array) -> int:
    """K of a KV array."""
    return kv.shape[KV_AXES.index("kv_heads")]


def ragged_paged_attention(  # noqa: PLR0913  one flat signature for all back ends
    q: jax.Array,  # [T, N, H]
    kv: jax.Array,  # KV of all layers, already holding this step's tokens
    layer: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[B, P]
    query_starts: jax.Array,  # i32[B + 1]
    kv_lens: jax.Array,  # i32[B]
    num_decodes: jax.Array,  # i32[1]
    *,
    block_size: int,
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    kv_scales: jax.Array | None = None,  # f32[L, K, 2]
    implementation: Implementation = "xla",
) -> jax.Array:
    """Attention output [T, N, H] of the packed queries; tokens of no row are zero.

    Row b owns the queries query_starts[b]:query_starts[b + 1], which are its last positions; the
    first num_decodes rows have exactly one, any later row has none or more.  A query sees the
    positions of its row up to its own, of those only the last `window` (itself included).  Scores
    are q . k * scale (H ** -0.5 by default), then soft_cap * tanh(scores / soft_cap).  Positions
    that nobody wrote may hold anything, NaN included.

    `implementation`: "auto" takes the kernel of the platform that is compiled for, XLA where it has
    none for these shapes (`unsupported`); a name takes that one.  Every platform's is traced under
    "auto", which costs about a second a program (0.8 to 1.5 s of CPU time), and which GPU it is
    nobody can tell there: where the device is known to have none (`unsupported_device`), say "xla".

    Raises ValueError for a block size that is not that of the KV, for one-byte KV without scales,
    and for a named kernel that cannot run these shapes.
    """
    if kv.shape[3] != block_size:
        raise ValueError(f"the KV has blocks of {kv.shape[3]} tokens, the step has {block_size}")
    if kv.dtype.itemsize == 1 and kv_scales is None:
        raise ValueError(f"a KV of {kv.dtype} needs kv_scales of shape [L, K, 2]")
    if scale is None:
        scale = float(q.shape[-1] ** -0.5)
    factors = None if kv_scales is None else kv_scales[layer]
    mask = Mask(window, soft_cap, scale)
    rows = Rows(block_tables, query_starts, kv_lens, num_decodes[0])
    width = q.shape[-1]
    q = jnp.pad(q, ((0, 0), (0, 0), (0, kv.shape[-1] // 2 - width)))
    run = _choose(implementation, q, kv, block_tables)
    return run(q, kv, layer, rows, mask, factors)[..., :width]


def unsupported(name: str, q: jax.Array, kv: jax.Array, block_tables: jax.Array) -> str | None:
    """Why the kernel of that name ("tpu" or "gpu") cannot run such shapes, or None."""
    return _kernel(name).unsupported(q, kv, block_tables)


def unsupported_device(device: Any) -> str | None:
    """Why no kernel runs on such a device, or None; the description of one that is not here will
    do (`jax.experimental.topologies`).  Whether a kernel takes the shapes is `unsupported`.
    """
    if device.platform == "tpu":
        return None
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability.partition(".")[0] == "9":  # wgmma is no instruction of older or newer ones
        return None
    return (
        f"{device.device_kind} has compute capability {capability}, "
        "the kernels are for 9 (Hopper) and for TPUs"
    )


def _choose(
    implementation: Implementation, q: jax.Array, kv: jax.Array, block_tables: jax.Array
) -> Callable[..., jax.Array]:
    if implementation == "xla":
        return _xla
    if implementation != "auto":
        reason = unsupported(implementation, q, kv, block_tables)
        if reason is not None:
            raise ValueError(f"attention kernel {implementation!r}: {reason}")
        return _kernel(implementation).ragged_paged_attention
    kernels = {
        platform: _kernel(name).ragged_paged_attention
        for platform, name in (("tpu", "tpu"), ("cuda", "gpu"))
        if unsupported(name, q, kv, block_tables) is None
    }

    def run(q, kv, layer, rows, mask, factors):
        def bound(one):
            return lambda q, kv, layer, rows, window, factors: one(
                q, kv, layer, rows, mask._replace(window=window), factors
            )

        operands = (q, kv, layer, rows, mask.window, factors)
        branches = {platform: bound(one) for platform, one in kernels.items()}
        return jax.lax.platform_dependent(*operands, default=bound(_xla), **branches)

    return run


def _kernel(name: str):
    """The module of a kernel; imported here because Pallas takes a second to load."""
    if name == "tpu":
        from pallas_kernels.ragged_paged_attention import tpu

        return tpu
    from pallas_kernels.ragged_paged_attention import gpu

    return gpu


def _xla(  # noqa: PLR0913  a step's arrays
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    rows: Rows,
    mask: Mask,
    factors: jax.Array | None,  # f32[K, 2]
) -> jax.Array:
    if factors is None:
        return xla.ragged_paged_attention(q, kv, layer, rows, mask)
    mask = mask._replace(scale=factors[:, 0, None, None] * mask.scale)
    out = xla.ragged_paged_attention(q, kv, layer, rows, mask)
    per_head = jnp.repeat(factors[:, 1], q.shape[1] // kv.shape[2])[:, None]
    return (out.astype(jnp.float32) * per_head).astype(q.dtype)
