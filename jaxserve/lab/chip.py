"""Costs of a chip that nobody measured: data-sheet bandwidth and peak, as preflight estimates them.

A bound from below: no device reaches its data sheet.  `efficiency` says how much of it to count on.
"""

import types
from typing import Any

from jaxserve.costs import CostModel
from jaxserve.preflight import check, roofline
from jaxserve.preflight.target import Target
from jaxserve.runner.memory import GIB

_ITEMSIZE = {"float32": 4, "bfloat16": 2}
_SCRATCH_BYTES = GIB  # of the programs, which are not compiled here


def cost_model(
    plan: dict[str, Any], chip: dict[str, Any], *, efficiency: float = 1.0, host_s: float = 0.0
) -> CostModel:
    """`plan`: what preflight's child says of a model; `chip`: an entry of chips.json."""
    model = types.SimpleNamespace(**plan["model"])
    mesh = {"data": plan["data"], "tensor": plan["tensor"]}
    sizes = {"itemsize": _ITEMSIZE[plan["dtype"]], "kv_itemsize": _ITEMSIZE[plan["kv_dtype"]]}

    def seconds(weights: int, tokens: int, rows: int, context: int) -> float:
        step = {"tokens": tokens, "rows": rows, "context": context, **sizes, **mesh}
        found = roofline.seconds(roofline.step_load(model, weights, step), chip)
        assert found is not None
        return found / efficiency

    tokens, rows = plan["token_buckets"], _rows(plan["max_seqs"])
    peak = chip["bf16_tflops"] * 1e12 * efficiency
    flops_a_pair = 4.0 * model.L * (model.N / mesh["tensor"]) * model.H
    kv_bytes = 2 * model.L * (model.K / mesh["tensor"]) * model.H * sizes["kv_itemsize"]
    head = 2.0 * model.D * model.V / mesh["tensor"] / peak  # its weights are read in the backbone
    return CostModel(
        tokens=tuple(tokens),
        program=tuple(seconds(plan["weight_bytes"], size, 0, 0) for size in tokens),
        rows=rows,
        sampling={"greedy": tuple(head * size for size in rows)},
        single_context=max(
            kv_bytes / (chip["bandwidth_gbs"] * 1e9 * efficiency), flops_a_pair / peak
        ),
        chunk_pair=flops_a_pair / peak,
        host=host_s,
    )


def pool_gib(plan: dict[str, Any], target: Target) -> float:
    """GiB that weights, state and a guess of scratch leave for the KV on each chip.

    Raises ValueError when that is nothing.
    """
    usable = check.usable_bytes(target)
    assert usable is not None
    free = usable - plan["weight_bytes"] - plan["state_bytes"] - _SCRATCH_BYTES
    if free <= 0:
        raise ValueError(
            f"the weights ({plan['weight_bytes'] / GIB:.1f} GiB a chip) do not fit {target}; raise "
            f"mesh.tensor"
        )
    return free / GIB


def _rows(most: int) -> tuple[int, ...]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return tuple(sizes)
