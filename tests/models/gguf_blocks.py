"""Block types of GGUF, one value at a time, as dequantize_row_* of ggml-quants.c does it."""

from collections.abc import Callable, Iterator

import gguf
import numpy as np

Kind = gguf.GGMLQuantizationType


def _half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, at)[0])


def _q4(block: bytes, at: int, value: Callable[[int], float]) -> Iterator[float]:
    yield from (value(q & 15) for q in block[at : at + 16])
    yield from (value(q >> 4) for q in block[at : at + 16])


def _q5(block: bytes, at: int, value: Callable[[int], float]) -> Iterator[float]:
    high = int.from_bytes(block[at : at + 4], "little")
    low = block[at + 4 : at + 20]
    yield from (value(q & 15 | (high >> j & 1) << 4) for j, q in enumerate(low))
    yield from (value(q >> 4 | (high >> (j + 16) & 1) << 4) for j, q in enumerate(low))


def _q4_0(b: bytes) -> Iterator[float]:
    return _q4(b, 2, lambda q: (q - 8) * _half(b, 0))


def _q4_1(b: bytes) -> Iterator[float]:
    return _q4(b, 4, lambda q: q * _half(b, 0) + _half(b, 2))


def _q5_0(b: bytes) -> Iterator[float]:
    return _q5(b, 2, lambda q: (q - 16) * _half(b, 0))


def _q5_1(b: bytes) -> Iterator[float]:
    return _q5(b, 4, lambda q: q * _half(b, 0) + _half(b, 2))


def _q8_0(b: bytes) -> Iterator[float]:
    return (q * _half(b, 0) for q in np.frombuffer(b, np.int8, 32, 2).tolist())


def _scale_min(scales: bytes, j: int) -> tuple[int, int]:
    """get_scale_min_k4: 6 bits each."""
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    low = scales[j + 4]
    return low & 15 | (scales[j - 4] >> 6) << 4, low >> 4 | (scales[j] >> 6) << 4


def _k(b: bytes, low: bytes, high: Callable[[int, int], int]) -> Iterator[float]:
    for part in range(8):  # of 32 values
        scale, minimum = _scale_min(b[4:16], part)
        for i in range(32):
            byte = low[part // 2 * 32 + i]
            q = (byte >> 4 if part % 2 else byte & 15) + high(part, i)
            yield _half(b, 0) * scale * q - _half(b, 2) * minimum


def _q4_k(b: bytes) -> Iterator[float]:
    return _k(b, b[16:144], lambda part, i: 0)


def _q5_k(b: bytes) -> Iterator[float]:
    return _k(b, b[48:176], lambda part, i: 16 * (b[16 + i] >> part & 1))


def _q6_k(b: bytes) -> Iterator[float]:
    low, high = b[:128], b[128:192]
    scales = np.frombuffer(b, np.int8, 16, 192).tolist()
    for half in range(2):
        for part in range(4):
            for i in range(32):
                byte = low[64 * half + 32 * (part % 2) + i]
                q = byte >> 4 if part >= 2 else byte & 15
                q |= (high[32 * half + i] >> 2 * part & 3) << 4
                scale = scales[8 * half + 2 * part + i // 16]
                yield _half(b, 208) * scale * (q - 32)


_VALUES: dict[str, Callable[[bytes], Iterator[float]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
NAMES = tuple(_VALUES)
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """u8 rows of random blocks that stand for `shape` values, scales of sane size."""
    block, size = gguf.GGML_QUANT_SIZES[Kind[name]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    for at in _HALVES.get(name, (0,)):
        scale = rng.uniform(-0.1, 0.1, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def values(name: str, rows: np.ndarray) -> np.ndarray:
    """f32 values of u8 rows of blocks."""
    size = gguf.GGML_QUANT_SIZES[Kind[name]][1]
    blocks = rows.reshape(-1, size)
    found = [list(_VALUES[name](block.tobytes())) for block in blocks]
    return np.array(found, np.float32).reshape(*rows.shape[:-1], -1)
