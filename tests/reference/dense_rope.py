"""Rotary frequencies, written from the papers' formulas in float64; shares no code with the
product.

A set is `(inv_freq f64[H / 2], magnitude)`: position p turns pair i by `p * inv_freq[i]`, and both
cos and sin are multiplied by `magnitude`.
"""

import math
from typing import Any

import numpy as np

Rope = dict[str, Any]


def rope_settings(config: dict[str, Any]) -> Rope:
    """The rope section of a Hugging Face config, in its newer form (`rope_parameters`) or the older
    one.
    """
    section = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    section.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    section["kind"] = section.get("rope_type", section.get("type", "default"))
    section["max"] = config.get("max_position_embeddings", 2048)
    section["original"] = (
        section.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or section["max"]
    )
    return section


def frequencies(config: dict[str, Any], head_dim: int, length: int) -> tuple[np.ndarray, float]:
    """The set for a request of `length` tokens; only `dynamic` and `longrope` look at it."""
    rope = rope_settings(config)
    makers = {
        "default": _default,
        "linear": _linear,
        "dynamic": _dynamic,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
    }
    return makers[rope["kind"]](rope, head_dim, length)


def _powers(theta: float, head_dim: int) -> np.ndarray:
    """theta_i = theta^(-2i / H) (RoFormer, Su et al. 2021, section 3.2.2)."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _default(rope: Rope, head_dim: int, length: int) -> tuple[np.ndarray, float]:
    return _powers(rope["rope_theta"], head_dim), 1.0


def _linear(rope: Rope, head_dim: int, length: int) -> tuple[np.ndarray, float]:
    """Positions divided by the factor (Position Interpolation, Chen et al. 2023, equation 4)."""
    return _powers(rope["rope_theta"], head_dim) / rope["factor"], 1.0


def _dynamic(rope: Rope, head_dim: int, length: int) -> tuple[np.ndarray, float]:
    """NTK-aware base with a scale that follows the length (YaRN, Peng et al. 2023, sections 3.1 and
    3.3).

    The scale is `factor * l / L - (factor - 1)`, as deployed: 1 at l = L, and growing with slope
    `factor`.
    """
    excess = max(length, rope["max"]) / rope["max"]
    scale = rope["factor"] * excess - (rope["factor"] - 1)
    return _powers(rope["rope_theta"] * scale ** (head_dim / (head_dim - 2)), head_dim), 1.0


def _llama3(rope: Rope, head_dim: int, length: int) -> tuple[np.ndarray, float]:
    """By wavelength: short ones stay, long ones are divided, a linear blend between (Llama 3.1
    model code).
    """
    plain = _powers(rope["rope_theta"], head_dim)
    turns = rope["original"] * plain / (2 * math.pi)  # whole turns over the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * keep + plain / rope["factor"] * (1 - keep), 1.0


def _yarn(rope: Rope, head_dim: int, length: int) -> tuple[np.ndarray, float]:
    """NTK-by-parts (YaRN, Peng et al. 2023, section 3.2) and the temperature of section 3.4
    (equation 22).

    The blend is linear in the pair's index between the pairs that make `beta_fast` and `beta_slow`
    turns, rounded outwards unless `truncate` is false, as in the authors' code.
    """
    theta, factor = rope["rope_theta"], rope.get("factor") or rope["max"] / rope["original"]
    plain = _powers(theta, head_dim)

    def pair(turns: float) -> float:
        return head_dim * math.log(rope["original"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    span = last - first if last != first else 0.001
    divided = np.clip((np.arange(head_dim // 2) - first) / span, 0.0, 1.0)
    return plain * (1 - divided) + plain / factor * divided, _yarn_magnitude(rope, factor)


def _yarn_magnitude(rope: Rope, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return temperature(rope["mscale"]) / temperature(rope["mscale_all_dim"])
    return temperature(1.0)


def _longrope(rope: Rope, head_dim: int, length: int) -> tuple[np.ndarray, float]:
    """A searched factor for each pair, one list up to the original context and one beyond it
    (LongRoPE, Ding et al. 2024, section 3), with the magnitude sqrt(1 + ln s / ln L) that its
    authors' code uses.
    """
    original = rope["original"]
    chosen = rope["long_factor"] if length > original else rope["short_factor"]
    factor = rope.get("factor") or rope["max"] / original
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _powers(rope["rope_theta"], head_dim) / np.asarray(chosen, np.float64), magnitude
