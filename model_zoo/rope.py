"""Rotary position embedding: every variant of a Hugging Face config as one list of frequencies.

A variant decides only two things: the frequency of each rotated pair and one scale for cos and sin.
Both are plain numbers computed once in float64, so a step sees constants and nothing ever switches
while keys are cached: `dynamic` and `longrope` choose by the longest request served, not by the
current length.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Rope:
    """How heads are rotated: the first `2 * len(frequencies)` of H dimensions turn."""

    frequencies: tuple[float, ...]  # radians a position, one for each rotated pair
    scale: float = 1.0  # of cos and sin; yarn and longrope call it attention factor


@dataclasses.dataclass(frozen=True)
class _Setting:
    """The values of a config that the variants share."""

    values: Mapping[str, Any]  # rope_parameters (transformers 5) or rope_scaling (4)
    kind: str
    theta: float
    dim: int  # rotated dimensions, even
    max_position: int  # max_position_embeddings
    max_len: int  # longest request served

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"rope type {self.kind!r} needs a number {name!r}, the config has {value!r}"
            )
        return float(value)

    @property
    def original_length(self) -> float:
        """Context length before the model was stretched."""
        if "original_max_position_embeddings" in self.values:
            return self.number("original_max_position_embeddings")
        return float(self.max_position)

    def default(self) -> np.ndarray:
        """Frequencies of RoFormer (arXiv 2104.09864, section 3.2.2)."""
        return frequencies(self.theta, self.dim)


def frequencies(theta: float, dim: int) -> np.ndarray:
    """theta ** (-2i / dim) for the pairs i, f64[dim / 2]."""
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def from_hf(hf: Mapping[str, Any], *, head_dim: int, max_len: int = 0) -> Rope:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4) of a config.

    `max_len` is the longest request that will be served; 0 means `max_position_embeddings`.
    `dynamic` stretches for that length and `longrope` takes the long factors if it passes the
    original context: once, for all requests, so that no cached key is rotated with other factors
    than its queries.  Raises ValueError for a variant or a value that is not known.
    """
    values = _values(hf)
    kind = values.get("rope_type") or values.get("type") or "default"
    if not isinstance(kind, str) or kind not in _VARIANTS:
        raise ValueError(f"rope type {kind!r} is not known; known: {', '.join(sorted(_VARIANTS))}")
    original = hf.get("original_max_position_embeddings")
    if original is not None:
        values.setdefault("original_max_position_embeddings", original)
    partial = values.get("partial_rotary_factor", hf.get("partial_rotary_factor")) or 1.0
    partial = _number("partial_rotary_factor", partial)
    dim = int(head_dim * partial)
    if dim <= 0 or dim > head_dim or dim % 2:
        raise ValueError(
            f"rope would rotate {dim} of {head_dim} dimensions; it needs an even number of them"
        )
    max_position = _max_position(hf)
    setting = _Setting(
        values=values,
        kind=kind,
        theta=_number("rope_theta", values.get("rope_theta") or hf.get("rope_theta") or 10_000.0),
        dim=dim,
        max_position=max_position,
        max_len=max_len or max_position,
    )
    try:
        table, scale = _VARIANTS[kind](setting)
        found = Rope(tuple(float(f) for f in table), float(scale))
    except (TypeError, OverflowError, ZeroDivisionError) as error:
        raise ValueError(f"rope type {kind!r} has a value that is no number: {error}") from error
    if not all(math.isfinite(f) for f in (*found.frequencies, found.scale)):
        raise ValueError(f"rope type {kind!r} gives frequencies that are not finite")
    return found


