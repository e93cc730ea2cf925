"""How large the KV pool may be."""

from collections.abc import Callable
from typing import Any

from jaxserve.runner.planned import HEADROOM

GIB = 1 << 30
CPU_POOL_GIB = 2.0


def pool_gib(
    configured_gib: float,
    memory_stats: dict[str, Any] | None,
    weight_bytes: int,
    measure_scratch: Callable[[], int],
) -> float:
    """GiB of KV pool on one device.

    A configured size wins.  A device that does not report its memory (the CPU) gets 2 GiB.  Else
    the largest programs are compiled first (`measure_scratch` returns their bytes of scratch and
    outputs) and the pool is what they and the weights leave.  Raises ValueError when nothing is
    left.
    """
    if configured_gib:
        return configured_gib
    if not memory_stats or "bytes_limit" not in memory_stats:
        return CPU_POOL_GIB
    scratch = measure_scratch()
    free = HEADROOM * memory_stats["bytes_limit"] - weight_bytes - scratch
    if free <= 0:
        raise ValueError(
            f"no memory left for the KV pool: the device has "
            f"{memory_stats['bytes_limit'] / GIB:.2f} GiB, weights take {weight_bytes / GIB:.2f} "
            f"and the largest programs {scratch / GIB:.2f}; lower scheduler.token_budget or "
            f"scheduler.max_seqs, or use more devices"
        )
    return free / GIB
