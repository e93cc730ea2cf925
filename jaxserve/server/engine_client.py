"""The server's side of the engine: starts its process, watches it, hands out what it brings."""

import asyncio
import dataclasses
import enum
import logging
import sys
import time
from collections.abc import Callable, Sequence

from jaxserve import settings
from jaxserve.config import EngineConfig
from jaxserve.driver import Driver, Generation
from jaxserve.metrics import StepRecord
from jaxserve.request import SamplingParams
from jaxserve.scheduler.admission import ModelLimits
from jaxserve.server import protocol
from jaxserve.server.batch_engine import BatchEngine
from jaxserve.server.children import Child
from jaxserve.server.exchange import Exchange
from jaxserve.server.protocol import Codec, FromEngine, Gauges, Ready, Stepped, ToEngine
from jaxserve.server.remote_engine import Numbers, RemoteEngine
from jaxserve.server.tally import Tally
from jaxserve.text.tokenizer import Tokenizer

COMMAND = (sys.executable, "-m", "jaxserve.server.engine_process")
STALLED_STEPS = 4  # an engine is not stuck before so many of its longest steps have passed
RESTART_SECONDS = 1.0  # between an engine's end and the next start; doubled up to a minute
_CODEC: Codec[FromEngine, ToEngine] = protocol.codec(FromEngine)
_log = logging.getLogger(__name__)


class State(enum.StrEnum):
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    STALLED = "stalled"  # it says nothing, though it should
    DEAD = "dead"  # and will not be started again


