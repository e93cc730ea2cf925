"""FAULTS B09, B10, T04: every rope variant against formulas written independently."""

import jax.numpy as jnp
import numpy as np
import pytest

from model_zoo import rope
from tests.reference import dense_rope

HEAD_DIM = 16
PAIRS = HEAD_DIM // 2
SHORT, LONG = [1.0 + 0.1 * i for i in range(PAIRS)], [2.0 + 0.7 * i for i in range(PAIRS)]


def config(kind: str, factor: float, *, newer: bool) -> dict:
    section: dict = {"rope_type": kind, "factor": factor}
    if kind == "llama3":
        section |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind in ("llama3", "yarn", "longrope"):
        section["original_max_position_embeddings"] = 1024
    if kind == "longrope":
        section |= {"short_factor": SHORT, "long_factor": LONG}
    if kind == "default":
        section = {"rope_type": "default"}
    hf: dict = {"max_position_embeddings": int(1024 * factor), "rope_theta": 5e5}
    if newer:
        section["rope_theta"] = hf.pop("rope_theta")
        hf["rope_parameters"] = section
    elif kind != "default":
        hf["rope_scaling"] = section
    return hf


@pytest.mark.parametrize("newer", [False, True], ids=["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("factor", [4.0, 32.0])
@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
def test_tables_equal_the_papers_formulas(kind, factor, newer):
    hf = config(kind, factor, newer=newer)
    for length in (512, int(1024 * factor)):
        found = rope.from_hf(hf, head_dim=HEAD_DIM, max_len=length)
        expected, magnitude = dense_rope.frequencies(hf, HEAD_DIM, length)
        np.testing.assert_allclose(found.frequencies, expected, rtol=1e-6)
        assert found.scale == pytest.approx(magnitude, rel=1e-6)


@pytest.mark.parametrize("position", [0, 1, 1_000, 8_192, 60_000])
@pytest.mark.parametrize("kind", ["default", "llama3", "yarn"])
def test_cos_and_sin_of_far_positions(kind, position):
    hf = config(kind, 32.0, newer=True)
    made = rope.from_hf(hf, head_dim=HEAD_DIM)
    cos, sin = rope.angles(made, jnp.asarray([position], jnp.int32))
    inv_freq, magnitude = dense_rope.frequencies(hf, HEAD_DIM, 32 * 1024)
    # float32 angles: their own rounding grows with the position
    slack = 1e-6 + 2e-7 * position
    np.testing.assert_allclose(
        np.ravel(cos)[:PAIRS], magnitude * np.cos(position * inv_freq), atol=slack
    )
    np.testing.assert_allclose(
        np.ravel(sin)[:PAIRS], magnitude * np.sin(position * inv_freq), atol=slack
    )


def test_the_set_is_chosen_once_by_the_longest_request_served():
    """B09: not by a request's or a chunk's own length, so no cached key is turned otherwise."""
    hf = config("longrope", 4.0, newer=True)
    short = rope.from_hf(hf, head_dim=HEAD_DIM, max_len=1024)
    long = rope.from_hf(hf, head_dim=HEAD_DIM, max_len=1025)
    assert short.frequencies != long.frequencies
    assert rope.from_hf(hf, head_dim=HEAD_DIM).frequencies == long.frequencies


def test_b10_an_unknown_variant_refuses():
    with pytest.raises(ValueError, match="'spiral'.*yarn"):
        rope.from_hf({"rope_scaling": {"rope_type": "spiral"}}, head_dim=HEAD_DIM)
