"""The TPU kernels compile for every chip without one, in the VMEM they state, and copy no KV."""

import json

import pytest

from tests.kernels import aot

pytestmark = [pytest.mark.tpu, aot.needs_libtpu]
# N, K, H, dtype of the queries and of the KV, block size
SHAPES = [
    (32, 8, 128, "bfloat16", "bfloat16", 16),
    (9, 3, 64, "bfloat16", "bfloat16", 16),
    (8, 1, 128, "bfloat16", "bfloat16", 64),
    (8, 1, 96, "bfloat16", "bfloat16", 64),
    (4, 1, 256, "bfloat16", "bfloat16", 16),
    (8, 2, 256, "bfloat16", "bfloat16", 32),
    (32, 32, 128, "bfloat16", "bfloat16", 16),
    (32, 8, 64, "bfloat16", "bfloat16", 128),
    (4, 1, 128, "bfloat16", "bfloat16", 64),
    (32, 8, 128, "bfloat16", "int8", 32),
    (9, 3, 64, "bfloat16", "int8", 64),
    (32, 8, 128, "bfloat16", "float8_e4m3fn", 32),
    (32, 8, 128, "bfloat16", "float8_e5m2", 32),
    (32, 8, 128, "float32", "float32", 16),
    (32, 8, 128, "bfloat16", "float32", 16),
]
KINDS = (0, 1, 9)  # as it is, heads packed in pairs, scaled KV
# Two layers of write and attention with the KV as carry; windows differ by layer.
STEP = """
    import json, math, re, jax, jax.numpy as jnp
    from pallas_kernels.kv_write.api import kv_write
    from pallas_kernels.ragged_paged_attention import api, tpu, tuning
    from tests.kernels import aot
    tpu.LEAST_VMEM = 0  # the kernels get the VMEM that they state, and no more

    def report(chip, shape, slice_layer=False):
        heads, kv_heads, width, dtype, kv_dtype, size = shape
        kv_shape = api.kv_shape(2, 4099 * 8 // kv_heads, size, kv_heads, width)
        tokens, rows, table = 128, 24, 16
        scaled = jnp.dtype(kv_dtype).itemsize == 1

        def step(kv, q, k, v, slots, tables, starts, lens, decodes, windows, scales):
            scales = scales if scaled else None
            def layer(index, carry):
                q, kv = carry
                kv = kv_write(kv, index, slots, k, v, scales, implementation="auto")
                seen, at = (kv[index][None], 0 * index) if slice_layer else (kv, index)
                q = api.ragged_paged_attention(
                    q, seen, at, tables, starts, lens, decodes, block_size=size,
                    window=windows[index], kv_scales=scales, implementation="auto")
                return q, kv
            return jax.lax.fori_loop(0, 2, layer, (q, kv))

        i = lambda *shape: (shape, jnp.int32)
        one = ((tokens, kv_heads, width), dtype)
        shapes = [(kv_shape, kv_dtype), ((tokens, heads, width), dtype), one, one, i(tokens),
            i(rows, table), i(rows + 1), i(rows), i(1), i(2), ((2, kv_heads, 2), jnp.float32)]
        made = aot.compiled(step, shapes, aot.device(chip), donate=(0,))
        memory, text = made.memory_analysis(), made.as_text()
        return {
            "kv": math.prod(kv_shape) * jnp.dtype(kv_dtype).itemsize,
            "alias": memory.alias_size_in_bytes, "temp": memory.temp_size_in_bytes,
            "kernels": sorted(set(re.findall(r"(ragged_paged_attention_\\w+|kv_write)", text))),
            "calls": text.count('custom_call_target="tpu_custom_call"')}
"""


def compile_all(chip: str, shapes: list, sliced: list | None = None) -> list[dict]:
    """Reports of the shapes, then of those in `sliced` with a layer cut out of the KV.  One child
    for all: to start libtpu takes as long as to compile a shape."""
    code = f"\n    found = [report({chip!r}, shape) for shape in {shapes}]"
    code += (
        f"\n    found += [report({chip!r}, shape, slice_layer=True) for shape in {sliced or []}]"
    )
    return aot.child(STEP + code + "\n    print(json.dumps(found))")


def check(reports: list[dict]) -> None:
    for report in reports:
        assert report["alias"] >= report["kv"], report  # the KV comes back in its own memory
        assert report["temp"] < report["kv"] / 8, report  # and no part of it lies elsewhere
        assert report["calls"] >= 3, report  # write, decodes, at least one size of tiles


@pytest.fixture(scope="module")
def quick() -> list[dict]:
    """One shape of each kind, and the first with a sliced layer."""
    return compile_all("v5e", [SHAPES[i] for i in KINDS], SHAPES[:1])


def test_every_kind_of_shape_compiles_for_v5e_in_place(quick: list[dict]):
    check(quick[:-1])
    assert quick[0]["calls"] == 4, json.dumps(quick[0])


def test_a_sliced_layer_is_seen(quick: list[dict]):
    """Negative control: `kv[layer]` copies a layer of the cache, which `check` must notice."""
    report = quick[-1]
    assert report["temp"] > report["kv"] / 4, report
    with pytest.raises(AssertionError):
        check([report])


@pytest.mark.slow
@pytest.mark.parametrize("chip", aot.TPUS)
def test_every_shape_compiles(chip):
    check(compile_all(chip, SHAPES))
