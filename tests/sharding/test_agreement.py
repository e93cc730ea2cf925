"""Processes that schedule different steps are found out, whatever differs."""

import numpy as np
import pytest

from jaxserve.batch.step import Batch, SeatReset
from jaxserve.costs import NO_STEP
from jaxserve.runner.agreement import EVERY, FIRST, Agreement, DisagreementError
from jaxserve.runner.packing import sample_spec
from model_zoo.step_inputs import packed_size, step_shapes, unpack

SHAPES = step_shapes(8, 2, 3)


def batch(seed: int = 0) -> Batch:
    packed = np.random.default_rng(seed).integers(0, 9, packed_size(SHAPES)).astype(np.int32)
    samples = type(sample_spec(2))(*(np.zeros(s.shape, s.dtype) for s in sample_spec(2)))
    reset = SeatReset(1, np.arange(3, dtype=np.int32), 2)
    inputs = unpack(packed, SHAPES)
    return Batch(packed, inputs, 5, 2, "random", samples, False, (), (reset,), NO_STEP)


class Pair:
    """Two processes in one: each gives its digest, and sees what both gave last."""

    def __init__(self) -> None:
        self.given = [np.zeros(4, np.uint32)] * 2
        self.compared = 0

    def exchange(self, process: int):
        def run(own: np.ndarray) -> np.ndarray:
            self.given[process] = own
            self.compared += 1
            return np.stack([own, own] if process == 0 else self.given)

        return run


def both(first: list[Batch], second: list[Batch]) -> Pair:
    """Process 0 takes its steps, then process 1, which raises when they differ."""
    pair = Pair()
    a, b = Agreement(pair.exchange(0), 0), Agreement(pair.exchange(1), 1)
    for one, other in zip(first, second, strict=True):
        a.add(one)
        b.add(other)
    a.compare()
    b.compare()
    return pair


def test_equal_steps_pass_and_few_are_compared():
    steps = [batch(i) for i in range(2 * EVERY)]
    pair = both(steps, steps)
    assert pair.compared == 2 * (1 + FIRST + 2 + 1)


CHANGES = {
    "tokens": lambda b: b._replace(packed=b.packed + (np.arange(len(b.packed)) == 3)),
    "sampler": lambda b: b._replace(sampler="greedy"),
    "logprobs": lambda b: b._replace(logprobs=True),
    "seed": lambda b: b._replace(samples=b.samples._replace(seed=b.samples.seed + np.uint32(1))),
    "seat": lambda b: b._replace(resets=(b.resets[0]._replace(seat=0),)),
    "no reset": lambda b: b._replace(resets=()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("step", [0, FIRST + 1])
def test_any_difference_is_found_and_both_are_named(change: str, step: int):
    steps = [batch(i) for i in range(FIRST + 3)]
    other = [*steps[:step], CHANGES[change](steps[step]), *steps[step + 1 :]]
    with pytest.raises(DisagreementError, match=r"process 1 and process\(es\) 0"):
        both(steps, other)
