"""Which file of the model zoo runs a `model_type`; nothing is imported before it is asked for."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from model_zoo.checkpoint import Checkpoint

if TYPE_CHECKING:
    from model_zoo.family import Family

# model_type of config.json -> the module that holds its FAMILY
_FAMILIES = {
    "llama": "model_zoo.llama",
    "mistral": "model_zoo.mistral",
    "qwen2": "model_zoo.qwen2",
    "qwen3": "model_zoo.qwen3",
    "qwen3_moe": "model_zoo.qwen3_moe",
    "mixtral": "model_zoo.mixtral",
    "gemma2": "model_zoo.gemma2",
    "gemma3_text": "model_zoo.gemma3",
    "phi3": "model_zoo.phi3",
    "olmo2": "model_zoo.olmo2",
    "granite": "model_zoo.granite",
}
# general.architecture of a GGUF file, and whether it has experts -> model_type
_GGUF = {
    ("llama", False): "llama",
    ("llama", True): "mixtral",
    ("qwen2", False): "qwen2",
    ("qwen3", False): "qwen3",
    ("qwen3moe", True): "qwen3_moe",
    ("gemma2", False): "gemma2",
    ("gemma3", False): "gemma3_text",
    ("phi3", False): "phi3",
    ("olmo2", False): "olmo2",
    ("granite", False): "granite",
}


def register(model_type: str, module: str) -> None:
    """Adds a family whose file is outside the zoo: `module` is its dotted name."""
    _FAMILIES[model_type] = module


def known() -> tuple[str, ...]:
    """The model types that can run."""
    return tuple(_FAMILIES)


def family(model_type: str) -> "Family":
    """Raises ValueError for a model_type that no file of the zoo runs."""
    if model_type not in _FAMILIES:
        raise ValueError(
            f"config.json has model_type={model_type!r}, which is not supported; "
            f"supported: {', '.join(_FAMILIES)}"
        )
    return importlib.import_module(_FAMILIES[model_type]).FAMILY


def family_of(hf: Mapping[str, Any]) -> "Family":
    """The family of a config.json.

    Raises ValueError when no file runs it, when it is of a class with another head (a classifier,
    an encoder, a model with images), or needs code of its own folder, which is never run.
    """
    model_type, classes, code = hf.get("model_type"), hf.get("architectures"), hf.get("auto_map")
    model_type = model_type if isinstance(model_type, str) else repr(model_type)
    if model_type not in _FAMILIES and code:
        raise ValueError(
            f"config.json has model_type={model_type!r} and brings its own code (auto_map), "
            f"which is never run; supported: {', '.join(_FAMILIES)}"
        )
    found = family(model_type)
    if classes and (not isinstance(classes, list) or classes[0] not in found.architectures):
        raise ValueError(
            f"config.json has architectures={classes!r}; of model_type {model_type} only "
            f"{', '.join(found.architectures)} is supported"
        )
    if code:
        values = code.values() if isinstance(code, dict) else [code]
        foreign = [value for value in values if value not in found.own_code]
        if foreign:
            raise ValueError(
                f"config.json has an auto_map: {foreign[0]!r} is code of the model's own, which is "
                f"never run; if the model is a plain {model_type}, remove auto_map"
            )
    return found


def configure(checkpoint: Checkpoint, dtype: str, *, max_len: int = 0) -> "tuple[Family, Any]":
    """The family of a checkpoint and its config.  Raises ValueError, naming the checkpoint."""
    try:
        found = family_of(checkpoint.hf_config)
        return found, found.config_from_hf(checkpoint.hf_config, dtype=dtype, max_len=max_len)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from error


def gguf_model_type(architecture: Any, experts: bool) -> str:
    """The model_type of a GGUF architecture, "" when there is none; Mixtral is a llama with
    experts.
    """
    return _GGUF.get((architecture, experts), "")


def gguf_known() -> tuple[str, ...]:
    """The GGUF architectures that can run."""
    return tuple(dict.fromkeys(name for name, _ in _GGUF))
