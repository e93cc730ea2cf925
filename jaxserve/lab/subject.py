"""What is simulated: a config in which nothing is left to derive, and what its steps cost."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve import settings
from jaxserve.batch.buckets import resolve
from jaxserve.config import BucketConfig, EngineConfig
from jaxserve.costs import CostModel
from jaxserve.kv.groups import FULL, Windows
from jaxserve.lab import chip, cost_table, fit, trace
from jaxserve.lab import shapes as shapes_of
from jaxserve.lab.trace import Step, Trace
from jaxserve.preflight import check, describe, target
from jaxserve.preflight.child import Job
from jaxserve.runner.memory import GIB

_TABLES = Path(__file__).parent / "tables"
_WAIT = 3  # in `Step.phases`
_GZIP = b"\x1f\x8b"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a config is resolved with, beside itself."""

    max_len: int  # tokens the model was trained for
    token_bytes: float  # of KV, on one device
    pool_gib: float = 0.0  # where the config names neither blocks nor memory; 0: the default
    single: bool = False  # the device has programs of one token and row
    windows: Windows = FULL  # of its groups of layers, see `kv.groups`


@dataclasses.dataclass(frozen=True)
class Subject:
    config: EngineConfig  # resolved
    model: CostModel
    source: str  # of the costs, for people
    windows: Windows  # as in `Facts`


def resolved(config: EngineConfig, facts: Facts) -> EngineConfig:
    """Raises ValueError for settings that contradict each other or the model."""
    cache = config.cache
    if facts.pool_gib and not (cache.num_blocks or cache.memory_gib):
        config = dataclasses.replace(
            config, cache=dataclasses.replace(cache, memory_gib=facts.pool_gib)
        )
    groups = len(facts.windows)
    block_bytes = max(1, round(facts.token_bytes * cache.block_size / groups))  # of one
    single = facts.single or config.buckets.tokens[:1] == (1,)
    return resolve(config, facts.max_len, block_bytes, single=single, windows=facts.windows)


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a file says."""

    model: CostModel
    source: str  # for people
    facts: Facts | None  # None: it does not say
    config: EngineConfig | None  # of the recorded run
    buckets: BucketConfig = BucketConfig()  # of the start that a table was measured with

    @property
    def single(self) -> bool:
        """As in `Facts`, for configs with other buckets than those that were measured."""
        known = self.buckets if self.config is None else self.config.buckets
        return known.tokens[:1] == (1,)


def shipped_names() -> list[str]:
    """Tables that come with the package."""
    return sorted(path.stem for path in _TABLES.glob("*.json"))


def find(name: str) -> Path:
    """A file, or a table that comes with the package.  Raises ValueError when it is neither."""
    path = Path(name)
    return path if path.exists() else shipped(name)


def shipped(name: str) -> Path:
    """Raises ValueError for a name that is none of `shipped_names`."""
    if name not in shipped_names():
        raise ValueError(f"costs {name!r}: no such file; tables here: {', '.join(shipped_names())}")
    return _TABLES / f"{name}.json"


def read_costs(path: Path) -> Costs:
    """A trace or a cost table.  Raises ValueError for a file that is neither."""
    try:
        with path.open("rb") as file:
            is_trace = file.read(2) == _GZIP
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    if is_trace:
        return of_trace(trace.load(path))
    table = cost_table.load(path)
    known = {name: table.facts.get(name) for name in ("max_len", "kv_token_bytes")}
    facts = None
    if None not in known.values():
        pool = table.facts.get("kv_gib", 0.0)
        facts = Facts(int(known["max_len"] or 0), float(known["kv_token_bytes"] or 0), float(pool))
    tokens, rows = table.facts.get("key", {}).get("buckets", ((), ()))
    return Costs(table.costs, table.device, facts, None, BucketConfig(tuple(tokens), tuple(rows)))


def of_trace(loaded: Trace) -> Costs:
    """Of a recorded run: its profile's, or, where it had only those of a warm-up, fitted to its own
    steps.

    Raises ValueError for a run that ended before costs were measured.
    """
    header = loaded.header
    model, config = header.costs, settings.loads(header.config)
    if model is None:
        raise ValueError("the trace has no costs: the run ended before any were measured")
    if not model.host and loaded.steps:
        model = fitted(loaded.steps, config, model, loaded.windows)
    tokens = config.cache.num_blocks * config.cache.block_size
    windows = loaded.windows
    pool = header.facts.get("kv_bytes", 0)
    facts = Facts(config.model.max_len, pool / tokens * len(windows), pool / GIB, windows=windows)
    return Costs(model, header.device, facts, config)


def fitted(
    steps: Sequence[Step], config: EngineConfig, warm: CostModel, windows: Windows = FULL
) -> CostModel:
    """Costs of recorded steps.  A bucket that did not occur costs what it did in the warm-up, times
    what service was slower than that in the others."""
    rows = config.buckets.rows
    known = [step for step in steps if step.device > 0]
    shapes = [
        shapes_of.of_step(step, windows)._replace(
            rows=next((size for size in rows if size >= step.sampled), 0) if step.sampled else 0
        )
        for step in known
    ]
    found = fit.fit(shapes, [step.device / 1e6 for step in known])
    slower = statistics.median(found.program_s(t) / warm.program_s(t) for t in found.tokens)
    programs = {t: slower * warm.program_s(t) for t in warm.tokens}
    programs |= dict(zip(found.tokens, found.program, strict=True))
    host = [(sum(step.phases) - step.phases[_WAIT]) / 1e6 for step in steps]
    base, each = fit.host([step.decodes + len(step.chunks) for step in steps], host)
    return dataclasses.replace(
        found,
        tokens=tuple(sorted(programs)),
        program=tuple(programs[t] for t in sorted(programs)),
        host=base,
        host_row=each,
    )


def on_chip(
    config: EngineConfig,
    config_file: Path | None,
    where: str,
    *,
    efficiency: float = 1.0,
    host_s: float = 0.0,
) -> Subject:
    """`config` on a chip of `where` (`h200`, `v5e:2x4`), by its data sheet.

    Raises ValueError for an unknown chip, and for what does not fit it.
    """
    wanted = target.parse(where)
    if not wanted.figures:
        raise ValueError("nobody knows the figures of a cpu; measure it: jaxserve lab profile")
    if config.model.dtype == "auto":
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, dtype="bfloat16")
        )
    plan = model_plan(config, config_file)
    facts = _facts(plan, chip.pool_gib(plan, wanted))
    made = resolved(config, facts)
    model = chip.cost_model(
        plan | {"token_buckets": list(made.buckets.tokens)},
        wanted.figures,
        efficiency=efficiency,
        host_s=host_s,
    )
    return Subject(made, model, f"data sheet of {wanted} at {efficiency:.0%}", facts.windows)


def model_plan(config: EngineConfig, config_file: Path | None) -> dict[str, Any]:
    """Sizes of the model that `config` names, worked out in another process; weights are not read.

    Raises ValueError for a model that is not known.
    """
    hf = describe.hf_config(config.model.name, config_file)
    return check.compile_all(Job("cpu", settings.dump(config), hf, only=[])).plan


def facts_of_model(config: EngineConfig, config_file: Path | None) -> Facts:
    """Of the model that `config` names."""
    return _facts(model_plan(config, config_file), 0.0)


def _facts(plan: dict[str, Any], pool_gib: float) -> Facts:
    windows = tuple(plan["windows"])
    token_bytes = plan["block_bytes"] * len(windows) / plan["block_size"]  # of all groups
    return Facts(plan["max_len"], token_bytes, pool_gib, windows=windows)
