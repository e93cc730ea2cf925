"""T06, B15, B16, B18, B27: a step writes the slots of its tokens and no others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batch.step import Batch, StepResult
from tests.equivalence.rig import BLOCK, MAX_LEN, SCORED, Rig, generate
from tests.reference import tiny

NUM_BLOCKS = 20


class Auditor:
    """Stands between engine and runner, and compares the KV array before and after each step."""

    def __init__(self, rig: Rig) -> None:
        self._runner = rig.runner
        self._num_slots = rig.runner.num_slots
        self._slot_of = slot_map(rig)
        self.num_steps = 0

    def dispatch(self, batch: Batch) -> Any:
        assert not any(array.flags.writeable for array in (batch.packed, *batch.inputs))
        slots = batch.inputs.slots
        real, padding = slots[: batch.num_tokens], slots[batch.num_tokens :]
        assert (real >= 0).all() and (real < self._num_slots).all()
        assert (padding >= self._num_slots).all()
        assert len(set(real.tolist())) == len(real)
        before = _copy(self._runner.state.kv)
        handle = self._runner.dispatch(batch)
        after = _copy(self._runner.state.kv)
        changed = set()
        for owner, old, new in zip(self._slot_of, before, after, strict=True):
            different = old.view(np.int32) != new.view(np.int32)  # NaN to NaN is no change
            changed |= set(np.unique(owner[different]).astype(int).tolist())
        assert changed == set(real.tolist())
        self.num_steps += 1
        return handle

    def result(self, handle: Any) -> StepResult:
        return self._runner.result(handle)


def slot_map(rig: Rig) -> list[np.ndarray]:
    """For every element of the KV arrays, whatever their layout, the slot that it belongs to."""
    fill = jax.jit(rig.runner.step.fill_slots, donate_argnums=0)
    kv = jax.tree.map(lambda a: jnp.full(a.shape, -1.0, a.dtype), rig.runner.state.kv)
    for slot in range(rig.runner.num_slots):
        kv = fill(kv, np.array([slot], np.int32), float(slot))
    owners = _copy(kv)
    assert all((owner >= 0).all() for owner in owners)
    return owners


def _copy(kv: Any) -> list[np.ndarray]:
    return [np.array(array) for array in jax.tree.leaves(kv)]


@pytest.mark.parametrize("chunk", [3, BLOCK, MAX_LEN])
def test_t06_only_scheduled_slots_change(make_rig: Callable[..., Rig], chunk: int) -> None:
    """Prompts far shorter than the bucket, beside decodes, in a pool that is used over and over."""
    rig = make_rig("mqa", budgets=(64,), num_blocks=NUM_BLOCKS)
    engine = rig.engine(scheduler={"mode": "fixed", "chunk_size": chunk})
    auditor = Auditor(rig)
    engine._runner = auditor  # the engine takes any object with the runner's interface
    prompts = [tiny.make_prompt(length, length) for length in (30, 1, 9, 40, 16, 7, 33, 2, 25)]
    rig.check(generate(engine, prompts, SCORED))
    assert auditor.num_steps > 10
