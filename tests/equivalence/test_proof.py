"""The proof before serving finds a program that is wrong; programs keep the KV in place."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batch.step import Batch
from jaxserve.costs import NO_STEP, no_step
from jaxserve.runner import warmup
from jaxserve.runner.device_step import DeviceStep
from jaxserve.runner.programs import Program, compile_programs
from model_zoo.step_inputs import unpack


@pytest.fixture
def runner(make_rig):
    runner = make_rig("gqa_9_3").runner
    kept = {key: program.compiled for key, program in runner.manifest._programs.items()}
    yield runner
    for key, compiled in kept.items():
        runner.manifest._programs[key].compiled = compiled


def test_every_bucket_equals_the_smallest(runner):
    assert warmup.prove(runner) < 1e-3
    assert runner.compiles_after_warmup == 0


def wrong_hidden(compiled):
    def run(*arguments):
        kv, hidden, mark = compiled(*arguments)
        return kv, hidden.at[1].multiply(1.05), mark

    return run


def pads_write_block_zero(shapes, num_slots):
    """FAULTS B15, B17: the slot of padding is a live one."""

    def wrap(compiled):
        def run(weights, kv, hidden, last_tokens, packed):
            packed = packed.copy()
            x = unpack(packed, shapes)
            x.slots[x.slots >= num_slots] = 0
            return compiled(weights, kv, hidden, last_tokens, packed)

        return run

    return wrap


def reads_one_slot_too_far(shapes):
    """FAULTS B02: the context ends behind the last token that was written."""

    def wrap(compiled):
        def run(weights, kv, hidden, last_tokens, packed):
            packed = packed.copy()
            x = unpack(packed, shapes)
            x.kv_lens[x.kv_lens > 0] += 1
            return compiled(weights, kv, hidden, last_tokens, packed)

        return run

    return wrap


def forgets_to_write(shapes, num_slots):
    """The KV of what ran before in the same place stays; the step's own tokens do not see it."""

    def wrap(compiled):
        def run(weights, kv, hidden, last_tokens, packed):
            _, hidden, _ = compiled(weights, jnp.copy(kv), hidden, last_tokens, packed)
            packed = packed.copy()
            x = unpack(packed, shapes)
            x.slots[:] = num_slots
            kv, _, mark = compiled(weights, kv, jnp.copy(hidden), last_tokens, packed)
            return kv, hidden, mark

        return run

    return wrap


def mixes_rows(shapes):
    """The second row of a step reads the blocks of the first."""

    def wrap(compiled):
        def run(weights, kv, hidden, last_tokens, packed):
            packed = packed.copy()
            x = unpack(packed, shapes)
            if x.kv_lens[1] > 0:
                x.block_tables[1] = x.block_tables[0]
            return compiled(weights, kv, hidden, last_tokens, packed)

        return run

    return wrap


def test_two_requests_share_a_step_however_small_the_smallest_bucket(make_rig):
    runner = make_rig("gqa_9_3", budgets=(1, 16, 24)).runner
    assert warmup.prove(runner) < 1e-3
    program = runner.manifest.get("backbone", 24)
    good = program.compiled
    program.compiled = mixes_rows(runner.step.shapes(24))(good)
    try:
        with pytest.raises(warmup.ProofError, match=r"backbone\[24\]"):
            warmup.prove(runner)
    finally:
        program.compiled = good


@pytest.mark.parametrize("fault", ["hidden", "padding", "context", "writes"])
def test_a_wrong_program_does_not_serve(runner, fault):
    bucket = runner.manifest.buckets("backbone")[-1]
    program = runner.manifest.get("backbone", bucket)
    shapes = runner.step.shapes(bucket)
    wrap = {
        "hidden": wrong_hidden,
        "padding": pads_write_block_zero(shapes, runner.num_slots),
        "context": reads_one_slot_too_far(shapes),
        "writes": forgets_to_write(shapes, runner.num_slots),
    }[fault]
    program.compiled = wrap(program.compiled)
    with pytest.raises(warmup.ProofError, match=rf"backbone\[{bucket}\]"):
        warmup.prove(runner)


def compiled_with(runner, num_blocks):
    """The smallest backbone over a cache of that many blocks, and the bytes of KV."""
    old = runner.step
    cache = dataclasses.replace(old.config.cache, num_blocks=num_blocks)
    config = dataclasses.replace(old.config, cache=cache)
    step = DeviceStep(old.graphdef, old.abstract_weights, old.model_config, config, old.vocab_size)
    spec = [spec for spec in step.specs() if spec.kind == "backbone"][-1]
    kv_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec.arguments[1]))
    return compile_programs([spec])[0], kv_bytes


