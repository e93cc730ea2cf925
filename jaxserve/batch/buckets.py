"""Which compiled shapes there are, and the config in which nothing is left to derive."""

import dataclasses
import math

from jaxserve.config import BucketConfig, EngineConfig, SchedulerConfig
from jaxserve.kv.groups import FULL, Windows, row_blocks

SMALLEST = 8  # tokens or rows; a bfloat16 product of one row takes 14 times as long as one of eight
_FINE = 32  # tokens from which a CPU's time grows in proportion to them
DEFAULT_MEMORY_GIB = 2.0  # KV pool where nothing is configured and nothing was measured
GIB = 1 << 30


def token_buckets(
    budget: int, max_seqs: int, given: tuple[int, ...] = (), *, single: bool = False
) -> tuple[int, ...]:
    """Token buckets, ascending; the last equals `budget` whatever it is.

    Without `given`: 8, 16, 24, 32, 48, 64, 96, ... (steps of at most 1.5 above 16) where steps of
    decodes alone live, up to `max_seqs`, and doubling above, where the scheduler snaps chunks to
    the bucket.  `single`: 1 as well, and 40, 56, 80, ... (at most 1.25 above 32), since where one
    token is so much faster time grows with every token.  `given` is cut at the budget, and the
    budget added.
    """
    if given:
        return tuple(sorted({min(size, budget) for size in given} | {budget}))
    sizes, power = [SMALLEST], SMALLEST
    while power < budget:
        if power < max_seqs and power > SMALLEST:
            quarters = (5, 6, 7) if single and power >= _FINE else (6,)
            sizes.extend(power * quarter // 4 for quarter in quarters)
        power *= 2
        sizes.append(power)
    sizes = [1] * single + sizes
    return tuple(size for size in sizes if size < budget) + (budget,)


def row_buckets(
    max_seqs: int, given: tuple[int, ...] = (), *, single: bool = False
) -> tuple[int, ...]:
    """Buckets of sampled rows, ascending; the last equals `max_seqs`: 8, 16, 32, ...; `single`:
    1 as well."""
    if given:
        return tuple(sorted({min(size, max_seqs) for size in given} | {max_seqs}))
    sizes = [1] * single + [SMALLEST << power for power in range(max_seqs.bit_length())]
    return tuple(size for size in sizes if size < max_seqs) + (max_seqs,)


def resolve(
    config: EngineConfig,
    model_max_len: int,
    kv_bytes_per_block: int,
    *,
    single: bool = False,
    windows: Windows = FULL,
) -> EngineConfig:
    """A config in which nothing is left to derive.

    `model_max_len`: tokens the model was trained for.  `kv_bytes_per_block`: KV of
    `cache.block_size` tokens in one group of layers; `windows`: of all groups (`kv.groups`).
    `single`: a program of one token or row is much faster than one of eight.  `max_seqs` is cut to
    the budget, so that every running request can get a token in every step.  Raises ValueError for
    settings that contradict each other.
    """
    block_size = config.cache.block_size
    max_len = config.model.max_len or model_max_len
    if max_len > model_max_len:
        raise ValueError(
            f"model.max_len={max_len} is above the {model_max_len} tokens the model was trained "
            f"for; lower it, or leave it at 0"
        )
    rules = _resolve_rules(config, max_len)
    max_chunk = dataclasses.replace(config, scheduler=rules).max_chunk
    num_blocks, groups = config.cache.num_blocks, len(windows)
    if not num_blocks:
        memory = config.cache.memory_gib or DEFAULT_MEMORY_GIB
        # More than twice what all rows can hold would only lengthen the memory of the prefix cache.
        row = row_blocks(windows, max_len, block_size, max_chunk)
        num_blocks = min(int(memory * GIB) // kv_bytes_per_block, 2 * rules.max_seqs * row)
        if num_blocks < groups:
            raise ValueError(
                f"cache.memory_gib={memory} holds {num_blocks or 'no'} block of "
                f"{kv_bytes_per_block} bytes; {groups} are the least; raise it"
            )
    elif num_blocks < groups:
        raise ValueError(
            f"cache.num_blocks={num_blocks}: this model has {groups} groups of layers, and a token "
            f"takes a block in each; raise it"
        )
    if config.runner.deterministic:
        buckets = BucketConfig(tokens=(rules.token_budget,), rows=(rules.max_seqs,))
    else:
        buckets = BucketConfig(
            tokens=token_buckets(
                rules.token_budget, rules.max_seqs, config.buckets.tokens, single=single
            ),
            rows=row_buckets(rules.max_seqs, config.buckets.rows, single=single),
        )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_len=max_len),
        cache=dataclasses.replace(config.cache, num_blocks=num_blocks),
        scheduler=rules,
        buckets=buckets,
    )


def _resolve_rules(config: EngineConfig, max_len: int) -> SchedulerConfig:
    rules, block_size = config.scheduler, config.cache.block_size
    chunk_size = min(rules.chunk_size, rules.token_budget)
    max_seqs = min(rules.max_seqs, rules.token_budget)
    if config.runner.deterministic:
        if rules.mode == "time":
            raise ValueError(
                "scheduler.mode=time cuts steps by what they take, and runner.deterministic pins "
                "them; turn one of the two off"
            )
        chunk_size -= chunk_size % block_size  # so that a cached chunk is made of whole blocks
        if not chunk_size or max_seqs - 1 + chunk_size > rules.token_budget:
            raise ValueError(
                f"runner.deterministic needs a chunk (scheduler.chunk_size={rules.chunk_size} "
                f"rounded down to blocks of {block_size}: {chunk_size}) beside {max_seqs - 1} "
                f"decodes in scheduler.token_budget={rules.token_budget}; raise the budget, or "
                f"lower scheduler.chunk_size or scheduler.max_seqs"
            )
    threshold = rules.long_prefill_threshold or max(block_size, math.ceil(0.04 * max_len))
    return dataclasses.replace(
        rules, chunk_size=chunk_size, max_seqs=max_seqs, long_prefill_threshold=threshold
    )
