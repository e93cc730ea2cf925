"""How large the KV pool of an accelerator may be; no jax: preflight needs it too."""

from collections.abc import Callable

GIB = 1 << 30
HEADROOM = 0.92  # what may be planned for; the rest neither the engine nor the compiler sees


def pool_gib(limit: int, weight_bytes: int, measure_scratch: Callable[[], int]) -> float:
    """GiB of KV pool on one device with `limit` bytes of memory.

    The largest programs are compiled first (`measure_scratch` returns their bytes of scratch and
    outputs), and the pool is what they and the weights leave.  Raises ValueError when nothing is
    left.
    """
    scratch = measure_scratch()
    free = HEADROOM * limit - weight_bytes - scratch
    if free <= 0:
        raise ValueError(
            f"no memory left for the KV pool: the device has {limit / GIB:.2f} GiB, weights take "
            f"{weight_bytes / GIB:.2f} and the largest programs {scratch / GIB:.2f}; lower "
            f"scheduler.token_budget or scheduler.max_seqs, or use more devices"
        )
    return free / GIB
