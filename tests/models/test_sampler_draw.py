"""Random rows: the drawn token, its distribution, and what it must not depend on."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.runner import sampler
from jaxserve.runner.sampling.draw import uniform
from tests.models import sampler_reference as reference

ROWS, VOCAB, PADDED = 8, 300, 333


@functools.cache
def program(vocab_size: int):
    return jax.jit(functools.partial(sampler.random, vocab_size=vocab_size))


@functools.cache
def greedy_program(vocab_size: int):
    return jax.jit(functools.partial(sampler.greedy, vocab_size=vocab_size))


def tokens_of(logits, x, vocab_size=VOCAB):
    sampled = program(vocab_size)(logits, x)
    assert not np.asarray(sampled.bad).any()
    return np.asarray(sampled.tokens)


def uniforms(x) -> np.ndarray:
    return np.asarray(uniform(x.seed, x.sample, x.position)) / 2.0**32


@st.composite
def cases(draw):
    """Logits of several kinds (smooth, tied, peaked) and any mixture of options."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(size=(ROWS, PADDED)) * draw(st.sampled_from([0.01, 1.0, 4.0, 30.0]))
    if draw(st.booleans()):
        logits = np.round(logits)  # many exact ties
    logits[:, VOCAB:] = 1e4  # a padded head with large values

    def one_of(*values):
        return [draw(st.sampled_from(values)) for _ in range(ROWS)]

    x = reference.sample_inputs(
        ROWS,
        VOCAB,
        temperature=one_of(0, 0.3, 1.0, 1.7, 5.0),
        top_k=one_of(-1, 0, 1, 2, 40, 64, 65, 150, VOCAB - 1, VOCAB, 10**9),
        top_p=one_of(0.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 1.0, 1.0),
        min_p=one_of(0.0, 0.0, 0.05, 0.5, 1.0, 2.0),
        position=rng.integers(0, 10**6, ROWS),
        sample=rng.integers(0, 8, ROWS),
    )
    return logits.astype(np.float32), x


@settings(max_examples=250, derandomize=True, deadline=None)
@given(cases())
def test_token_is_that_of_the_sorting_reference(case):
    logits, x = case
    tokens, u = tokens_of(logits, x), uniforms(x)
    for row in range(ROWS):
        values = logits[row, :VOCAB].astype(np.float64)
        assert tokens[row] in reference.possible(values, x, row, u[row])


OPTIONS = {
    "temperature": {},
    "top_k": {"top_k": 3},
    "top_k_wide": {"top_k": 100},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "all": {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
    "all_wide": {"top_k": 90, "top_p": 0.8, "min_p": 0.2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_distribution_over_many_seeds_is_the_exact_one(name):
    """Chi-square over 16,384 draws against the reference's probabilities."""
    rows = 2048
    rng = np.random.default_rng(3)
    row = rng.normal(size=128).astype(np.float32)
    logits = np.broadcast_to(row, (rows, 128))
    counts = np.zeros(128)
    for round_ in range(8):
        seeds = np.stack([np.arange(rows), np.full(rows, round_)], axis=1)
        x = reference.sample_inputs(
            rows, 128, temperature=0.8, seed=seeds, position=round_ * 31, **OPTIONS[name]
        )
        counts += np.bincount(tokens_of(logits, x, 128), minlength=128)
    exact = reference.probabilities(row.astype(np.float64), x, 0)
    assert not counts[exact == 0].any()
    expected = exact[exact > 0] * counts.sum()
    chi_square = ((counts[exact > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def mixture(rows: int, vocab: int):
    rng = np.random.default_rng(11)
    logits = (rng.normal(size=(rows, vocab)) * 3).astype(np.float32)
    logits[:, : vocab // 3] = np.round(logits[:, : vocab // 3])
    x = reference.sample_inputs(
        rows,
        vocab,
        temperature=rng.choice([0, 0.7, 1.0, 3.0], rows),
        top_k=rng.choice([vocab, 20, 64, 100], rows),
        top_p=rng.choice([1, 0.9, 0.3, 0.999], rows),
        min_p=rng.choice([0, 0, 0.1], rows),
    )
    return logits, x


def test_row_depends_on_no_neighbour_and_no_row_count():
    """Same bits in another place, among other rows, alone among idle rows, and in a larger
    program.
    """
    vocab = 640
    logits, x = mixture(64, vocab)
    together = tokens_of(logits, x, vocab)
    order = np.random.default_rng(5).permutation(64)
    shuffled = tokens_of(logits[order], reference.take_rows(x, order), vocab)
    assert (shuffled == together[order]).all()
    for start in range(0, 64, 8):
        part = slice(start, start + 8)
        fewer = tokens_of(logits[part], reference.take_rows(x, part), vocab)
        assert (fewer == together[part]).all()
    for row in range(0, 64, 5):
        alone, idle = logits[[row] * 8].copy(), reference.take_rows(x, [row] * 8)
        idle.temperature[1:] = 0
        assert tokens_of(alone, idle, vocab)[0] == together[row]


@pytest.mark.parametrize("rows", [8, 24])
def test_a_vocabulary_of_several_groups_and_an_odd_size(rows):
    """The reference's tokens, and the same bits with 8 and with 24 rows."""
    vocab = 3 * 4096 + 777
    logits, x = mixture(24, vocab)
    tokens, u = tokens_of(logits[:rows], reference.take_rows(x, slice(rows)), vocab), uniforms(x)
    for row in range(rows):
        assert tokens[row] in reference.possible(logits[row].astype(float), x, row, u[row])
    assert (tokens == tokens_of(logits, x, vocab)[:rows]).all()


def test_greedy_rows_of_a_random_batch_equal_the_greedy_program():
    logits, x = mixture(64, 640)
    greedy = np.asarray(greedy_program(640)(logits).tokens)
    rows = x.temperature == 0
    assert rows.any() and (tokens_of(logits, x, 640)[rows] == greedy[rows]).all()
    assert (greedy == logits.argmax(axis=1)).all()


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-7, 1e-5, 9.9e-5])
def test_b58_below_the_threshold_is_greedy(temperature):
    logits, _ = mixture(8, VOCAB)
    x = reference.sample_inputs(8, VOCAB, temperature=temperature)
    assert (tokens_of(logits, x) == logits.argmax(axis=1)).all()


@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 2, 100, 1e30])
@pytest.mark.parametrize("size", [1e-3, 1.0, 3e38])
def test_b58_any_temperature_and_size_gives_a_sensible_token(temperature, size):
    rng = np.random.default_rng(1)
    logits = (rng.uniform(-1, 1, size=(8, VOCAB)) * size).astype(np.float32)
    x = reference.sample_inputs(8, VOCAB, temperature=temperature)
    tokens, u = tokens_of(logits, x), uniforms(x)
    for row in range(8):
        assert tokens[row] in reference.possible(logits[row].astype(float), x, row, u[row])


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0}, {"top_p": 1e-9}, {"min_p": 2}])
def test_b59_one_token_always_survives(options):
    logits = np.random.default_rng(2).normal(size=(8, VOCAB)).astype(np.float32)
    x = reference.sample_inputs(8, VOCAB, temperature=100, **options)
    assert (tokens_of(logits, x) == logits.argmax(axis=1)).all()


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1, 10**9])
def test_b59_top_k_of_the_whole_vocabulary_is_off(top_k):
    logits, x = mixture(8, VOCAB)
    x = x._replace(temperature=np.ones(8, np.float32))
    off = x._replace(top_k=np.full(8, VOCAB, np.int32))
    other = x._replace(top_k=np.full(8, top_k, np.int32))
    assert (tokens_of(logits, other) == tokens_of(logits, off)).all()