class EngineFailed(RuntimeError):
    """The engine could not be started."""


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Who wants to hear what the engine says."""

    note: Callable[[str], None] = lambda line: None  # a line for people
    on_compile: Callable[[int], None] = lambda count: None  # programs compiled so far
    on_ready: Callable[[float], None] = lambda seconds: None  # that the start took
    on_step: Callable[[StepRecord], None] = lambda record: None


NO_HOOKS = Hooks()


class EngineClient:
    """One engine process at a time."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        restart: bool = False,
        command: Sequence[str] = COMMAND,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        self.config = config  # resolved once the engine is ready
        self.startup: dict[str, float] = {}
        self.num_steps = 0  # heard of
        self.num_starts = 0  # of an engine that became ready
        self.gauges = Gauges()  # at its last step
        self.programs: list[protocol.Program] = []
        self.tally = Tally()
        self._tokenizer = tokenizer
        self._restart = restart
        self._command = command
        self._hooks = hooks
        self._started = time.monotonic()
        self._child: Child[FromEngine, ToEngine] | None = None
        self._remote: RemoteEngine | None = None
        self._driver: Driver | None = None
        self._exchanges: dict[Generation, Exchange] = {}
        self._numbers = Numbers()
        self._batches: list[BatchEngine] = []
        self._ready = False
        self._dead = False
        self._stall_s = config.server.stall_s
        self._heard = time.monotonic()
        self._failure: str | None = None

    @property
    def state(self) -> State:
        if self._dead:
            return State.DEAD
        if not self._ready:
            return State.STARTING
        if self._silent_s > self._stall_s:
            return State.STALLED
        return State.BUSY if self.num_requests else State.IDLE

    @property
    def _silent_s(self) -> float:
        return time.monotonic() - self._heard

    @property
    def num_requests(self) -> int:
        """Samples in flight."""
        return 0 if self._remote is None else self._remote.num_requests

    @property
    def num_queued(self) -> int:
        """Samples in flight without a first token."""
        return 0 if self._remote is None else self._remote.num_queued

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def check_queue(self) -> None:
        """Raises QueueFull when not even one more request has a place."""
        if self._remote is not None:
            self._remote.check_queue(1, 1)

    async def run(self) -> None:
        """Keeps an engine running until cancelled.

        Raises EngineFailed when the first one cannot start.  Without `restart`, returns when the
        engine has died.
        """
        pause = RESTART_SECONDS
        while True:
            ended = await self._run_once()
            if self._failure is not None and not self.num_starts:
                raise EngineFailed(self._failure)
            if self._ready:
                pause = RESTART_SECONDS
            self._ready = False
            error = f"the engine process ended ({self._failure or ended})"
            self._lost(error)
            for engine in self._batches:
                engine.fail_all(error)
            self._failure = None
            if not self._restart:
                self._dead = True
                return
            self._hooks.note(f"warning: the engine is started again in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 60.0)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        priority: int,
        salt: str,
        streams: bool,
    ) -> Exchange:
        """All prompts of one request, or none and an exception: ValueError for one that can never
        run, QueueFull.  Only in a state that is ready."""
        assert self._driver is not None
        samples, most = len(prompts) * sampling.n, self.config.server.max_queue
        if samples > most:
            raise ValueError(f"{samples} samples are more than server.max_queue={most} may wait")
        generations: list[Generation] = []
        try:
            for prompt in prompts:
                generations.append(
                    self._driver.submit(prompt, sampling, priority=priority, salt=salt)
                )
        except Exception:
            for generation in generations:
                self._driver.abort(generation)
            raise
        limit = self.config.server.stream_buffer_bytes
        exchange = Exchange(generations, streams=streams, limit=limit)
        for generation in generations:
            self._exchanges[generation] = exchange
        return exchange

    def abort(self, exchange: Exchange) -> None:
        """Ends a request at once.  Idempotent."""
        exchange.cancel()
        for generation in exchange.generations:
            self._exchanges.pop(generation, None)
            if self._driver is not None:
                self._driver.abort(generation)

    def fail_all(self, error: str) -> None:
        """Ends everything in flight, with an error that its clients get."""
        if self._remote is not None:
            for number in list(self._remote.open_numbers()):
                self._send(protocol.Finish([number], "abort"))
            self._lost(error, log=False)

    def open_batch_engine(self) -> BatchEngine:
        """A second way in, for a thread.  Only in a state that is ready; `close_batch_engine` ends
        it."""
        assert self._remote is not None
        loop = asyncio.get_running_loop()

        def send(message: ToEngine) -> None:
            loop.call_soon_threadsafe(self._send, message)

        engine = BatchEngine(self.config, self._remote.limits, send, self._numbers)
        self._batches.append(engine)
        return engine

    def close_batch_engine(self, engine: BatchEngine) -> None:
        """The thread has aborted what it had in flight."""
        self._batches.remove(engine)

    def _deliver(self, message: Stepped | protocol.Refused) -> None:
        """Everybody takes what is theirs."""
        assert self._remote is not None
        self._remote.take(message)
        for engine in self._batches:
            engine.take(message)

    async def _run_once(self) -> str:
        """One engine from start to end: how it ended."""
        self._started = time.monotonic()
        child = await Child[FromEngine, ToEngine].start(self._command, _CODEC)
        self._child = child
        watch = asyncio.create_task(self._watch(child))
        try:
            child.send(protocol.Start(settings.dump(self.config)))
            while messages := await child.receive():
                self._heard = time.monotonic()
                for message in messages:
                    self._take(message)
                self._hand_out()
            return await child.ended()
        except ValueError as error:
            return f"it said what is no message: {error}"
        finally:
            watch.cancel()
            self._child = None
            await child.end()

    async def _watch(self, child: Child[FromEngine, ToEngine]) -> None:
        """Kills an engine that stays stuck, when another one is to follow."""
        while self._restart:
            limit = self._stall_s + self.config.server.stuck_s
            if self._ready and self._silent_s > limit:
                self._failure = f"it was stuck for {self._silent_s:.0f} s and was killed"
                child.kill()
                return
            await asyncio.sleep(min(1.0, limit / 4))

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Stepped):
            self.gauges = message.gauges
            self.num_steps += 1
            self.tally.stepped(message)
            for record in message.records:
                self._hooks.on_step(record)
            self._deliver(message)
        elif isinstance(message, protocol.Refused):
            self.tally.refused(message)
            self._deliver(message)
        elif isinstance(message, protocol.Beat):
            self.gauges = message.gauges
        elif isinstance(message, Ready):
            self._begin(message)
        elif isinstance(message, protocol.Note):
            self._hooks.note(message.line)
        elif isinstance(message, protocol.Compiled):
            self._hooks.on_compile(message.count)
        elif isinstance(message, protocol.Failed):
            self._failure = message.error

    def _begin(self, message: Ready) -> None:
        resolved = settings.loads(message.config)
        limits = ModelLimits(message.vocab_size, frozenset(message.eos_ids), message.windows)
        if self._remote is None:
            self._remote = RemoteEngine(resolved, limits, self._send_request, self._numbers)
            self._driver = Driver(self._remote, self._tokenizer)
        self.config = self._remote.config = resolved
        self.startup = message.startup
        self.programs = message.programs
        self.tally.budget = resolved.scheduler.token_budget
        self._stall_s = max(resolved.server.stall_s, STALLED_STEPS * message.slowest_step_s)
        self._ready = True
        self.num_starts += 1
        self._hooks.on_ready(time.monotonic() - self._started)

    def _send_request(self, message: ToEngine) -> None:
        self.tally.sent(message)
        self._send(message)

    def _send(self, message: ToEngine) -> None:
        if self._child is not None:
            self._child.send(message)

    def _lost(self, error: str, *, log: bool = True) -> None:
        if log:
            _log.error("%s; %d samples were in flight", error, self.num_requests)
        self.gauges = Gauges()
        self.tally.lost()
        if self._remote is not None:
            self._remote.fail_all(error)
            self._hand_out()

    def _hand_out(self) -> None:
        """Chunks that have arrived go to those who wait for them."""
        if self._driver is None:
            return
        ended: list[Generation] = []
        for generation, chunk in self._driver.step():
            exchange = self._exchanges.get(generation)
            if exchange is not None:
                if chunk.finish_reason is not None and generation.done:
                    ended.append(generation)
                exchange.push(generation, chunk)
                if exchange.overflowed:
                    _log.warning("a reader of a stream is too slow; it was dropped")
                    exchange.cut()
                    self.abort(exchange)
        for generation in ended:  # only now: another chunk of it may have come with the last one
            self._exchanges.pop(generation, None)
