"""How a step's tokens are grouped for a kernel that writes whole slabs: plain jax."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Runs(NamedTuple):
    """Tokens in the order of their slots, cut where the slab changes; each slab is in one run."""

    count: jax.Array  # i32[]  runs that hold a token
    order: jax.Array  # i32[T]  token of each place
    slots: jax.Array  # i32[T]  slot of each place, ascending
    starts: jax.Array  # i32[T + 1]  place where run i begins


def slab_runs(slots: jax.Array, num_slots: int, slab: int) -> Runs:
    """Runs of tokens whose slots share a slab of `slab` slots; slots >= num_slots are in none."""
    num_tokens = len(slots)
    slots, order = jax.lax.sort_key_val(slots, jnp.arange(num_tokens))
    slabs = slots // slab
    real = slots < num_slots
    begins = real & jnp.concatenate([jnp.ones(1, bool), slabs[1:] != slabs[:-1]])
    places = jnp.nonzero(begins, size=num_tokens + 1, fill_value=num_tokens)[0]
    starts = jnp.minimum(places, jnp.sum(real)).astype(jnp.int32)
    return Runs(jnp.sum(begins).astype(jnp.int32), order, slots, starts)
