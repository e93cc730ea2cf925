"""What the results of a batch depend on, so that no other server goes on with it unnoticed."""

import functools
from pathlib import Path
from typing import Any

import jaxserve
from jaxserve.offline.fingerprint import settings_of
from jaxserve.request import SamplingParams
from jaxserve.server.service import Service


class BatchSettings:
    """Those of `jaxserve batch`, but the model is known by its files and by the name that results
    give it."""

    def __init__(self, service: Service) -> None:
        """Before the engine is ready."""
        self._service = service
        self._given = service.engine.config

    def of(self, endpoint: str, defaults: SamplingParams) -> dict[str, Any]:
        """Once the engine is ready: only it knows what dtype `auto` is here.  Raises OSError."""
        return {
            **self._fixed,
            "endpoint": endpoint,
            "--max-tokens": defaults.max_tokens,
            "model.dtype": self._service.engine.config.model.dtype,
        }

    @functools.cached_property
    def _fixed(self) -> dict[str, Any]:
        model, version = Path(self._service.text.load.path), jaxserve.__version__
        found = settings_of(self._given, SamplingParams(), model, version)
        return {**found, "model.name": self._service.names[0]}
