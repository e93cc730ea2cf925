"""How long a step takes at best: an estimate from the chip's data sheet, not a measurement."""

import dataclasses
from typing import Any

F32 = 4  # bytes; activations are summed over chips in float32


@dataclasses.dataclass(frozen=True)
class Load:
    """What one step moves and computes on one device."""

    weight_bytes: int  # read once
    kv_bytes: int  # read once
    flops: float
    link_bytes: float  # sent to other devices


def step_load(model: Any, weights: int, step: dict[str, int]) -> Load:
    """Of a step of `tokens` T with `context` tokens in each of `rows` rows on `devices` = data x
    tensor.

    `model`: the model's config (glossary letters); `weights`: bytes on one device.  Multiply-adds
    count twice; attention counts q . k and the sum over v.
    """
    c, tokens, data, tensor = model, step["tokens"], step["data"], step["tensor"]
    itemsize, rows, context = step["itemsize"], min(step["rows"], tokens), step["context"]
    values = weights / itemsize
    table = c.V * c.D / tensor if not getattr(c, "tie", False) else 0  # embedding: T rows are read
    read = max(0, weights - int(table * itemsize))
    kv_heads = c.K / tensor
    windows = getattr(c, "windows", ()) or [None] * c.L
    seen = sum(context if w is None else min(w, context) for w in windows)  # in all layers
    kv_bytes = int(2 * kv_heads * c.H * seen * rows * step["kv_itemsize"])
    share = -(-tokens // data)  # tokens whose matmuls a device computes
    matmuls = 2.0 * (values - c.V * c.D / tensor - table) * share
    head = 2.0 * c.V * c.D / tensor * rows
    attention = 4.0 * (c.N / tensor) * c.H * seen * tokens
    link = 0.0
    if tensor > 1:  # two all-reduces a layer and one for the embedding, each sent and received
        link = (2 * c.L + 1) * share * c.D * F32 * 2 * (tensor - 1) / tensor
    return Load(read, kv_bytes, matmuls + head + attention, link)


def seconds(load: Load, chip: dict[str, Any]) -> float | None:
    """The longest of memory and arithmetic, and communication on top; None without figures."""
    if not chip:
        return None
    memory = (load.weight_bytes + load.kv_bytes) / (chip["bandwidth_gbs"] * 1e9)
    compute = load.flops / (chip["bf16_tflops"] * 1e12)
    return max(memory, compute) + load.link_bytes / (chip["link_gbs"] * 1e9)
