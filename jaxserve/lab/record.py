"""Writes a trace while an engine runs: an observer of the engine, and what opens and closes it."""

import collections
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import jaxserve
from jaxserve import settings
from jaxserve.batch.flight import Flight
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.kv.groups import FULL, Windows, most_held
from jaxserve.lab import perfetto, trace
from jaxserve.lab.prefixes import Prefixes
from jaxserve.lab.trace import RequestRow, Step
from jaxserve.metrics import StepRecord
from jaxserve.request import Output, Request, Status

if TYPE_CHECKING:
    from jaxserve.build import Assembly

_REMEMBERED = 4096  # requests that were ended from outside: whether they still get tokens


class Recorder:
    """Turns what the engine tells into rows.  `config` is resolved; `clock` is the engine's."""

    def __init__(
        self,
        write: Callable[[Step | RequestRow], None],
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        windows: Windows = FULL,
    ) -> None:
        self._write = write
        self._clock = clock
        self._start = clock()
        size = self._block_size = config.cache.block_size
        # Of each group of layers: blocks that a request holds at most.
        self._most = [most_held(window, size, config.max_chunk) or 2**31 for window in windows]
        self._prefixes = Prefixes(config)
        self._open: dict[int, _Open] = {}
        self._partial: dict[int, int] = {}  # request in its prefill -> tokens computed
        self._ended: collections.OrderedDict[int, float] = collections.OrderedDict()
        self._steps = 0

    def arrived(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._open[request.number] = _Open(request)

    def ended(self, request: Request) -> None:
        now = self._clock()
        self._ended[request.number] = now
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self._end(request, now)

    def landed(self, flight: Flight, record: StepRecord, outputs: Sequence[Output]) -> None:
        plan = flight.plan
        for request in plan.admitted:
            known = self._open.get(request.number)
            if known is not None and not request.num_preempted:
                known.missed = self._prefixes.admitted(request, self._steps)
        live = self._live_blocks(flight)
        self._write(self._step(flight, record, live))
        for request, start, num_tokens, _, _ in plan.chunks:
            self._prefixes.computed(request, start, start + num_tokens, self._steps)
            if (known := self._open.get(request.number)) is not None:
                known.computed += num_tokens
        ends: list[Request] = []
        for output in outputs:
            known = self._open.get(output.request.number)
            if known is not None and output.tokens:  # one at most, in one step
                known.count(self._steps)
            if output.finish_reason is not None:
                ends.append(output.request)
        for request in ends:
            self._end(request, record.landed_at)
        self._steps += 1

    def close(self) -> None:
        """Writes the requests that have not ended."""
        for known in self._open.values():
            self._write(known.row(self._start, None))
        self._open.clear()

    def _end(self, request: Request, now: float) -> None:
        self._partial.pop(request.number, None)
        known = self._open.pop(request.number, None)
        if known is not None:
            self._write(known.row(self._start, _micro(now - self._start)))

    def _live_blocks(self, flight: Flight) -> int:
        """Blocks of the requests in the step and of those between two chunks; shared ones count
        for each, so what is in use beyond this number belongs to nobody."""
        plan, size = flight.plan, self._block_size
        for request in plan.preempted:
            self._partial.pop(request.number, None)
        ends = [plan.decodes.starts + 1]
        for request, start, num_tokens, _, samples in plan.chunks:
            end = start + num_tokens
            self._partial.pop(request.number, None)
            if samples or request.status is Status.FINISHED:
                ends.append(np.array([end]))
            else:
                self._partial[request.number] = end
        blocks = -(
            -np.concatenate([*ends, np.array(list(self._partial.values()), np.int64)]) // size
        )
        return int(sum(np.minimum(blocks, most).sum() for most in self._most))

    def _late(self, flight: Flight, planned_at: float) -> int:
        ended, plan = self._ended, flight.plan
        if not ended:
            return 0
        given = [(chunk.request, chunk.num_tokens) for chunk in plan.chunks]
        given += [(request, 1) for request in plan.decodes.requests]
        return sum(n for r, n in given if ended.get(r.number, planned_at) < planned_at)

    def _step(self, flight: Flight, record: StepRecord, live: int) -> Step:
        plan, r = flight.plan, record
        phases = (r.schedule_s, r.build_s, r.dispatch_s, r.wait_s, r.update_s)
        schedule, build, dispatch, wait, update = map(_micro, phases)
        return Step(
            at=_micro(r.planned_at - self._start),
            landed=_micro(r.landed_at - r.planned_at),
            device=_micro(r.device_s),
            padding=_micro(r.padding_s),
            phases=(schedule, build, dispatch, wait, update),
            predicted=None if r.predicted_s is None else _micro(r.predicted_s),
            bucket=r.bucket,
            decodes=r.decode_tokens,
            context=int(plan.decodes.starts.sum()) + r.decode_tokens,
            chunks=tuple((c.request.number, c.start, c.num_tokens) for c in plan.chunks),
            last_chunk=plan.last_chunk,
            cut=plan.cut_tokens,
            sampled=r.output_tokens + r.dropped_tokens,
            sampler=r.sampler,
            output=r.output_tokens,
            dropped=r.dropped_tokens,
            recomputed=r.recomputed_tokens,
            unused=r.unused,
            waiting=r.waiting,
            running=r.running,
            kv_used=r.kv_used,
            kv_live=live,
            preempted=tuple(request.number for request in plan.preempted),
            admitted=tuple(request.number for request in plan.admitted),
            hit=r.hit_tokens,
            late=self._late(flight, r.planned_at),
        )


class _Open:
    """A request that has not ended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.missed: tuple[int, int, int] = (0, 0, 0)
        self.computed = self.output = 0
        self._runs: list[list[int]] = []
        self._next = -1  # the step in which a token would go on with the last run

    def count(self, step: int) -> None:
        """A token came."""
        self.output += 1
        if step == self._next:
            self._runs[-1][1] += 1
        else:
            self._runs.append([step, 1])
        self._next = step + 1

    def row(self, start: float, ended: int | None) -> RequestRow:
        request = self.request
        return RequestRow(
            number=request.number,
            sample=request.sample,
            arrived=_micro(request.arrival - start),
            ended=ended,
            prompt=request.num_prompt,
            output=self.output,
            cached=request.num_cached,
            missed=self.missed,
            computed=self.computed,
            num_preempted=request.num_preempted,
            reason=request.finish_reason,
            runs=tuple((step, count) for step, count in self._runs),
        )


class Recording:
    """A trace file being written from an engine; close it."""

    def __init__(self, path: Path, engine: Engine, header: trace.Header, **options: Any) -> None:
        self._engine = engine
        self._writer = trace.Writer(path, header)
        self._recorder = Recorder(
            self._writer.write, engine.config, windows=engine.limits.windows, **options
        )
        engine.observer = self._recorder

    def close(self) -> None:
        self._engine.observer = None
        self._recorder.close()
        self._writer.close()


def header_of(
    engine: Engine, programs: list[dict[str, Any]], device: str, **facts: Any
) -> trace.Header:
    """What a trace says about the engine it is from."""
    return trace.Header(
        jaxserve_trace=trace.FORMAT,
        version=jaxserve.__version__,
        config=settings.dump(engine.config),
        device=device,
        costs=engine.cost_model,
        programs=programs,
        facts={
            "kv_blocks": engine.kv.num_blocks,
            "windows": list(engine.limits.windows),
            **facts,
        },
    )


def recording_of(
    assembly: "Assembly", record: Path | None, trace_out: Path | None
) -> contextlib.AbstractContextManager[None]:
    """`recording` of an assembled engine."""
    runner = assembly.runner
    facts: dict[str, Any] = {"startup_s": assembly.startup, "compile_s": runner.manifest.compile_s}
    if (state := getattr(runner, "state", None)) is not None:
        facts["kv_bytes"] = sum(array.nbytes for array in _arrays(state.kv))
    header = header_of(assembly.engine, runner.manifest.table(), _device(), **facts)
    return recording(assembly.engine, header, record, trace_out)


def _arrays(tree: Any) -> list[Any]:
    jax = sys.modules.get("jax")
    return [] if jax is None else jax.tree.leaves(tree)


def _device() -> str:
    """The device in use; jax is there where there is one."""
    jax = sys.modules.get("jax")
    if jax is None:
        return "none"
    device = jax.devices()[0]
    return f"{jax.device_count()} x {device.platform} {device.device_kind}"


@contextlib.contextmanager
def recording(
    engine: Engine, header: trace.Header, record: Path | None, trace_out: Path | None
) -> Iterator[None]:
    """Records while the block runs: `record` is a trace, `trace_out` a timeline for a viewer."""
    if record is None and trace_out is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        path = record
        if path is None:
            handle, name = tempfile.mkstemp(prefix="jaxserve-", suffix=".trace")
            os.close(handle)
            path = Path(name)
            stack.callback(path.unlink)
        if trace_out is not None:
            stack.callback(perfetto.convert, path, trace_out)
        stack.callback(Recording(path, engine, header).close)
        yield


def _micro(seconds: float) -> int:
    return round(1e6 * seconds)
