"""Metadata of a GGUF file, under its architecture's prefix."""

from typing import Any

import numpy as np

from model_zoo.weights.gguf_header import GGUFFile


class Metadata:
    """The values of one architecture.  Methods raise ValueError, naming the file and the key."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.file, self.architecture = file, architecture

    def fail(self, reason: str) -> ValueError:
        return ValueError(f"{self.file.path}: {reason}; this GGUF model is not supported")

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is stored, whatever its type."""
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; an array of equal ones (one a layer) counts as one."""
        value = self.get(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            name = f"{self.architecture}.{key}"
            raise self.fail(f"metadata {name} is {value!r}, not one positive number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, as the shortest decimal that is the same float32."""
        value = self.get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not -1e30 < value < 1e30
        ):
            raise self.fail(f"metadata {self.architecture}.{key} is {value!r}, not a number")
        return shortest(value)


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))
