"""The GPU kernel compiles for an H200 without one: wgmma, no register spills, no copy of the KV."""

import json
import re
from pathlib import Path

import pytest

from tests.kernels import aot

pytestmark = aot.needs_cuda
# N, K, H, block size
SHAPES = [
    (32, 8, 128, 16),
    (9, 3, 64, 16),
    (8, 1, 128, 64),
    (8, 1, 96, 32),
    (4, 4, 256, 16),
    (32, 8, 256, 64),
    (32, 8, 64, 32),
    (32, 32, 128, 128),
    (64, 8, 128, 8),
]
CODE = """
    import json, math, jax, jax.numpy as jnp
    from pallas_kernels.kv_write.api import kv_write
    from pallas_kernels.ragged_paged_attention import api
    from tests.kernels import aot

    def report(shape):
        heads, kv_heads, width, size = shape
        kv_shape = api.kv_shape(2, 4099 * 8 // kv_heads, size, kv_heads, width)
        tokens, rows, table = 128, 24, 16

        def step(kv, q, k, v, slots, tables, starts, lens, decodes, windows):
            for index in range(2):
                kv = kv_write(kv, index, slots, k, v, implementation="auto")
                q = api.ragged_paged_attention(
                    q, kv, jnp.int32(index), tables, starts, lens, decodes, block_size=size,
                    window=windows[index], soft_cap=30.0, implementation="auto")
            return q, kv

        i = lambda *shape: (shape, jnp.int32)
        one = ((tokens, kv_heads, width), "bfloat16")
        shapes = [(kv_shape, "bfloat16"), ((tokens, heads, width), "bfloat16"), one, one,
            i(tokens), i(rows, table), i(rows + 1), i(rows), i(1), i(2)]
        made = aot.compiled(step, shapes, aot.device("h200"), donate=(0,))
        memory, text = made.memory_analysis(), made.as_text()
        return {
            "kv": 2 * math.prod(kv_shape), "alias": memory.alias_size_in_bytes,
            "temp": memory.temp_size_in_bytes,
            "calls": text.count('custom_call_target="mosaic_gpu_v2"')}
"""


def check(shapes: list, folder: Path) -> None:
    """Compiles the shapes and reads the reports of XLA and of ptxas."""
    code = f"\n    print(json.dumps([report(shape) for shape in {shapes}]))"
    dumps = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    reports = aot.child(CODE + code, MOSAIC_GPU_DUMP_TO=str(folder), **dumps)
    for report in reports:
        assert report["alias"] >= report["kv"], report  # the KV comes back in its own memory
        assert report["temp"] < report["kv"] / 4, report  # and no part of it lies elsewhere
        assert report["calls"] == 4, report  # decodes and tiles, for each layer
    assembler = "".join(path.read_text() for path in folder.glob("*.ptxas"))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", assembler)
    assert len(spills) >= 2 * len(shapes), assembler[-2000:]
    assert set(spills) == {("0", "0")}, json.dumps(spills)
    code = [path.read_text() for path in folder.glob("*.ptx")]
    assert all("wgmma.mma_async" in text and "cp.async.bulk.tensor" in text for text in code)


def test_compiles_for_h200_without_spills(tmp_path):
    check(SHAPES[:1], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_compiles_without_spills(shape, tmp_path):
    check([shape], tmp_path)
