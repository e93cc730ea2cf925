"""Every tensor of a checkpoint and every parameter of a module, held against each other."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from model_zoo.checkpoint import Checkpoint, Place, TensorInfo

READABLE = ("float32", "bfloat16", "float16")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_IGNORABLE = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")  # derived from config


@dataclasses.dataclass(frozen=True)
class Account:
    """What happens to each tensor; nothing is left over."""

    loaded: Mapping[str, tuple[str, ...]]  # parameter path -> the tensors that fill it
    tied: bool  # the file has a head although the config ties it; it must equal the embedding
    ignored: tuple[str, ...]


def account(
    checkpoint: Checkpoint,
    places: Mapping[str, Place],
    params: Mapping[str, tuple[int, ...]],  # shape of each parameter by dotted path
) -> Account:
    """Finds a use for every tensor before any is read.

    Raises ValueError listing every tensor that is missing, unexpected, of a wrong shape or of a
    type that cannot be read, and every parameter that would not be filled.
    """
    infos = checkpoint.infos
    ignored = tuple(name for name in infos if _IGNORABLE.fullmatch(name))
    extra = [name for name in infos if name not in places and name not in ignored]
    tied = HEAD in extra  # the module has no head of its own
    if tied:
        extra.remove(HEAD)
    present = [name for name in places if name in infos and places[name].path in params]
    problems = [
        *_listed("missing tensors", (name for name in places if name not in infos)),
        *_listed("unexpected tensors", extra),
        *_listed("wrong shapes", _wrong_shapes(infos, places, params, present)),
        *_listed("unreadable types", _unreadable(infos, present)),
        *_listed("parameters not filled exactly", _uncovered(places, params)),
    ]
    if problems:
        raise ValueError(f"{checkpoint.path} does not fit its config: {'; '.join(problems)}")
    loaded: dict[str, list[str]] = {path: [] for path in params}
    for name, place in places.items():
        loaded[place.path].append(name)
    return Account({path: tuple(names) for path, names in loaded.items()}, tied, ignored)


def check_tied(checkpoint: Checkpoint) -> None:
    """Raises ValueError unless the head of the file is bit for bit its embedding."""
    head, embedding = checkpoint.read(HEAD), checkpoint.read(EMBEDDING)
    if head.shape != embedding.shape or not np.array_equal(head, embedding):
        raise ValueError(
            f"{checkpoint.path}: config.json says tie_word_embeddings, but {HEAD} differs from "
            f"{EMBEDDING}; set tie_word_embeddings to false if the head is the model's own"
        )


def place_shape(place: Place, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape a tensor must have to fill `place` in a parameter of `shape`."""
    part = np.broadcast_to(np.int8(0), shape)[place.index].shape  # takes no memory
    return part[::-1] if place.transpose else part


def _wrong_shapes(
    infos: Mapping[str, TensorInfo],
    places: Mapping[str, Place],
    params: Mapping[str, tuple[int, ...]],
    present: Iterable[str],
) -> Iterable[str]:
    for name in present:
        expected = place_shape(places[name], params[places[name].path])
        if infos[name].shape != expected:
            yield f"{name} is {list(infos[name].shape)}, needs {list(expected)}"


def _unreadable(infos: Mapping[str, TensorInfo], present: Iterable[str]) -> Iterable[str]:
    for name in present:
        if infos[name].dtype not in READABLE:
            yield f"{name} is {infos[name].stored}"


def _uncovered(places: Mapping[str, Place], params: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    """Parameters whose places do not add up to their size, and places without a parameter."""
    filled = dict.fromkeys(params, 0)
    for place in places.values():
        if place.path in params:
            filled[place.path] += math.prod(place_shape(place, params[place.path]))
        else:
            yield f"{place.path} does not exist"
    for path, count in filled.items():
        if count != math.prod(params[path]):
            yield f"{path} has {math.prod(params[path])} values, the checkpoint fills {count}"


def _listed(title: str, items: Iterable[Any]) -> list[str]:
    items = list(items)
    if not items:
        return []
    return [f"{len(items)} {title}: {', '.join(items[:8])}{', ...' if len(items) > 8 else ''}"]