@pytest.mark.parametrize("top_k", [2, 64, 65, 200])
def test_ties_at_the_border_are_kept_from_the_lowest_id(top_k):
    """All tokens equal but the last: of equal ones exactly the first top_k - 1 may follow it."""
    rows = 2048
    row = np.zeros(VOCAB, np.float32)
    row[-1] = 1
    seeds = np.stack([np.arange(rows), np.zeros(rows)], axis=1)
    x = reference.sample_inputs(rows, VOCAB, temperature=1, top_k=top_k, seed=seeds)
    drawn = np.unique(tokens_of(np.broadcast_to(row, (rows, VOCAB)), x))
    assert set(drawn) == {*range(top_k - 1), VOCAB - 1}


def test_top_p_counts_equal_probabilities_from_the_lowest_id():
    """So hot that all are equally likely: the kept ones are not among the 64 best values."""
    rows = 2048
    row = np.arange(VOCAB, dtype=np.float32)
    seeds = np.stack([np.arange(rows), np.zeros(rows)], axis=1)
    x = reference.sample_inputs(rows, VOCAB, temperature=1e30, top_p=9.5 / VOCAB, seed=seeds)
    drawn = np.unique(tokens_of(np.broadcast_to(row, (rows, VOCAB)), x))
    assert set(drawn) == set(range(10))


def test_noise_is_that_of_the_documented_key():
    x = reference.sample_inputs(
        4, VOCAB, seed=[[5, 0]] * 4, sample=[0, 1, 0, 1], position=[2, 2, 3, 3]
    )
    for row in range(4):
        key = jax.random.fold_in(jax.random.key(5), x.sample[row])
        bits = jax.random.bits(jax.random.fold_in(key, x.position[row]), (), np.uint32)
        assert np.asarray(uniform(x.seed, x.sample, x.position))[row] == bits
    assert len(set(uniforms(x))) == 4


def test_b65_padded_ids_are_never_drawn():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(2048, PADDED)).astype(np.float32)
    logits[:, VOCAB:] = 50
    logits[::2, VOCAB:] = np.nan
    seeds = np.stack([np.arange(2048), np.zeros(2048)], axis=1)
    for options in ({}, {"top_k": 64}, {"top_p": 0.999}, {"top_k": 290}):
        x = reference.sample_inputs(2048, VOCAB, temperature=5, seed=seeds, **options)
        assert tokens_of(logits, x).max() < VOCAB


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_b90_a_bad_row_fails_alone(poison):
    logits, x = mixture(64, 640)
    clean = tokens_of(logits, x, 640)
    hurt = np.arange(0, 64, 3)
    logits[hurt, hurt * 7] = poison
    sampled = program(640)(logits, x)
    assert (np.flatnonzero(np.asarray(sampled.bad)) == hurt).all()
    assert not np.asarray(sampled.tokens)[hurt].any()
    well = np.setdiff1d(np.arange(64), hurt)
    assert (np.asarray(sampled.tokens)[well] == clean[well]).all()
    greedy = greedy_program(640)(logits)
    assert (np.asarray(greedy.bad) == np.asarray(sampled.bad)).all()
    assert not np.asarray(greedy.tokens)[hurt].any()
