"""Which data type a model runs in where nobody asked for one."""

import functools
from pathlib import Path

_CPU_FACTS = Path("/proc/cpuinfo")
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86 and, the last, Arm


def default_dtype(platform: str) -> str:
    """The faster one on devices of `platform`: bfloat16, but float32 on a CPU that has no
    arithmetic for bfloat16.

    There XLA turns every operand into float32 first: matmuls of 256 rows take 1.5 to 2 times as
    long as in float32, those of one row 2.4 times (two cores with AVX2).
    """
    return "bfloat16" if platform != "cpu" or _cpu_has_bfloat16() else "float32"


@functools.cache
def _cpu_has_bfloat16() -> bool:
    return has_bfloat16(_CPU_FACTS.read_text() if _CPU_FACTS.exists() else "")


def has_bfloat16(cpu_facts: str) -> bool:
    """Whether `cpu_facts`, what Linux says of its CPUs, lists bfloat16 arithmetic; where nothing
    is known it counts as missing."""
    for line in cpu_facts.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _BFLOAT16.isdisjoint(value.split())
    return False
