"""Raw log-probabilities: values, ranks, the most likely tokens and their order."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.runner import sampler

ROWS, VOCAB, PADDED = 8, 300, 333


@functools.cache
def program(vocab_size: int):
    return jax.jit(functools.partial(sampler.logprobs, vocab_size=vocab_size))


def logprobs(logits, targets, vocab_size=VOCAB):
    return [np.asarray(part) for part in program(vocab_size)(logits, targets)]


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-3, 1.0, 30.0]), st.booleans())
def test_equals_the_sorted_log_softmax(seed, size, tied):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(ROWS, PADDED)) * size).astype(np.float32)
    if tied:
        logits = np.round(logits * 2) / 2
    logits[:, VOCAB:] = 1e4
    targets = rng.integers(0, VOCAB, ROWS).astype(np.int32)
    chosen, rank, top_ids, top = logprobs(logits, targets)
    for row in range(ROWS):
        values = logits[row, :VOCAB].astype(np.float64)
        exact = values - values.max() - np.log(np.exp(values - values.max()).sum())
        order = np.lexsort((np.arange(VOCAB), -values))
        assert (top_ids[row] == order[:20]).all()
        assert np.allclose(top[row], exact[order[:20]], atol=1e-5, rtol=1e-6)
        assert np.allclose(chosen[row], exact[targets[row]], atol=1e-5, rtol=1e-6)
        assert rank[row] == 1 + np.flatnonzero(order == targets[row])[0]


def test_zeros_of_both_signs_are_equal():
    logits = np.full((ROWS, VOCAB), -1, np.float32)
    logits[:, 10:40] = np.where(np.arange(30) % 2, 0.0, -0.0)
    _, rank, top_ids, _ = logprobs(logits, np.full(ROWS, 15, np.int32))
    assert (top_ids == np.arange(10, 30)).all() and (rank == 6).all()


@pytest.mark.parametrize("size", [1e4, 3e38])
def test_b66_finite_for_any_finite_logits(size):
    rng = np.random.default_rng(0)
    logits = (rng.uniform(-1, 1, size=(ROWS, PADDED)) * size).astype(np.float32)
    logits[:, 3] = size
    for part in logprobs(logits, np.arange(ROWS, dtype=np.int32)):
        assert np.isfinite(part).all()


def test_b65_padded_ids_never_appear():
    logits = np.zeros((ROWS, PADDED), np.float32)
    logits[:, VOCAB:] = np.nan
    chosen, _, top_ids, top = logprobs(logits, np.zeros(ROWS, np.int32))
    assert top_ids.max() < VOCAB
    assert np.allclose(chosen, -np.log(VOCAB), atol=1e-5) and np.allclose(top, chosen[0], atol=1e-5)


def test_a_vocabulary_below_twenty_reports_all_of_it():
    logits = np.arange(ROWS * 7, dtype=np.float32).reshape(ROWS, 7)
    _, _, top_ids, top = logprobs(logits, np.zeros(ROWS, np.int32), 5)
    assert (top_ids == [4, 3, 2, 1, 0]).all() and top.shape == (ROWS, 5)


def test_row_depends_on_no_neighbour_and_no_row_count():
    logits = (np.random.default_rng(1).normal(size=(64, 640)) * 3).astype(np.float32)
    targets = np.arange(64, dtype=np.int32)
    together = logprobs(logits, targets, 640)
    for start in range(0, 64, 8):
        part = slice(start, start + 8)
        for fewer, whole in zip(logprobs(logits[part], targets[part], 640), together, strict=True):
            assert (fewer == whole[part]).all()


def test_a_bad_row_leaves_the_others_alone():
    logits = np.random.default_rng(2).normal(size=(ROWS, VOCAB)).astype(np.float32)
    clean = logprobs(logits, np.zeros(ROWS, np.int32))
    logits[3, 7] = np.nan
    for part, whole in zip(logprobs(logits, np.zeros(ROWS, np.int32)), clean, strict=True):
        assert (np.delete(part, 3, axis=0) == np.delete(whole, 3, axis=0)).all()
