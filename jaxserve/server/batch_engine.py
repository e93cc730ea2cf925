"""The engine as a batch job sees it, from a thread of its own."""

import threading
from collections.abc import Callable, Sequence

from jaxserve.config import EngineConfig
from jaxserve.metrics import Totals
from jaxserve.request import Output, Request, SamplingParams
from jaxserve.scheduler.admission import ModelLimits
from jaxserve.server.protocol import Gauges, Refused, Stepped, ToEngine
from jaxserve.server.remote_engine import Numbers, RemoteEngine

PRIORITY = 1000  # lines go behind requests where the scheduler's policy is priority
_WAIT_SECONDS = 0.1


class EngineLost(RuntimeError):
    """The engine process is gone; what was in flight has no result."""


class _Pool:
    """The part of the KV pool's figures that a job shows."""

    num_used = 0
    num_blocks = 1


class BatchEngine:
    """What `Driver` and `Job` need of an engine.  `take` and `fail_all` are called by the event
    loop, everything else by the job's thread."""

    def __init__(
        self,
        config: EngineConfig,
        limits: ModelLimits,
        send: Callable[[ToEngine], None],
        numbers: Numbers,
    ) -> None:
        """`send` may be called from any thread."""
        self._remote = RemoteEngine(config, limits, send, numbers)
        self.limits = limits
        self._changed = threading.Condition()
        self._lost: str | None = None
        self.stats = Totals()  # of the whole engine they would be; a job of a server reports none
        self.kv = _Pool()

    @property
    def has_work(self) -> bool:
        return self._remote.has_work

    @property
    def num_waiting(self) -> int:
        return self._remote.num_queued

    @property
    def num_running(self) -> int:
        return self._remote.num_requests - self._remote.num_queued

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
    ) -> list[Request]:
        """As `Engine.add`.  Raises EngineLost."""
        with self._changed:
            self._check()
            priority = min(priority + PRIORITY, 2**31)
            return self._remote.add(prompt, sampling, priority=priority, salt=salt)

    def finish(self, request: Request, reason: str = "stop") -> None:
        with self._changed:
            self._remote.finish(request, reason)

    def step(self) -> list[Output]:
        """What has arrived; waits for it a moment.  Raises EngineLost."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._remote.has_outputs or self._lost is not None, _WAIT_SECONDS
            )
            self._check()
            return self._remote.step()

    def take(self, message: Stepped | Refused) -> None:
        with self._changed:
            if isinstance(message, Stepped):
                self._show(message.gauges)
            self._remote.take(message)
            if self._remote.has_outputs:
                self._changed.notify_all()

    def fail_all(self, error: str) -> None:
        """The engine is gone."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()

    def _check(self) -> None:
        if self._lost is not None:
            raise EngineLost(self._lost)

    def _show(self, gauges: Gauges) -> None:
        self.kv.num_used, self.kv.num_blocks = gauges.kv_used, max(1, gauges.kv_blocks)
