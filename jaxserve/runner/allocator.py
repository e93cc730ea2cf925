"""The C allocator on the CPU back end: a step's scratch is kept, not given back and taken again."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # malloc.h
_KEEP = 1 << 30  # bytes


def keep_scratch() -> bool:
    """Tells glibc to serve large blocks from one heap that it keeps; True when it obeys.

    By default glibc maps every large block afresh and unmaps it when freed, so that each step pays
    page faults for the same scratch and logits.  Elsewhere than on glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEEP), (_M_TOP_PAD, _KEEP >> 2))
    return all(mallopt(option, value) == 1 for option, value in (*settings, (_M_ARENA_MAX, 1)))
