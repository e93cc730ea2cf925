"""How the tensors of a checkpoint map to the parameters of a module."""

from typing import NamedTuple


class Place(NamedTuple):
    """Where one checkpoint tensor goes: `param[index] = tensor` (or its transpose).

    A parameter is often larger than a checkpoint tensor: layers are stacked, q/k/v are joined.
    """

    path: str  # dotted path of the parameter in the module, for example "layers.qkv"
    index: tuple[int | slice, ...] = ()  # () means all of it
    transpose: bool = False  # the checkpoint's [out, in] becomes [in, out]
