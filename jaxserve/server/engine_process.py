"""The process that the engine runs in: requests come over a socket, what steps bring goes back.

`python -m jaxserve.server.engine_process FD`.  Text is not known here: the loop sees token ids
only, so nothing that a server does holds up a step.
"""

import logging
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from jaxserve import settings
from jaxserve.engine import Engine, QueueFull
from jaxserve.metrics import StepRecord
from jaxserve.request import Output, Request
from jaxserve.scheduler.scheduler import NOT_FINITE
from jaxserve.server import protocol
from jaxserve.server.child import Pipe, live_as_long_as
from jaxserve.server.protocol import (
    Add,
    Beat,
    Entry,
    Finish,
    FromEngine,
    Gauges,
    Start,
    Stepped,
    ToEngine,
)

if TYPE_CHECKING:
    from jaxserve.build import Assembly

BEAT_SECONDS = 0.2  # an idle loop says so as often

_log = logging.getLogger(__name__)
type EnginePipe = Pipe[ToEngine, FromEngine]


def run(connection: socket.socket, assemble: "Callable[..., Assembly]") -> int:
    """Starts the engine that the first message asks for, and serves until the server is gone."""
    live_as_long_as(connection)
    pipe: EnginePipe = Pipe(connection, protocol.codec(ToEngine))
    try:
        (start,) = pipe.receive(None)
        if not isinstance(start, Start):
            raise ValueError(f"the first message is {type(start).__name__}, not Start")
        records: list[StepRecord] = []
        try:
            assembly = assemble(
                settings.loads(start.config),
                on_step=records.append,
                on_compile=lambda count: pipe.send(protocol.Compiled(count)),
                log=lambda line: pipe.send(protocol.Note(line)),
            )
        except (ValueError, OSError, RuntimeError) as error:  # as `cli.common.assemble` does
            pipe.send_all(protocol.Failed(" ".join(str(error).split()) or type(error).__name__))
            return 2
        pipe.send(_ready(assembly))
        _Loop(pipe, assembly, records).run()
    except EOFError:
        return 0


def _ready(assembly: "Assembly") -> protocol.Ready:
    engine, costs = assembly.engine, assembly.engine.scheduler.costs
    slowest = costs.cost(assembly.config.scheduler.token_budget) if costs.measured else 0.0
    return protocol.Ready(
        config=settings.dump(assembly.config),
        vocab_size=engine.limits.vocab_size,
        eos_ids=sorted(engine.limits.eos_ids),
        windows=engine.limits.windows,
        slowest_step_s=slowest,
        startup=assembly.startup,
        programs=[_program(row) for row in assembly.runner.manifest.table()],
    )


def _program(row: dict[str, Any]) -> protocol.Program:
    return protocol.Program(row["program"], row["why"], row["compile_s"], row["run_ms"] / 1e3)


class _Loop:
    def __init__(self, pipe: EnginePipe, assembly: "Assembly", records: list[StepRecord]) -> None:
        self._pipe = pipe
        self._engine: Engine = assembly.engine
        self._runner = assembly.runner
        self._records = records
        self._requests: dict[int, Request] = {}  # by the server's number
        self._numbers: dict[Request, int] = {}

    def run(self) -> NoReturn:
        """Until the server is gone: EOFError."""
        engine = self._engine
        while True:
            wait = 0.0
            if engine.has_work:
                outputs = engine.step()
                entries = [entry for output in outputs if (entry := self._entry(output))]
                self._pipe.send(Stepped(entries, self._records, self._gauges()))
                self._records.clear()
            else:
                self._pipe.send(Beat(self._gauges()))
                wait = BEAT_SECONDS
            for message in self._pipe.receive(wait):
                self._take(message)

    def _gauges(self) -> Gauges:
        engine = self._engine
        return Gauges(
            engine.num_running,
            engine.num_waiting,
            engine.kv.num_used,
            engine.kv.num_blocks,
            engine.kv.num_allocated,
            engine.stats.failed_steps,
            self._runner.compiles_after_warmup,
        )

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Finish):
            for number in message.numbers:
                request = self._requests.pop(number, None)
                if request is not None:
                    del self._numbers[request]
                    self._engine.finish(request, message.reason)

    def _add(self, message: Add) -> None:
        """A prompt that the engine does not take fails alone."""
        try:
            requests = self._engine.add(
                protocol.unpack_ids(message.prompt),
                message.sampling,
                priority=message.priority,
                salt=message.salt,
            )
        except (ValueError, QueueFull) as error:
            full = isinstance(error, QueueFull)
            self._pipe.send(protocol.Refused(message.number, str(error), full))
            return
        for number, request in enumerate(requests, message.number):
            self._requests[number] = request
            self._numbers[request] = number

    def _entry(self, output: Output) -> Entry | None:
        request = output.request
        number = self._numbers.get(request)
        if number is None:
            return None
        if output.finish_reason is not None:
            del self._requests[number], self._numbers[request]
        return Entry(
            number,
            output.tokens,
            output.finish_reason,
            request.num_cached,
            _for_clients(request.error),
            output.logprobs,
            output.prompt_logprobs,
            _prefill(output),
        )


def _prefill(output: Output) -> protocol.Prefill | None:
    request, count = output.request, len(output.tokens)
    if not count or len(request.tokens) != request.num_prompt + count:
        return None
    return protocol.Prefill(
        request.admitted - request.arrival, time.monotonic() - request.admitted, request.num_chunks
    )


def _for_clients(error: str | None) -> str | None:
    """What an exception said is for the log."""
    return error if error in (None, NOT_FINITE) else "the step that it was in failed"


def main(argv: list[str]) -> int:
    def assemble(*args: Any, **options: Any) -> "Assembly":
        from jaxserve.build import assemble as build  # imports jax

        return build(*args, **options)

    return run(socket.socket(fileno=int(argv[1])), assemble)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
