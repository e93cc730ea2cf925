"""Run as a program: what the lints must find, compiled for a TPU that is not here; prints JSON."""

import json
import sys

from jaxserve.preflight import target

CHIP = target.parse("v5e:1x1")
BLOCKS = 60013


def main() -> None:
    target.set_environment(CHIP, 1)
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxserve.preflight import hlo
    from pallas_kernels.kv_write.api import kv_write

    mesh = Mesh(target.devices(CHIP), ("x",))
    place = NamedSharding(mesh, PartitionSpec())

    def text(function, *shapes, donate=()) -> str:
        arguments = [jax.ShapeDtypeStruct(s, d, sharding=place) for s, d in shapes]
        traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
        return traced.lower(lowering_platforms=("tpu",)).compile().as_text()

    def write(kv, slots, new):
        return kv_write(kv, jnp.int32(1), slots, new, new)

    kv = ((2, BLOCKS, 1, 16, 256), jnp.bfloat16)
    new = (((8,), jnp.int32), ((8, 1, 128), jnp.bfloat16))
    weight = ((1024, 3072), jnp.bfloat16)
    turned = text(lambda w: jnp.swapaxes(w, 0, 1), weight)
    found = {
        "kept": hlo.kv_copies(text(write, kv, *new, donate=(0,)), BLOCKS),
        "not donated": hlo.kv_copies(text(write, kv, *new), BLOCKS),
        "weight turned": hlo.weight_copies(turned, [weight[0]]),
        "weight used": hlo.weight_copies(
            text(lambda w, x: x @ w.T, weight, ((64, 3072), jnp.bfloat16)), [weight[0]]
        ),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
