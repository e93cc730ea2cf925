"""What a checkpoint is, in figures, from its headers alone, or from its config where no weights
are."""

import collections
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.preflight import describe as described
from jaxserve.preflight import target
from jaxserve.runner.memory import GIB, HEADROOM
from model_zoo import registry
from model_zoo.checkpoint import Checkpoint
from model_zoo.parameters import matrices, shapes, with_int8
from model_zoo.weights import open_checkpoint
from model_zoo.weights.account import account
from pallas_kernels.ragged_paged_attention.api import kv_shape

_BYTES = {"float32": 4, "bfloat16": 2}
_CHIPS = ("v5e", "v6e", "v5p", "h200")
_SLICES = (1, 2, 4, 8)


def opened(path: Path) -> Checkpoint:
    """The checkpoint at `path`; one without tensors where it is a config.json, or a folder that
    holds one and no weights.  Raises ValueError as `open_checkpoint` does.
    """
    bare = path.is_dir() and (path / "config.json").is_file() and _is_alone(path)
    if bare or (path.is_file() and path.suffix == ".json"):
        return Checkpoint(str(path), described.hf_config(str(path), None), {}, _no_tensor)
    return open_checkpoint(path)


def _is_alone(folder: Path) -> bool:
    """No file of the folder could hold weights."""
    return all(file.suffix in (".json", ".txt", ".md", ".jinja") for file in folder.iterdir())


def _no_tensor(name: str) -> np.ndarray:
    raise ValueError(f"there are no weights to read {name} from")


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Sizes of a model by name; parameters are counted as stored, a tied head once.

    A model that is not supported, or whose tensors are not those of its config, is described as far
    as its config goes, with the reason.
    """
    hf = checkpoint.hf_config
    values: collections.Counter[str] = collections.Counter()
    for info in checkpoint.infos.values():
        values[info.stored] += math.prod(info.shape)
    facts: dict[str, Any] = {"path": checkpoint.path, "model_type": hf.get("model_type")}
    stored: dict[str, Any] = {
        "parameters": sum(values.values()),
        "stored": dict(values.most_common()),  # values by type in the file
    }
    try:
        family, config = registry.configure(checkpoint.hf_config, "bfloat16", where=checkpoint.path)
        if checkpoint.infos:
            account(checkpoint, family.places(config), shapes(config))
        else:
            stored = {"parameters": sum(map(math.prod, shapes(config).values())), "stored": {}}
    except ValueError as error:
        reason = str(error).removeprefix(f"{checkpoint.path}: ").removeprefix(f"{checkpoint.path} ")
        return facts | {"supported": False, "reason": reason} | stored | _raw(hf)
    facts |= {"supported": True, "dtypes": ", ".join(_BYTES)} | stored | _sizes(config)
    facts |= {"rope": rope(hf), "weight_bytes": _weight_bytes(config)}
    facts |= {"kv_bytes_per_token": _kv_bytes(config)}
    if any(config.windows):
        facts |= {
            "kv_bytes_beyond_window": _kv_bytes(config, max(filter(None, config.windows)) + 1)
        }
    return facts | {"fits": fits(config)}


def _sizes(c: Any) -> dict[str, Any]:
    found = {
        "layers": c.L,
        "hidden_size": c.D,
        "mlp_size": c.F,
        "heads": c.N,
        "kv_heads": c.K,
        "head_dim": c.H,
        "vocab_size": c.V,
        "tied": c.tie,
        "context_length": c.max_position,
    }
    if c.moe:
        found |= {"experts": c.moe.experts, "experts_per_token": c.moe.top_k}
    windows = [window for window in c.windows if window is not None]
    if windows:
        found |= {"window": windows[0], "window_layers": len(windows)}
        found |= {"kv_groups": len(c.kv_layout.windows), "layers_of_a_group": c.kv_layout.depth}
    return found


def _raw(hf: dict[str, Any]) -> dict[str, Any]:
    """The sizes as the config of an unknown model has them."""
    names = {
        "layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "vocab_size": "vocab_size",
        "context_length": "max_position_embeddings",
    }
    found = {ours: hf[theirs] for ours, theirs in names.items() if theirs in hf}
    return found | {"rope": rope(hf)}


def _weight_bytes(c: Any) -> dict[str, int]:
    """As served in each type, and with model.quantize=int8 beside bfloat16."""
    values = sum(map(math.prod, shapes(c).values()))
    found = {name: values * size for name, size in _BYTES.items()}
    made = with_int8(c, True)
    found["int8"] = sum(
        math.prod(shape) * (1 if path in matrices(made) else 4 if "scale" in path else 2)
        for path, shape in shapes(made).items()
    )
    return found


def _kv_bytes(c: Any, position: int = 1) -> dict[str, int]:
    """Of the token that lies `position` tokens before the end, itself included: groups of layers
    whose window it has left hold nothing of it."""
    seeing = sum(window is None or position <= window for window in c.kv_layout.windows)
    values = seeing * math.prod(kv_shape(c.kv_layout.depth, 1, 1, c.K, c.H))
    return {name: values * size for name, size in _BYTES.items()}


def _row_bytes(c: Any) -> int:
    """KV of one request of full length in bfloat16."""
    group = math.prod(kv_shape(c.kv_layout.depth, 1, 1, c.K, c.H)) * _BYTES["bfloat16"]
    return group * sum(
        min(window or c.max_position, c.max_position) for window in c.kv_layout.windows
    )


def rope(config: dict[str, Any]) -> dict[str, Any]:
    """Type, theta and parameters of the rotary embedding (transformers 4 or 5 style config); of
    full and sliding layers apart where they differ.
    """
    given: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given |= config[name] if isinstance(config.get(name), dict) else {}
    kinds = ("full_attention", "sliding_attention")
    if any(kind in given for kind in kinds):
        return {kind: rope({"rope_parameters": given.get(kind)}) for kind in kinds}
    kind = given.pop("rope_type", given.pop("type", None)) or "default"
    theta = given.pop("rope_theta", config.get("rope_theta", 10_000.0))
    found = {"type": kind, "theta": theta, **given}
    if "rope_local_base_freq" in config:
        return {
            kinds[0]: found,
            kinds[1]: {"type": "default", "theta": config["rope_local_base_freq"]},
        }
    return found


def fits(c: Any) -> dict[str, str]:
    """For each kind of chip the fewest that hold the weights and one request of full length, in
    bfloat16, and the tokens of KV that they have room for in such requests.

    Weights are split evenly; kv heads are split as far as they go, then repeated.
    """
    size = _BYTES["bfloat16"]
    weights = size * sum(math.prod(shape) for shape in shapes(c).values())
    memory = {chip: target.chips()[chip]["hbm_gib"] * GIB for chip in _CHIPS}
    return {chip: _fewest(c, weights, size) for chip, size in memory.items()}


def _fewest(c: Any, weights: int, memory: float) -> str:
    for chips in _SLICES:
        heads = -(-c.K // chips)  # on one chip
        row = _row_bytes(c) * heads // c.K
        tokens = int((HEADROOM * memory - weights / chips) * c.max_position // row)
        if tokens >= c.max_position:
            return f"{chips} chip{'s' if chips > 1 else ''}, {tokens:,} tokens of KV"
    return f"not on {_SLICES[-1]} chips"
