"""All settings of the engine, as frozen data.

A config is read once (defaults, then a TOML file, then `--set section.key=value`), checked, and never edited.
`0` or an empty tuple means "derive it": `resolve` returns a new config in which nothing is left to derive.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights, in which precision."""

    name: str = "smollm2-135m-instruct"  # the pinned default, a folder, a .gguf file, an Orbax folder, a hub name
    dtype: str = "auto"  # auto | float32 | bfloat16; of weights, activations and KV
    max_len: int = 0  # tokens of prompt and output together; 0: what the model was trained for


@dataclasses.dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool."""

    block_size: int = 32  # tokens a block
    num_blocks: int = 0  # 0: as many as `memory_gib` holds
    memory_gib: float = 0.0  # 0: measured on an accelerator, 2 on the CPU
    prefix_caching: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What runs in the next step."""

    mode: str = "dynamic"  # dynamic | fixed
    token_budget: int = 512  # most tokens in a step; the largest token bucket
    chunk_size: int = 256  # mode fixed: tokens of every chunk but a prompt's last
    max_seqs: int = 64  # most requests with KV at one time
    policy: str = "fcfs"  # fcfs | priority | round_robin | shortest_first
    aging_steps: int = 256  # a request passed over for this many steps goes first, whatever the policy
    max_partial_prefills: int = 8  # most prompts in the middle of their prefill
    max_long_partial_prefills: int = 1  # of those, most longer than long_prefill_threshold
    long_prefill_threshold: int = 0  # tokens; 0: 4 % of max_len, at least one block
    watermark: float = 0.01  # share of blocks that admission leaves free
    reserve_full_prompt: bool = True  # admit only when the blocks of the whole prompt are free
    max_waiting: int = 1_000_000  # most requests in the queue; more are refused


@dataclasses.dataclass(frozen=True, slots=True)
class BucketConfig:
    """Compiled shapes."""

    tokens: tuple[int, ...] = ()  # (): derived from the budget; the last one always equals the budget
    rows: tuple[int, ...] = ()  # sampled rows; (): derived; the last one always equals max_seqs


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Sampling features; what is off is not compiled, and a request that asks for it is refused."""

    random: bool = True  # temperature above 0, top-k, top-p, min-p
    penalties: bool = True  # presence, frequency, repetition, logit bias, min_tokens
    logprobs: bool = True  # logprobs and prompt logprobs
    seed: int = 0  # base of the seed of requests that name none


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerConfig:
    """How steps run."""

    overlap: bool = True  # schedule and dispatch step N + 1 before step N is read
    compile_cache: str = "auto"  # auto: the user's cache folder | off | a folder
    prove: bool = True  # before serving, prove that every program equals the reference program
    deterministic: bool = False  # bits do not depend on load, cache hits, preemption or order


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything; one section a part of the engine."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    buckets: BucketConfig = BucketConfig()
    sampling: SamplingConfig = SamplingConfig()
    runner: RunnerConfig = RunnerConfig()
