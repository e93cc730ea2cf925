"""Every parameter of a decoder: its shape, and the logical axes that sharding rules speak of."""

import dataclasses

from model_zoo.decoder_config import DecoderConfig

# "qkv" holds the heads of q, then of k, then of v; "gate_up" the gate, then up: see `joined`.
AXES: dict[str, tuple[str, ...]] = {
    "embed": ("vocab", "embed"),
    "head": ("vocab", "embed"),
    "norm": ("embed",),
    "layers.norm1": ("layers", "embed"),
    "layers.norm2": ("layers", "embed"),
    "layers.post1": ("layers", "embed"),
    "layers.post2": ("layers", "embed"),
    "layers.qkv": ("layers", "qkv", "embed"),
    "layers.qkv_bias": ("layers", "qkv"),
    "layers.out": ("layers", "embed", "heads"),
    "layers.out_bias": ("layers", "embed"),
    "layers.gate_up": ("layers", "gate_up", "embed"),
    "layers.gate_up_bias": ("layers", "gate_up"),
    "layers.down": ("layers", "embed", "mlp"),
    "layers.down_bias": ("layers", "embed"),
    "layers.router": ("layers", "experts", "embed"),
}
_MATRICES = frozenset(
    ("embed", "head", "layers.qkv", "layers.out", "layers.gate_up", "layers.down")
)
_HEAD_NORM = {f"layers.{name}": ("layers", "head_dim") for name in ("q_norm", "k_norm")}
_ALL_NORM = {"layers.q_norm": ("layers", "heads"), "layers.k_norm": ("layers", "kv_heads")}
_EXPERTS = {
    "layers.gate_up": ("layers", "experts", "gate_up", "embed"),
    "layers.down": ("layers", "experts", "embed", "mlp"),
}


def joined(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Sizes of the parts that lie one after the other on a logical axis."""
    return {"qkv": (c.N * c.H, c.K * c.H, c.K * c.H), "gate_up": (c.F, c.F)}


def shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by dotted path; matrices are [..., out, in]."""
    qkv, heads = (c.N + 2 * c.K) * c.H, c.N * c.H
    experts = (c.moe.experts,) if c.moe else ()
    found: dict[str, tuple[int, ...]] = {"embed": (c.V, c.D), "norm": (c.D,)}
    if not c.tie:
        found["head"] = (c.V, c.D)
    layer: dict[str, tuple[int, ...]] = {
        "qkv": (qkv, c.D),
        "out": (c.D, heads),
        "gate_up": (*experts, 2 * c.F, c.D),
        "down": (*experts, c.D, c.F),
    }
    if c.moe:
        layer["router"] = (*experts, c.D)
    for wanted, names in ((c.pre_norms, ("norm1", "norm2")), (c.post_norms, ("post1", "post2"))):
        layer |= {name: (c.D,) for name in names if wanted}
    if c.qkv_bias:
        layer["qkv_bias"] = (qkv,)
    if c.out_bias:
        layer["out_bias"] = (c.D,)
    if c.mlp_bias:
        layer |= {"gate_up_bias": (2 * c.F,), "down_bias": (c.D,)}
    if c.qk_norm != "none":
        widths = (c.H, c.H) if c.qk_norm == "head" else (heads, c.K * c.H)
        layer |= {"q_norm": widths[:1], "k_norm": widths[1:]}
    found |= {f"layers.{name}": (c.L, *shape) for name, shape in layer.items()}
    return found | {f"{path}_scale": found[path][:-1] for path in found if path in matrices(c)}


def matrices(c: DecoderConfig) -> frozenset[str]:
    """Dotted paths of the parameters that are int8; each has scales, `PATH_scale`, one a row."""
    return _MATRICES if c.int8 else frozenset()


def axes(c: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """The logical axes of every parameter by dotted path."""
    names = AXES | (_ALL_NORM if c.qk_norm == "all" else _HEAD_NORM) | (_EXPERTS if c.moe else {})
    names |= {f"{path}_scale": names[path][:-1] for path in matrices(c)}
    return {path: names[path] for path in shapes(c)}


def with_int8(c: DecoderConfig, int8: bool) -> DecoderConfig:
    """The config, with `int8` one in which matrices are int8."""
    return dataclasses.replace(c, int8=True) if int8 else c
