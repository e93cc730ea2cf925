"""Penalties, bias and min_tokens, and the token counts behind them."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.runner import sampler
from jaxserve.runner.sampling.draw import uniform
from tests.models import sampler_reference as reference

ROWS, VOCAB, PADDED, SEATS, SLICE = 8, 200, 256, 6, 16

full = jax.jit(functools.partial(sampler.full, vocab_size=VOCAB))
random = jax.jit(functools.partial(sampler.random, vocab_size=VOCAB))
greedy = jax.jit(functools.partial(sampler.greedy, vocab_size=VOCAB))
seed_counts = jax.jit(sampler.seed_counts, donate_argnums=0)
add_counts = jax.jit(sampler.add_counts, donate_argnums=0)


@st.composite
def cases(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = (rng.normal(size=(ROWS, PADDED)) * draw(st.sampled_from([0.5, 3.0]))).round(2)
    logits[:, VOCAB:] = 1e4
    counts = rng.integers(0, 12, size=(ROWS, PADDED)) * (rng.random((ROWS, PADDED)) < 0.3)

    def one_of(*values):
        return rng.choice(values, ROWS)

    x = reference.sample_inputs(
        ROWS,
        PADDED,
        temperature=one_of(0.0, 0.7, 1.3),
        top_k=one_of(0, 5, 100),
        top_p=one_of(1.0, 0.9),
        presence=one_of(0.0, -1.5, 0.7, 2.0),
        frequency=one_of(0.0, -0.2, 0.3, 2.0),
        repetition=one_of(1.0, 0.8, 1.2, 2.0),
        suppress_stops=one_of(True, False),
        stop_ids=np.where(rng.random((ROWS, 4)) < 0.5, rng.integers(0, VOCAB, (ROWS, 4)), PADDED),
        bias_ids=np.stack([rng.choice(VOCAB, 6, replace=False) for _ in range(ROWS)]),
        bias=rng.choice([0.0, -100, 3.5, 100], (ROWS, 6)),
        position=rng.integers(0, 10**6, ROWS),
    )
    return logits.astype(np.float32), counts.astype(np.int32), x


@settings(max_examples=150, derandomize=True, deadline=None)
@given(cases())
def test_options_change_logits_as_the_reference_says(case):
    logits, counts, x = case
    sampled = full(logits, counts, x)
    assert not np.asarray(sampled.bad).any()
    u = np.asarray(uniform(x.seed, x.sample, x.position)) / 2.0**32
    for row in range(ROWS):
        values = reference.adjusted(logits[row, :VOCAB], counts[row], x, row)
        token = np.asarray(sampled.tokens)[row]
        if x.temperature[row] == 0:
            assert values[token] >= values.max() - 1e-5
        else:
            assert token in reference.possible(values, x, row, u[row])


def test_neutral_options_equal_the_simpler_programs_bit_for_bit():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(ROWS, PADDED)).astype(np.float32)
    counts = rng.integers(0, 5, size=(ROWS, PADDED)).astype(np.int32)
    x = reference.sample_inputs(ROWS, PADDED, temperature=[0, 1] * 4)
    tokens = np.asarray(full(logits, counts, x).tokens)
    assert (tokens == np.asarray(random(logits, x).tokens)).all()
    assert (tokens[::2] == np.asarray(greedy(logits).tokens)[::2]).all()


def test_options_of_one_row_leave_the_others_alone():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(ROWS, PADDED)).astype(np.float32)
    counts = rng.integers(0, 5, size=(ROWS, PADDED)).astype(np.int32)
    x = reference.sample_inputs(ROWS, PADDED, temperature=[0, 1] * 4)
    before = np.asarray(full(logits, counts, x).tokens)
    for field, value in {"presence": 2, "frequency": 1, "repetition": 3}.items():
        getattr(x, field)[3] = value
    x.bias_ids[3, 0], x.bias[3, 0] = 17, 1000.0
    x.suppress_stops[3], x.stop_ids[3, 0] = True, 5
    after = np.asarray(full(logits, counts, x).tokens)
    assert after[3] == 17
    assert (np.delete(after, 3) == np.delete(before, 3)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppressed_stop_ids_are_never_drawn(temperature):
    logits = np.zeros((ROWS, PADDED), np.float32)
    logits[:, :4] = 30
    x = reference.sample_inputs(
        ROWS,
        PADDED,
        temperature=temperature,
        stop_ids=[0, 1, 2, 3],
        suppress_stops=[True, False] * 4,
    )
    tokens = np.asarray(full(logits, np.zeros((ROWS, PADDED), np.int32), x).tokens)
    assert (tokens[::2] >= 4).all() and (tokens[1::2] < 4).all()


def test_a_row_whose_options_leave_no_token_is_bad():
    logits = np.zeros((ROWS, 4), np.float32)
    x = reference.sample_inputs(
        ROWS, 4, temperature=[0, 1] * 4, stop_ids=[0, 1, 2, 3], suppress_stops=[True] + [False] * 7
    )
    sampled = jax.jit(functools.partial(sampler.full, vocab_size=4))(
        logits, np.zeros((ROWS, 4), np.int32), x
    )
    assert np.asarray(sampled.bad).tolist() == [True] + [False] * 7


def test_b61_a_huge_bias_decides_and_breaks_nothing():
    logits = np.full((ROWS, PADDED), 3e38, np.float32)
    x = reference.sample_inputs(ROWS, PADDED, temperature=[0, 1] * 4, bias_ids=[9] + [PADDED] * 5)
    x.bias[:, 0] = 3e38
    sampled = full(logits, np.zeros((ROWS, PADDED), np.int32), x)
    assert not np.asarray(sampled.bad).any()


def slices(tokens, is_prompt, order):
    """Padded pieces of SLICE tokens, `order` a permutation of them."""
    for start in np.arange(0, max(len(tokens), 1), SLICE)[order]:
        piece, flags = np.full(SLICE, PADDED, np.int32), np.zeros(SLICE, bool)
        part = tokens[start : start + SLICE]
        piece[: len(part)], flags[: len(part)] = part, is_prompt[start : start + SLICE]
        yield piece, flags


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 70), st.integers(0, 40))
def test_counts_seeded_in_slices_and_counted_on_are_the_tokens_counts(seed, num_prompt, num_output):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 30, num_prompt + num_output).astype(np.int32)
    is_prompt = np.arange(len(tokens)) < num_prompt
    old = rng.integers(0, 9, size=(SEATS, PADDED)).astype(np.int32)
    seat = int(rng.integers(SEATS))
    known = int(rng.integers(num_prompt, len(tokens) + 1))
    counts = jax.numpy.array(old)
    order = rng.permutation(max(1, -(-known // SLICE)))
    pieces = slices(tokens[:known], is_prompt[:known], order)
    for index, (piece, flags) in enumerate(pieces):
        counts = seed_counts(counts, np.int32(seat), piece, flags, np.bool_(index == 0))
    for token in tokens[known:]:
        seats = np.array([SEATS, seat, SEATS + 3], np.int32)
        counts = add_counts(counts, seats, np.array([1, token, 0], np.int32))
    expected = 2 * np.bincount(tokens[num_prompt:], minlength=PADDED)
    expected[tokens[:num_prompt]] |= 1
    old[seat] = expected
    assert (np.asarray(counts) == old).all()


def test_counts_are_kept_in_place():
    """No second copy of i32[seats, V] is made: the result aliases the donated argument."""
    counts = jax.ShapeDtypeStruct((64, 49_152), np.int32)
    size = 64 * 49_152 * 4
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=np.int32)
    seeding = seed_counts.lower(
        counts,
        i32(()),
        i32((256,)),
        jax.ShapeDtypeStruct((256,), bool),
        jax.ShapeDtypeStruct((), bool),
    )
    for lowered in (seeding, add_counts.lower(counts, i32((64,)), i32((64,)))):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes == size
        assert memory.temp_size_in_bytes < size / 10
