"""Which file of the model zoo runs a `model_type`; nothing is imported before it is asked for."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from model_zoo.checkpoint import Place


@dataclasses.dataclass(frozen=True)
class Family:
    """What loading needs to know about one kind of model."""

    model_type: str
    config_from_hf: Callable[..., Any]  # (HF config dict, *, dtype, max_len) -> frozen config
    module: Callable[..., Any]  # nnx module class: module(config, rngs)
    places: Callable[[Any], dict[str, Place]]  # config -> HF tensor name -> Place


# model_type of config.json -> (module, its config class, its nnx module class)
_FAMILIES = {
    "llama": ("model_zoo.llama", "LlamaConfig", "Llama"),
    "mistral": ("model_zoo.llama", "LlamaConfig", "Llama"),
}


def known() -> tuple[str, ...]:
    """The model types that can run."""
    return tuple(_FAMILIES)


def family(model_type: str) -> Family:
    """Raises ValueError for a model_type that no file of the zoo runs."""
    if model_type not in _FAMILIES:
        raise ValueError(
            f"config.json has model_type={model_type!r}, which is not supported; "
            f"supported: {', '.join(_FAMILIES)}"
        )
    module_name, config_name, class_name = _FAMILIES[model_type]
    module = importlib.import_module(module_name)
    config_class = getattr(module, config_name)
    return Family(model_type, config_class.from_hf, getattr(module, class_name), module.places)
