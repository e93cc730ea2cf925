"""All settings of the engine, as frozen data.

A config is read once (defaults, then a TOML file, then `--set section.key=value`), checked, and
never edited.  `0` or an empty tuple means "derive it": `jaxserve.batch.buckets.resolve` returns a
new config in which nothing is left to derive.  Every section raises ValueError for a bad value.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import cast

MODES = ("dynamic", "fixed", "time")
POLICIES = ("fcfs", "priority", "round_robin", "shortest_first")
KERNELS = ("auto", "xla")
DTYPES = ("auto", "float32", "bfloat16")
QUANTIZE = ("none", "int8")
LAYERS = ("auto", "loop", "calls")
_CLASS = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PREFIX = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]{0,63})?")


def _whole(name: str, value: object, low: int) -> None:
    if type(value) is not int or value < low:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {low}")


def _number(name: str, value: object, low: float, high: float) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not low <= number <= high:
        raise ValueError(f"{name}={value!r} must be a number from {low:g} to {high:g}")


def _flag(name: str, value: object) -> None:
    if type(value) is not bool:
        raise ValueError(f"{name}={value!r} must be true or false")


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} must be one of: {', '.join(known)}")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights, in which precision."""

    # A pinned name (the default, gemma3-270m), a folder, a .gguf file, an Orbax folder, a hub name.
    name: str = "smollm2-135m-instruct"
    dtype: str = "auto"  # auto | float32 | bfloat16; of weights and activations
    quantize: str = "none"  # none | int8: the weights of matrices, one scale a row
    max_len: int = 0  # tokens of prompt and output together; 0: what the model was trained for

    def __post_init__(self) -> None:
        if type(self.name) is not str or not self.name:
            raise ValueError(f"model.name={self.name!r} must be a name or a path")
        _one_of("model.dtype", self.dtype, DTYPES)
        _one_of("model.quantize", self.quantize, QUANTIZE)
        _whole("model.max_len", self.max_len, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool."""

    block_size: int = 32  # tokens a block
    num_blocks: int = 0  # 0: as many as `memory_gib` holds
    memory_gib: float = 0.0  # 0: measured on an accelerator, 2 on the CPU
    # auto | float32 | bfloat16; auto: bfloat16, unless model.dtype asks for float32
    dtype: str = "auto"
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        _whole("cache.block_size", self.block_size, 1)
        _whole("cache.num_blocks", self.num_blocks, 0)
        _number("cache.memory_gib", self.memory_gib, 0.0, 1e6)
        _one_of("cache.dtype", self.dtype, DTYPES)
        _flag("cache.prefix_caching", self.prefix_caching)


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What runs in the next step."""

    mode: str = "dynamic"  # dynamic | fixed | time: as large as the deadlines of [slo] allow
    token_budget: int = 512  # most tokens in a step; the largest token bucket
    chunk_size: int = 256  # mode fixed: tokens of every chunk but a prompt's last
    max_seqs: int = 64  # most requests with KV at one time; at most token_budget
    # fcfs | priority | round_robin | shortest_first.  In mode time fcfs means: by deadline of the
    # first token.  In mode fixed one prompt prefills at a time:
    # with fcfs a short one waits for all chunks of those before it, at most `aging_steps` steps.
    policy: str = "fcfs"
    aging_steps: int = 256  # passed over for this many steps, a request goes first in any policy
    max_partial_prefills: int = 8  # most prompts in the middle of their prefill
    max_long_partial_prefills: int = 1  # of those, most longer than long_prefill_threshold
    long_prefill_threshold: int = 0  # tokens; 0: 4 % of max_len, at least one block
    # While prompts are few, a step takes at most this many times what its decodes alone take, or
    # what it takes to be efficient; 0: no limit.  Mode dynamic, where costs were measured.
    stall_limit: float = 6.0
    watermark: float = 0.01  # share of blocks that admission leaves free
    reserve_full_prompt: bool = True  # admit only when the blocks of the whole prompt are free
    max_waiting: int = 1_000_000  # most requests in the queue; more are refused

    def __post_init__(self) -> None:
        _one_of("scheduler.mode", self.mode, MODES)
        _one_of("scheduler.policy", self.policy, POLICIES)
        for name in (
            "token_budget",
            "chunk_size",
            "max_seqs",
            "aging_steps",
            "max_partial_prefills",
            "max_long_partial_prefills",
            "max_waiting",
        ):
            _whole(f"scheduler.{name}", getattr(self, name), 1)
        _whole("scheduler.long_prefill_threshold", self.long_prefill_threshold, 0)
        if self.stall_limit != 0:
            _number("scheduler.stall_limit", self.stall_limit, 1.0, 1e6)
        _number("scheduler.watermark", self.watermark, 0.0, 0.99)
        _flag("scheduler.reserve_full_prompt", self.reserve_full_prompt)


@dataclasses.dataclass(frozen=True, slots=True)
class BucketConfig:
    """Compiled shapes."""

    tokens: tuple[int, ...] = ()  # (): derived from the budget; the last one is always the budget
    rows: tuple[int, ...] = ()  # sampled rows; (): derived; the last one is always max_seqs

    def __post_init__(self) -> None:
        for name in ("tokens", "rows"):
            sizes: object = getattr(self, name)
            if not isinstance(sizes, tuple):
                raise ValueError(f"buckets.{name}={sizes!r} must be a list of whole numbers")
            for size in cast(tuple[object, ...], sizes):
                _whole(f"buckets.{name} entry", size, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Sampling features; what is off is not compiled, and a request that asks for it is refused."""

    random: bool = True  # temperature above 0, top-k, top-p, min-p
    penalties: bool = True  # presence, frequency, repetition, logit bias, min_tokens
    logprobs: bool = True  # logprobs and prompt logprobs
    seed: int = 0  # base of the seed of requests that name none

    def __post_init__(self) -> None:
        for name in ("random", "penalties", "logprobs"):
            _flag(f"sampling.{name}", getattr(self, name))
        _whole("sampling.seed", self.seed, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerConfig:
    """How steps run."""

    overlap: bool = True  # schedule and dispatch step N + 1 before step N is read
    compile_cache: str = "auto"  # auto: the user's cache folder | off | a folder
    kernels: str = "xla"  # xla: portable attention everywhere | auto: those of the platform
    bundle: str = ""  # a folder that `jaxserve preflight --bundle` wrote for this very machine
    prove: bool = True  # before serving, prove that every program equals the reference program
    layers: str = "auto"  # auto: calls on a CPU | loop: one program | calls: one call a layer
    deterministic: bool = False  # bits do not depend on load, cache hits, preemption or order

    def __post_init__(self) -> None:
        for name in ("overlap", "prove", "deterministic"):
            _flag(f"runner.{name}", getattr(self, name))
        _one_of("runner.kernels", self.kernels, KERNELS)
        if type(self.bundle) is not str:
            raise ValueError(f"runner.bundle={self.bundle!r} must be a folder, or empty")
        _one_of("runner.layers", self.layers, LAYERS)
        if type(self.compile_cache) is not str or not self.compile_cache:
            raise ValueError(
                f"runner.compile_cache={self.compile_cache!r} must be auto, off or a folder"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class MeshConfig:
    """How many chips, and what each holds: weights and kv heads are split over `tensor`, the tokens
    of a step over `data`."""

    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        _whole("mesh.data", self.data, 1)
        _whole("mesh.tensor", self.tensor, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class ServerConfig:
    """What `jaxserve serve` takes, and how long it waits.  Beyond the first four: 503."""

    max_queue: int = 1024  # samples that wait for their first token
    max_queue_tokens: int = 4_000_000  # their prompts together
    max_connections: int = 4096
    max_body_bytes: int = 16 << 20
    max_upload_bytes: int = 512 << 20  # of one file for batches
    max_header_bytes: int = 32 << 10  # request line and headers, at most 100 of them
    idle_s: float = 30.0  # a connection that says nothing, a body that does not go on
    send_s: float = 30.0  # a reader that takes nothing is dropped
    stream_buffer_bytes: int = 1 << 20  # of one stream; a reader further behind is dropped
    stall_s: float = 60.0  # an engine that says nothing for so long is stuck; at least four steps
    stuck_s: float = 30.0  # and when it then stays so, --restart-engine kills it
    grace_s: float = 30.0  # for requests in flight after SIGTERM
    text_processes: int = 1  # read bodies, run chat templates, tokenise
    text_s: float = 10.0  # for one body
    metrics_prefix: str = "vllm:"  # of metrics that mean the same in vLLM; ours have jaxserve_
    log_requests: bool = True  # one JSON line a request, on stderr
    log_interval_s: float = 10.0  # between lines about the engine, while it works; 0: none

    def __post_init__(self) -> None:
        for name in (
            "max_queue",
            "max_queue_tokens",
            "max_connections",
            "max_body_bytes",
            "max_upload_bytes",
            "max_header_bytes",
            "stream_buffer_bytes",
            "text_processes",
        ):
            _whole(f"server.{name}", getattr(self, name), 1)
        for name in ("idle_s", "send_s", "text_s"):
            _number(f"server.{name}", getattr(self, name), 0.01, 1e6)
        _number("server.stall_s", self.stall_s, 1.0, 1e6)
        _number("server.stuck_s", self.stuck_s, 0.0, 1e6)
        _number("server.log_interval_s", self.log_interval_s, 0.0, 1e6)
        _flag("server.log_requests", self.log_requests)
        if type(self.metrics_prefix) is not str or not _PREFIX.fullmatch(self.metrics_prefix):
            raise ValueError(
                f"server.metrics_prefix={self.metrics_prefix!r} must be letters, digits, _ and :, "
                f"a digit not first, at most 64"
            )
        _number("server.grace_s", self.grace_s, 0.0, 1e6)


@dataclasses.dataclass(frozen=True, slots=True)
class SloClass:
    """What requests of a class are promised: token j of the output (from 0) is due `ttft_ms` +
    j * `tpot_ms` after the request arrived.  0: no promise."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0

    def __post_init__(self) -> None:
        _number("ttft_ms", self.ttft_ms, 0.0, 1e9)
        _number("tpot_ms", self.tpot_ms, 0.0, 1e9)


@functools.lru_cache(maxsize=8)
def _unnamed_class(ttft_ms: float, tpot_ms: float) -> SloClass:
    """Every request asks for it."""
    return SloClass(ttft_ms, tpot_ms)


@dataclasses.dataclass(frozen=True, slots=True)
class SloConfig:
    """Deadlines, which scheduler.mode = "time" keeps."""

    ttft_ms: float = 0.0  # of requests that name no class
    tpot_ms: float = 0.0
    # Name -> class, which a request chooses with its `slo_class`.
    classes: Mapping[str, SloClass] = dataclasses.field(default_factory=dict[str, SloClass])
    margin: float = 0.1  # of each deadline's distance, kept for what predictions miss

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            _number(f"slo.{name}", getattr(self, name), 0.0, 1e9)
        for name in self.classes:
            if not _CLASS.fullmatch(name):
                raise ValueError(
                    f"slo.classes: {name!r} must be 1 to 64 letters, digits, _, - and ."
                )
        _number("slo.margin", self.margin, 0.0, 0.9)

    def of(self, name: str) -> SloClass:
        """The class of that name, "" for that of requests that name none.  Raises ValueError."""
        if not name:
            return _unnamed_class(self.ttft_ms, self.tpot_ms)
        if name not in self.classes:
            known = ", ".join(self.classes) or "none"
            raise ValueError(f"slo_class={name!r} is not one of [slo.classes] ({known})")
        return self.classes[name]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything; one section a part of the engine."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    buckets: BucketConfig = BucketConfig()
    sampling: SamplingConfig = SamplingConfig()
    runner: RunnerConfig = RunnerConfig()
    mesh: MeshConfig = MeshConfig()
    server: ServerConfig = ServerConfig()
    slo: SloConfig = SloConfig()

    @property
    def max_chunk(self) -> int:
        """Most tokens that one request gets in a step."""
        equal = self.scheduler.mode == "fixed" or self.runner.deterministic
        return self.scheduler.chunk_size if equal else self.scheduler.token_budget
