"""Raw log-probabilities of the model: log-softmax in float32, before any sampling option."""

import jax
import jax.numpy as jnp

from jaxserve.runner.sampling import blocks as blk
from jaxserve.runner.sampling import weights as wgt

TOP = 20  # most likely tokens reported for a row


def logprobs(
    logits: jax.Array,  # f32[R, V]
    targets: jax.Array,  # i32[R]  below vocab_size
    vocab_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(chosen f32[R], rank i32[R], top_ids i32[R, K], top f32[R, K]), K = min(20, vocab_size).

    `chosen` and `rank` (1 is best) are those of `targets`.  Equal values rank by id, the lower
    first.  Finite for finite logits; what is below the float32 range is its lowest number.
    """
    blocks = blk.to_blocks(logits, vocab_size)
    values, top_ids = blk.top(blocks, min(TOP, vocab_size))
    peak = values[:, :1]
    mass = jnp.exp(blocks.values - peak[:, :, None]).sum(axis=2).sum(axis=1)
    target = jnp.take_along_axis(logits, targets[:, None], axis=1).astype(jnp.float32)
    places = wgt.to_groups(blocks.values)
    edge, edge_id = wgt.each(target[:, 0]), wgt.each(targets)
    ahead = (places > edge) | ((places == edge) & (wgt.token_ids(places) < edge_id))
    rank = wgt.count(ahead) + 1

    def log_share(value: jax.Array) -> jax.Array:
        lowest = jnp.finfo(jnp.float32).min
        return jnp.maximum(value - peak - jnp.log(mass)[:, None], lowest)

    return log_share(target)[:, 0], rank, top_ids, log_share(values)