def test_kv_is_updated_in_place_and_scratch_does_not_grow_with_it(runner):
    small, _ = compiled_with(runner, 64)
    large, kv_bytes = compiled_with(runner, 6_400)
    hidden_bytes = runner.state.hidden.nbytes
    assert large.memory["aliased"] == kv_bytes + hidden_bytes
    assert abs(large.memory["temp"] - small.memory["temp"]) < kv_bytes / 100


def test_b18_the_cache_has_the_slots_that_the_host_believes_in(runner):
    c, cache = runner.step.model_config, runner.config.cache
    size = sum(leaf.size for leaf in jax.tree.leaves(runner.state.kv))
    assert size == 2 * c.L * c.K * c.H * cache.num_blocks * cache.block_size
    assert runner.num_slots == cache.num_blocks * cache.block_size


def test_measured_costs_cover_every_bucket(runner):
    costs = warmup.warm_up(runner)
    assert costs.tokens == runner.manifest.buckets("backbone")
    assert costs.rows == runner.manifest.buckets("head")
    assert all(0 < seconds < math.inf for seconds in costs.program)
    compiled = {p.spec.kind for p in runner.manifest}
    assert set(costs.sampling) == compiled & {"greedy", "random", "full"} != set()
    assert all(0 < seconds < math.inf for kind in costs.sampling.values() for seconds in kind)
    assert all(program.uses == 0 for program in runner.manifest)


@pytest.mark.parametrize(("kernels", "term"), [("xla", "turn_row"), ("auto", "single_context")])
def test_attention_is_measured_beside_the_programs(runner, monkeypatch, kernels, term):
    """A program that takes 3 ms, and 0.2 us a position that its rows attend to."""
    context = min(1024, runner.config.model.max_len)
    ticks = [0.0]
    settings = dataclasses.replace(runner.config.runner, kernels=kernels)
    config = dataclasses.replace(runner.config, runner=settings)
    monkeypatch.setattr(runner, "config", config)

    def run(program, *arguments):
        if program.spec.kind != "backbone":
            ticks[0] += 1e-3
        else:
            x = unpack(arguments[-1], runner.step.shapes(program.spec.bucket))
            counts = np.diff(x.query_starts)
            ticks[0] += 3e-3 + 2e-7 * float((counts * x.kv_lens[: len(counts)]).sum())
            assert (x.slots == runner.num_slots).all()  # nothing is written
        return real(program, *arguments)

    real = Program.__call__
    monkeypatch.setattr(Program, "__call__", run)
    monkeypatch.setattr(warmup.time, "perf_counter", lambda: ticks[0])
    for program in runner.manifest:
        program.measured_s = 1e-9
    costs = warmup.warm_up(runner)
    rows = min(max(size for size in costs.tokens if size <= 16), runner.step.num_seats)
    shape = no_step(runner.step.layout.windows).with_singles(np.full(rows, context, np.int32))
    assert costs.program == pytest.approx((3e-3,) * len(costs.tokens))
    assert getattr(costs, term) > 0
    shape = shape._replace(bucket=next(size for size in costs.tokens if size >= rows))
    assert costs.attention_s(shape) == pytest.approx(2e-7 * rows * context)


def test_an_undeclared_shape_is_refused_and_the_runner_goes_on(runner):
    batch = Batch(
        packed=np.zeros(1, np.int32),
        inputs=runner.step.shapes(7)._replace(tokens=np.zeros(7, np.int32)),
        num_tokens=0,
        num_samples=0,
        sampler="none",
        samples=None,
        logprobs=False,
        scores=(),
        resets=(),
        shape=NO_STEP,
    )
    with pytest.raises(KeyError, match=r"backbone\[7\]"):
        runner.dispatch(batch)
    good = runner.config.buckets.tokens[0]
    packed = runner.step.padding_step(good)
    fine = batch._replace(packed=packed, inputs=unpack(packed, runner.step.shapes(good)))
    assert runner.result(runner.dispatch(fine)).tokens.size == 0


def test_a_cache_lost_in_a_failed_step_is_made_anew(runner):
    for leaf in jax.tree.leaves((runner.state.kv, runner.state.hidden)):
        leaf.delete()
    good = runner.config.buckets.tokens[0]
    packed = runner.step.padding_step(good)
    batch = Batch(
        packed, unpack(packed, runner.step.shapes(good)), 0, 0, "none", None, False, (), (), NO_STEP
    )
    runner.result(runner.dispatch(batch))
    assert bool(jnp.all(jax.tree.leaves(runner.state.kv)[0] == 0))
