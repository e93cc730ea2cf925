"""Programs: compiled functions at one shape.  Declared, compiled, counted; nothing else ever
runs.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxserve.runner import bundle, compile_cache, compile_watch
from jaxserve.runner.program_store import ProgramStore
from jaxserve.runner.sharding import ONE_DEVICE, Sharding


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """What is to be compiled: `function` at the shapes of `arguments`, and why it exists."""

    kind: str  # backbone | greedy | random | full | score | seed_counts
    bucket: int  # tokens (backbone), rows (samplers), tokens (seed_counts)
    why: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # pytrees of jax.ShapeDtypeStruct
    donate: tuple[int, ...] = ()
    outputs: Any = None  # shardings of what it returns, a prefix of its tree; None: XLA decides
    sharding: Sharding = ONE_DEVICE
    compiler_options: tuple[tuple[str, Any], ...] = ()
    parts: tuple["ProgramSpec", ...] = ()  # compiled instead; `function` joins what they give

    @property
    def name(self) -> str:
        return f"{self.kind}[{self.bucket}]"


@dataclasses.dataclass
class Program:
    """A compiled spec; calling it runs it.  It cannot compile: other shapes raise TypeError."""

    spec: ProgramSpec
    compiled: Any
    compile_s: float
    uses: int = 0
    measured_s: float = 0.0  # one run on padding or in the proof, after the first where it is short

    def __call__(self, *arguments: Any) -> Any:
        self.uses += 1
        return self.compiled(*arguments)

    @property
    def memory(self) -> dict[str, int]:
        """See `memory_of`."""
        return memory_of(self.compiled)


def memory_of(compiled: Any) -> dict[str, int]:
    """Bytes: arguments, outputs, those aliased (donated), scratch, code; {} where unknown."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    return {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "aliased": analysis.alias_size_in_bytes,
        "temp": analysis.temp_size_in_bytes,
        "code": analysis.generated_code_size_in_bytes,
    }


class Manifest:
    """Every program the engine may run, by kind and bucket."""

    def __init__(self, programs: Iterable[Program]):
        self._programs = {(p.spec.kind, p.spec.bucket): p for p in programs}
        self._buckets: dict[str, tuple[int, ...]] = {}
        for kind, bucket in sorted(self._programs):
            self._buckets[kind] = (*self._buckets.get(kind, ()), bucket)

    def __iter__(self):
        return iter(self._programs.values())

    def __len__(self) -> int:
        return len(self._programs)

    def buckets(self, kind: str) -> tuple[int, ...]:
        """Buckets of a kind, ascending; () when the kind is not compiled."""
        return self._buckets.get(kind, ())

    def get(self, kind: str, bucket: int) -> Program:
        """The program of exactly that bucket; KeyError when it was not declared."""
        try:
            return self._programs[kind, bucket]
        except KeyError:
            raise KeyError(
                f"no program {kind}[{bucket}]; "
                f"declared buckets of {kind}: {self.buckets(kind) or 'none'}"
            ) from None

    @property
    def compile_s(self) -> float:
        return sum(p.compile_s for p in self)

    def table(self) -> list[dict[str, Any]]:
        """One row a program: name, why, compile seconds, seconds a run, memory in bytes, uses."""
        return [
            {
                "program": p.spec.name,
                "why": p.spec.why,
                "compile_s": round(p.compile_s, 3),
                "run_ms": round(1e3 * p.measured_s, 3),
                "uses": p.uses,
                **p.memory,
            }
            for p in self
        ]


def compile_programs(
    specs: Sequence[ProgramSpec],
    *,
    threads: int = 1,
    stored: str = "",
    store: ProgramStore | None = None,
) -> list[Program]:
    """Lowers one after the other (tracing holds the interpreter), compiles in `threads`.

    `stored`: a folder of compiled programs (see `bundle`); what is there is not compiled.  `store`:
    programs of earlier starts; what it has is not even lowered.
    """

    def compile_part(spec: ProgramSpec, lowered: Any) -> Any:
        found = bundle.load(Path(stored), spec, lowered) if stored else None
        if found is None and store is not None:
            found = store.find(spec, lowered)
        if found is not None:
            return found
        compiled = lowered.compile(compiler_options=dict(spec.compiler_options) or None)
        if store is not None:
            store.keep(spec, lowered, compiled)
        return compiled

    def make_part(spec: ProgramSpec, lowered: Any | None) -> Any:
        if lowered is not None or store is None:
            return compile_part(spec, lowered)
        found = store.load(spec)
        if found is not None:
            return found
        with compile_cache.paused():
            return compile_part(spec, lower(spec))

    def make_one(spec: ProgramSpec, lowered: list[Any | None], lower_s: float) -> Program:
        start = time.perf_counter()
        compiled = [make_part(part, low) for part, low in zip(_parts(spec), lowered, strict=True)]
        whole = spec.function(*compiled) if spec.parts else compiled[0]
        return Program(spec, whole, lower_s + time.perf_counter() - start)

    known = store is not None and all_known(specs, store)
    # What JAX reads from a cache of its own cannot be stored again.
    pause = contextlib.nullcontext() if store is None or known else compile_cache.paused()
    # XLA compiles with threads of its own, which loading does not.
    with pause, ThreadPoolExecutor(threads + known) as pool:
        futures = []
        for spec in specs:
            start = time.perf_counter()
            lowered = [
                None if store is not None and store.has(part) else lower(part)
                for part in _parts(spec)
            ]
            futures.append(pool.submit(make_one, spec, lowered, time.perf_counter() - start))
        programs = [future.result() for future in futures]
    if store is not None:
        store.close()
    return programs


def all_known(specs: Sequence[ProgramSpec], store: ProgramStore) -> bool:
    """Has a start of the same facts kept all of them?"""
    return all(store.has(part) for spec in specs for part in _parts(spec))


def _parts(spec: ProgramSpec) -> tuple[ProgramSpec, ...]:
    return spec.parts or (spec,)


def lower(spec: ProgramSpec, platforms: tuple[str, ...] | None = None) -> Any:
    """The traced and lowered program; `platforms` other than those of the default device."""
    jitted = jax.jit(spec.function, donate_argnums=spec.donate, out_shardings=spec.outputs)
    with spec.sharding.context():
        return jitted.trace(*spec.arguments).lower(lowering_platforms=platforms)


class CompileCounter:
    """Counts back-end compiles of the whole process from the moment it is made."""

    def __init__(self) -> None:
        self.reset()

    @property
    def count(self) -> int:
        return compile_watch.total() - self._start

    def reset(self) -> None:
        self._start = compile_watch.total()