def _values(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Everything a config says about its rope, in the words of transformers 5 before those of 4."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = hf.get(name) or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"config.json: {name} must be an object, it is {given!r}")
        found |= given
    return found


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ValueError(f"config.json: {name} must be a positive number, it is {value!r}")
    return float(value)


def _max_position(hf: Mapping[str, Any]) -> int:
    return int(_number("max_position_embeddings", hf.get("max_position_embeddings") or 2048))


def longest(hf: Mapping[str, Any]) -> int:
    """Tokens the model can be served for: its `max_position_embeddings`, which `dynamic` stretches
    by its factor."""
    values = _values(hf)
    most = _max_position(hf)
    if (values.get("rope_type") or values.get("type")) == "dynamic":
        return int(most * _number("factor", values.get("factor") or 1.0))
    return most


def angles(rope: Rope, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of positions i32[T], each f32[T, pairs]."""
    angle = positions.astype(jnp.float32)[:, None] * np.array(rope.frequencies, np.float32)
    return jnp.cos(angle) * rope.scale, jnp.sin(angle) * rope.scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the heads of x [T, heads, H]: pair i is dimensions (i, i + pairs).  dtype of x."""
    pairs = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first = x[..., :pairs].astype(jnp.float32)
    second = x[..., pairs : 2 * pairs].astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(t.astype(x.dtype) for t in turned), x[..., 2 * pairs :]], axis=-1)


def _default(s: _Setting) -> tuple[np.ndarray, float]:
    return s.default(), 1.0


def _linear(s: _Setting) -> tuple[np.ndarray, float]:
    """Position interpolation (arXiv 2306.15595)."""
    return s.default() / s.number("factor"), 1.0


def _dynamic(s: _Setting) -> tuple[np.ndarray, float]:
    """NTK-aware scaling of theta for the longest request served, as in transformers."""
    factor = s.number("factor")
    length = max(s.max_len, s.max_position)
    stretch = factor * length / s.max_position - (factor - 1)
    return frequencies(s.theta * stretch ** (s.dim / (s.dim - 2)), s.dim), 1.0


def _llama3(s: _Setting) -> tuple[np.ndarray, float]:
    """Llama 3.1: long waves divided by the factor, short ones kept, a linear blend between."""
    low, high = s.number("low_freq_factor"), s.number("high_freq_factor")
    table = s.default()
    turns = (
        s.original_length * table / (2 * math.pi)
    )  # turns of each pair over the original context
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * table / s.number("factor") + blend * table, 1.0


def _yarn(s: _Setting) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071, section 3), with the options that transformers reads."""
    original = s.original_length
    factor = s.number("factor") if s.values.get("factor") else s.max_position / original
    scale = s.values.get("attention_factor")
    if scale is None:
        mscale, mscale_all = s.values.get("mscale"), s.values.get("mscale_all_dim")
        if mscale and mscale_all:
            scale = _mscale(factor, mscale) / _mscale(factor, mscale_all)
        else:
            scale = _mscale(factor, 1.0)

    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes this many turns over the original context."""
        return s.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(s.theta))

    low = pair_with(s.values.get("beta_fast") or 32)
    high = pair_with(s.values.get("beta_slow") or 1)
    if s.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, s.dim - 1)
    if low == high:
        high += 0.001  # transformers: no division by zero
    ramp = np.clip((np.arange(s.dim // 2) - low) / (high - low), 0.0, 1.0)
    table = s.default()
    return table / factor * ramp + table * (1 - ramp), float(scale)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(s: _Setting) -> tuple[np.ndarray, float]:
    """LongRoPE (arXiv 2402.13753): one factor a pair, from the short or the long list."""
    original = s.original_length
    name = "long_factor" if s.max_len > original else "short_factor"
    factors = s.values.get(name)
    if not isinstance(factors, list | tuple) or len(factors) != s.dim // 2:
        raise ValueError(
            f"rope type 'longrope' needs {s.dim // 2} numbers {name!r}, the config has {factors!r}"
        )
    factor = s.number("factor") if s.values.get("factor") else s.max_position / original
    scale = s.values.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return s.default() / np.array(factors, np.float64), float(scale)


_VARIANTS: dict[str, Callable[[_Setting], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
