"""What a Driver needs of an engine, while the engine is another process."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from jaxserve.config import EngineConfig
from jaxserve.request import Output, Request, SamplingParams, Status
from jaxserve.scheduler import admission
from jaxserve.scheduler.admission import ModelLimits, QueueFull
from jaxserve.server import protocol
from jaxserve.server.protocol import Add, Finish, Refused, Stepped, ToEngine


class Numbers:
    """Numbers of requests: none is given twice, from whatever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0

    def take(self, count: int) -> int:
        """The first of `count` numbers."""
        with self._lock:
            first = self._next
            self._next += count
            return first


class RemoteEngine:
    """Refuses what the engine would refuse, before anything is sent.

    `finish_reason` "error" with what `take` and `fail_all` are told is the end of a request that
    the engine lost.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: ModelLimits,
        send: Callable[[ToEngine], None],
        numbers: Numbers,
    ) -> None:
        self.config = config
        self.limits = limits
        self.send = send
        self._numbers = numbers
        self._requests: dict[int, Request] = {}
        self._queued: set[Request] = set()  # no output yet
        self._outputs: deque[Output] = deque()
        self.num_queued_tokens = 0  # of their prompts

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._outputs)

    @property
    def has_outputs(self) -> bool:
        """`step` would bring something."""
        return bool(self._outputs)

    @property
    def num_requests(self) -> int:
        """Samples in flight."""
        return len(self._requests)

    @property
    def num_queued(self) -> int:
        """Samples in flight without a first token."""
        return len(self._queued)

    def open_numbers(self) -> list[int]:
        """Of the samples in flight."""
        return list(self._requests)

    def check_queue(self, samples: int, tokens: int) -> None:
        """Raises QueueFull when so many more have no place.  An empty queue takes anything that
        may run at all, so that nothing is refused for ever."""
        limits = self.config.server
        if self.num_queued + samples > limits.max_queue:
            raise QueueFull(f"{self.num_queued} requests wait; at most {limits.max_queue} may")
        if self._queued and self.num_queued_tokens + tokens > limits.max_queue_tokens:
            raise QueueFull(
                f"prompts of {self.num_queued_tokens} tokens wait; at most "
                f"{limits.max_queue_tokens} may"
            )

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
    ) -> list[Request]:
        """Sends the `n` samples of one prompt.  Raises as `Engine.add` does."""
        tokens = admission.check(self.config, self.limits, prompt, sampling)
        admission.check_labels(priority, salt)
        if sampling.n > self.config.server.max_queue:
            raise ValueError(f"n={sampling.n} is more than server.max_queue allows at any time")
        self.check_queue(sampling.n, sampling.n * len(tokens))
        first = self._numbers.take(sampling.n)
        requests = [
            admission.new_request(
                self.config, self.limits, tokens, sampling, number=first + sample, sample=sample
            )
            for sample in range(sampling.n)
        ]
        self.send(Add(first, protocol.pack_ids(tokens), sampling, priority, salt))
        for request in requests:
            self._requests[request.number] = request
            self._queued.add(request)
            self.num_queued_tokens += request.num_prompt
        return requests

    def finish(self, request: Request, reason: str = "stop") -> None:
        """Ends a request from outside; no output follows.  Idempotent."""
        if self._requests.pop(request.number, None) is not None:
            self._end(request, reason)
            self.send(Finish([request.number], reason))

    def step(self) -> list[Output]:
        """What has arrived since the last call; never waits."""
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def take(self, message: Stepped | Refused) -> None:
        """A message of the engine."""
        if isinstance(message, Refused):
            self._refused(message)
            return
        for entry in message.entries:
            request = self._requests.get(entry.number)
            if request is None:  # ended here meanwhile
                continue
            request.num_cached = entry.num_cached
            if entry.finish_reason is not None:
                del self._requests[entry.number]
                self._end(request, entry.finish_reason, entry.error)
            elif entry.tokens:
                self._unqueue(request)
            self._outputs.append(
                Output(
                    request,
                    entry.tokens,
                    entry.logprobs,
                    entry.prompt_logprobs,
                    entry.finish_reason,
                )
            )

    def fail_all(self, error: str) -> None:
        """Nothing in flight will ever get a result."""
        for request in list(self._requests.values()):
            self._fail(request, error)

    def _refused(self, message: Refused) -> None:
        request = self._requests.get(message.number)
        samples = 0 if request is None else request.sampling.n
        for number in range(message.number, message.number + samples):
            request = self._requests.get(number)
            if request is not None:
                self._fail(request, f"the engine refused it: {message.error}")

    def _fail(self, request: Request, error: str) -> None:
        del self._requests[request.number]
        self._end(request, "error", error)
        self._outputs.append(Output(request, (), finish_reason="error"))

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        self._unqueue(request)
        request.status, request.finish_reason, request.error = Status.FINISHED, reason, error

    def _unqueue(self, request: Request) -> None:
        if request in self._queued:
            self._queued.remove(request)
            self.num_queued_tokens -= request.num_prompt
