"""The queue of requests without a seat: by policy, with aging, O(log n) whatever its length."""

import collections
import heapq
import itertools

from jaxserve.request import Request, Status
from jaxserve.scheduler import policy

SLACK = 64  # dead entries that are never worth a clean-up


class WaitingQueue:
    """Aging: a request queued `aging_steps` steps ago goes before everybody queued after it.

    Bound: `peek` returns the oldest once it has aged, so from then on nobody queued later is taken
    before it; before that, only steps count.  A request is therefore passed over by later ones in
    at most `aging_steps` steps.

    A request that leaves the queue leaves dead entries behind; they are skipped, and cleaned up
    when they outnumber the living.
    """

    def __init__(self, policy_name: str, aging_steps: int) -> None:
        self._policy = policy_name
        self._aging_steps = aging_steps
        self._heap: list[tuple[tuple[float, ...], int, Request]] = []  # key, epoch, request
        self._oldest: collections.deque[tuple[int, Request]] = collections.deque()  # epoch, request
        self._alive = 0

    def __len__(self) -> int:
        return self._alive

    def push(self, request: Request) -> None:
        """`request.last_step` is the step in which it is queued; never less than an earlier one."""
        heapq.heappush(
            self._heap, (policy.queue_key(self._policy, request), request.epoch, request)
        )
        self._oldest.append((request.epoch, request))
        self._alive += 1

    def peek(self, step: int) -> Request | None:
        """Whose turn it is."""
        if not self._alive:
            return None
        while not _is_alive(*self._oldest[0]):
            self._oldest.popleft()
        oldest = self._oldest[0][1]
        if step - oldest.last_step >= self._aging_steps:
            return oldest
        while not _is_alive(*self._heap[0][1:]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def front(self, most: int) -> list[Request]:
        """Up to `most` requests near the head; all of them where there are no more."""
        near = (request for _, epoch, request in self._heap if _is_alive(epoch, request))
        return list(itertools.islice(near, most))

    def left(self) -> None:
        """One request of the queue is not WAITING any more (or has a new epoch)."""
        self._alive -= 1
        if len(self._heap) > 2 * self._alive + SLACK:
            self._heap = [entry for entry in self._heap if _is_alive(*entry[1:])]
            heapq.heapify(self._heap)
        if len(self._oldest) > 2 * self._alive + SLACK:
            self._oldest = collections.deque(e for e in self._oldest if _is_alive(*e))


def _is_alive(epoch: int, request: Request) -> bool:
    return request.epoch == epoch and request.status is Status.WAITING
