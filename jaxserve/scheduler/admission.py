"""What may enter the engine: refuse at the door whatever could never finish or break a step."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.kv.groups import FULL, Windows, longest_row
from jaxserve.request import MAX_EOS_IDS, Request, SamplingParams

MAX_SALT = 256  # characters
_MASK = 2**64 - 1


class QueueFull(RuntimeError):
    """More requests wait than `scheduler.max_waiting` allows; try again later."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model accepts, and how far it sees.

    `vocab_size`: token ids from here on are refused.  `windows`: of its groups of layers, see
    `kv.groups`.
    """

    vocab_size: int
    eos_ids: frozenset[int]
    windows: Windows = FULL

    def __post_init__(self) -> None:
        if len(self.eos_ids) > MAX_EOS_IDS:
            raise ValueError(f"the model has {len(self.eos_ids)} EOS ids; at most {MAX_EOS_IDS}")
        # An EOS id outside the vocabulary can never be sampled, so it needs no place.
        inside = frozenset(token for token in self.eos_ids if 0 <= token < self.vocab_size)
        object.__setattr__(self, "eos_ids", inside)


def check(
    config: EngineConfig, limits: ModelLimits, prompt: Sequence[int], sampling: SamplingParams
) -> list[int]:
    """The prompt as a list of its own.  Raises ValueError for what can never run here.

    Rule: 1 <= len(prompt) <= max_len - 1, or max_len when only scored; the prompt fits the pool.
    """
    tokens = _check_tokens(prompt, limits.vocab_size)
    room = config.model.max_len - (sampling.max_tokens > 0)
    if len(tokens) > room:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens; at most {room} fit model.max_len="
            f"{config.model.max_len} (one is left for output)"
        )
    longest = longest_kv(config, limits)
    if len(tokens) > longest:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens; the KV pool holds {longest} "
            f"(cache.num_blocks={config.cache.num_blocks}); raise cache.memory_gib"
        )
    _check_features(config, sampling)
    config.slo.of(sampling.slo_class)
    for name, ids in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias),
    ):
        for token in ids:
            if token >= limits.vocab_size:
                raise ValueError(f"{name} has token {token}; ids end at {limits.vocab_size - 1}")
    return tokens


def longest_kv(config: EngineConfig, limits: ModelLimits) -> int:
    """Most tokens whose KV one request can have."""
    cache = config.cache
    return longest_row(
        limits.windows,
        cache.num_blocks,
        cache.block_size,
        config.max_chunk,
        config.model.max_len,
    )


def check_labels(priority: int, salt: str) -> None:
    """Raises ValueError for a priority or salt that is not one."""
    if type(priority) is not int or abs(priority) > 2**31:
        raise ValueError(f"priority={priority!r} must be a whole number")
    if type(salt) is not str or len(salt) > MAX_SALT:
        raise ValueError(f"salt must be a string of at most {MAX_SALT} characters")


def new_request(
    config: EngineConfig,
    limits: ModelLimits,
    tokens: list[int],
    sampling: SamplingParams,
    *,
    number: int,
    sample: int,
) -> Request:
    """Sample `sample` of a checked prompt.

    Where the pool is smaller than the model's length, the request ends where the pool does: so one
    that runs alone can always grow, and the engine always gets on.
    """
    longest = longest_kv(config, limits)
    eos = frozenset[int]() if sampling.ignore_eos else limits.eos_ids
    # The last sampled token needs no KV.
    most = min(len(tokens) + sampling.max_tokens, config.model.max_len, longest + 1)
    seed = sampling.seed
    if seed is None:
        seed = _mix(config.sampling.seed, number - sample)
    promised = config.slo.of(sampling.slo_class)
    return Request(
        number=number,
        tokens=list(tokens),
        num_prompt=len(tokens),
        sampling=sampling,
        stop_ids=eos | frozenset(sampling.stop_token_ids),
        seed=seed & _MASK,
        sample=sample,
        max_total=most,
        ttft_s=promised.ttft_ms / 1e3 or math.inf,
        tpot_s=promised.tpot_ms / 1e3 or math.inf,
    )


def _check_tokens(prompt: Any, vocab_size: int) -> list[int]:
    tokens: list[Any] = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if not tokens:
        raise ValueError("the prompt has no tokens; give at least one (for example BOS)")
    if set(map(type, tokens)) != {int}:
        raise ValueError("a prompt must be a sequence of token ids (whole numbers)")
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"the prompt has token {wrong}; ids go from 0 to {vocab_size - 1}")
    return tokens


def _check_features(config: EngineConfig, sampling: SamplingParams) -> None:
    asked = (
        ("random", not sampling.is_greedy, "a temperature above 0"),
        ("penalties", sampling.needs_full, "penalties, logit_bias or min_tokens"),
        (
            "logprobs",
            sampling.logprobs is not None or sampling.prompt_logprobs is not None,
            "logprobs",
        ),
    )
    for name, wanted, what in asked:
        if wanted and not getattr(config.sampling, name):
            raise ValueError(f"{what} need sampling.{name} = true, which is off in this engine")


def _mix(base: int, number: int) -> int:
    """SplitMix64 (Steele, Lea and Flood 2014): neighbouring numbers give unrelated seeds."""
    z = (base + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
