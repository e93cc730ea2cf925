"""Laws of the llama file: what it refuses, one place for every weight, a KV that stays put."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model_zoo.decoder import Decoder
from model_zoo.llama import FAMILY
from model_zoo.step_inputs import StepInputs
from pallas_kernels.ragged_paged_attention import api
from tests.reference import tiny

BASE = tiny.CONFIGS["gqa_9_3"]
BLOCK = 16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("sliding_window", 4096),
        ("pretraining_tp", 2),
        ("quantization_config", {"quant_method": "gptq"}),
        ("attn_logit_softcapping", 50.0),
        ("num_key_value_heads", 2),
        ("rope_scaling", {"rope_type": "su"}),
        ("hidden_size", None),
        ("num_hidden_layers", "2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match="rope type 'su'" if name == "rope_scaling" else name):
        FAMILY.config_from_hf(BASE | {name: value})


def test_what_a_config_leaves_out_has_the_default_of_transformers():
    required = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    config = FAMILY.config_from_hf({name: BASE[name] for name in (*required, "vocab_size")})
    assert (config.K, config.H) == (config.N, config.D // config.N)
    assert (config.tie, config.qkv_bias, config.mlp_bias) == (False, False, False)
    assert (config.eps, config.max_position) == (1e-6, 2048)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_b88_every_element_of_every_parameter_has_exactly_one_place(name):
    config = FAMILY.config_from_hf(tiny.CONFIGS[name])
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    filled = {path: np.zeros(shape, int) for path, shape in shapes.items()}
    for place in FAMILY.places(config).values():
        filled[place.path][place.index or ...] += 1
    assert all((count == 1).all() for count in filled.values())


def step(rows: list[tuple[int, int]], num_decodes: int, tokens: int, blocks: int) -> StepInputs:
    """A step of rows (queries, context after it), each in blocks of its own."""
    per_row = blocks // len(rows)
    x = StepInputs(
        tokens=np.zeros(tokens, np.int32),
        token_seats=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int32),
        slots=np.full(tokens, blocks * BLOCK, np.int32),
        block_tables=np.arange(len(rows) * per_row, dtype=np.int32).reshape(len(rows), -1)[:, :64],
        query_starts=np.zeros(len(rows) + 1, np.int32),
        kv_lens=np.array([length for _, length in rows], np.int32),
        num_decodes=np.array([num_decodes], np.int32),
    )
    at = 0
    for row, (count, length) in enumerate(rows):
        positions = np.arange(length - count, length)
        x.positions[at : at + count] = positions
        x.tokens[at : at + count] = (7 * positions + row) % tiny.VOCAB
        x.slots[at : at + count] = row * per_row * BLOCK + positions
        at += count
        x.query_starts[row + 1] = at
    return x


@functools.cache
def model(dtype: str = "float32") -> Decoder:
    return Decoder(FAMILY.config_from_hf(BASE, dtype=dtype), nnx.Rngs(0))


@functools.cache
def program(dtype: str):
    graph, weights = nnx.split(model(dtype))

    def run(weights, kv, x):
        module = nnx.merge(graph, weights)
        hidden, kv = module.forward(kv, x, block_size=BLOCK)
        return module.logits(hidden), kv

    return functools.partial(jax.jit(run, donate_argnums=1), weights)


def new_kv(blocks: int, fill: float, dtype: str = "float32"):
    c = model(dtype).config
    kv = api.init_kv(api.kv_shape(c.L, blocks, BLOCK, c.K, c.H), dtype)
    return jax.tree.map(lambda x: jnp.full_like(x, fill), kv)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_t02_what_was_never_written_never_matters(dtype):
    """Chunks of a prompt, then a decode, over a cache full of NaN and over a clean one."""
    steps = ([(20, 20), (9, 9)], [(13, 33), (5, 14)], [(1, 34), (1, 15)])

    def run(fill: float) -> list[np.ndarray]:
        kv, found = new_kv(8, fill, dtype), []
        for rows in steps:
            decodes = len(rows) if rows[0][0] == 1 else 0
            logits, kv = program(dtype)(kv, step(rows, decodes, 32, 8))
            assert logits.dtype == jnp.float32
            found.append(np.asarray(logits)[: sum(count for count, _ in rows)])
        return found

    for clean, poisoned in zip(run(0.0), run(np.nan), strict=True):
        assert np.isfinite(clean).all()
        np.testing.assert_array_equal(poisoned, clean)


def test_b01_chunks_give_the_logits_of_the_whole_prompt():
    whole, _ = program("float32")(new_kv(8, 0.0), step([(32, 32)], 0, 32, 8))
    for size in (1, 7, 15, 16, 17, 31):
        kv, parts = new_kv(8, 0.0), []
        for end in [*range(size, 32, size), 32]:
            count = end - sum(len(part) for part in parts)
            logits, kv = program("float32")(kv, step([(count, end)], 0, 32, 8))
            parts.append(np.asarray(logits)[:count])
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tokens", [8, 64, 300])
def test_the_kv_is_updated_in_place(tokens):
    """The donated KV is the output, and scratch does not grow with it."""
    c = model("bfloat16").config
    blocks = 16384
    kv = jax.eval_shape(lambda: new_kv(blocks, 0.0, "bfloat16"))
    kv_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv))
    assert kv_bytes == 2 * c.L * c.K * c.H * 2 * blocks * BLOCK
    run = program("bfloat16")
    lowered = run.func.lower(*run.args, kv, step([(tokens, tokens)], 0, tokens, blocks))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == kv_bytes
    assert memory.temp_size_in_bytes < kv_bytes / 4
