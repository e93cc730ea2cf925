"""jaxserve: LLM inference in which every device step is one of a small, declared set of compiled
shapes.

Importing this package imports neither jax nor numpy; a name below loads its module at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.completion import Chunk, Completion
    from jaxserve.config import (
        BucketConfig,
        CacheConfig,
        EngineConfig,
        ModelConfig,
        RunnerConfig,
        SamplingConfig,
        SchedulerConfig,
    )
    from jaxserve.llm import LLM
    from jaxserve.request import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BucketConfig",
    "CacheConfig",
    "Chunk",
    "Completion",
    "EngineConfig",
    "ModelConfig",
    "RunnerConfig",
    "SamplingConfig",
    "SamplingParams",
    "SchedulerConfig",
]

_HOME = {
    "LLM": "llm",
    "SamplingParams": "request",
    "Chunk": "completion",
    "Completion": "completion",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxserve.{_HOME.get(name, 'config')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
