"""Every family against transformers, from a checkpoint that transformers wrote: B01, B07, B10.

Full logits at every position of a prompt that crosses chunks, blocks and windows, however it is
cut, over a cache full of NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model_zoo.step_inputs import StepInputs
from model_zoo.weights import load_module, open_checkpoint
from pallas_kernels.ragged_paged_attention import api
from tests.families.cases import LENGTH, NAMES, case

BLOCK = 8
TOKENS = 72  # of the one compiled step: a multiple of nothing above, with padding at its end
BLOCKS = 12
CHUNKS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 13, LENGTH)
MAX_LEN = 136  # longest request served: beyond the original context of the longrope case


@functools.cache
def program(name: str):
    module = load_module(open_checkpoint(case(name).folder), "float32", max_len=MAX_LEN)
    graph, weights = nnx.split(module)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(weights, kv, x):
        module = nnx.merge(graph, weights)
        hidden, kv = module.forward(kv, x, block_size=BLOCK)
        return module.logits(hidden), kv

    return module.config, functools.partial(run, weights)


def one_row(tokens: list[int], start: int, stop: int, table: np.ndarray) -> StepInputs:
    """The step that computes tokens[start:stop] of one request; pad tokens are token 5."""
    count = stop - start
    positions = np.arange(start, stop, dtype=np.int32)
    slots = np.full(TOKENS, BLOCKS * BLOCK, np.int32)
    slots[:count] = table[positions // BLOCK] * BLOCK + positions % BLOCK
    return StepInputs(
        tokens=np.array([*tokens[start:stop], *[5] * (TOKENS - count)], np.int32),
        token_seats=np.zeros(TOKENS, np.int32),
        positions=np.pad(positions, (0, TOKENS - count)),
        slots=slots,
        block_tables=np.stack([table, table]),
        query_starts=np.array([0, count, count], np.int32),
        kv_lens=np.array([stop, 0], np.int32),
        num_decodes=np.array([int(count == 1)], np.int32),
    )


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers_however_the_prompt_is_cut(name: str) -> None:
    config, run = program(name)
    expected, prompt = case(name).logits, case(name).prompts[LENGTH]
    table = np.random.default_rng(0).permutation(BLOCKS).astype(np.int32)
    shape = api.kv_shape(config.L, BLOCKS, BLOCK, config.K, config.H)
    for chunk in CHUNKS:
        kv = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), api.init_kv(shape, "float32"))
        found = []
        for start in range(0, LENGTH, chunk):
            stop = min(start + chunk, LENGTH)
            logits, kv = run(kv, one_row(prompt, start, stop, table))
            found.append(np.asarray(logits)[: stop - start])
        np.testing.assert_allclose(
            np.concatenate(found), expected, rtol=0, atol=1e-4, err_msg=f"chunks of {chunk}"
        )
