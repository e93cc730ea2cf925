"""The requests that decode: a step moves hundreds of them on with a few array operations."""

import numpy as np

from jaxserve.request import Request, SeatProgress
from jaxserve.scheduler.plan import Bools, Decodes, Ints


class Decoding:
    """Members have exactly one token to compute: the last one they know or that is on its way.

    `room[seat]`: from this position on a member needs a look (a block, or it is at its end).
    `limit[seat]`: tokens at which it ends with reason "length".
    """

    def __init__(self, progress: SeatProgress) -> None:
        seats = len(progress.computed)
        self.room = np.zeros(seats, np.int32)
        self.limit = np.zeros(seats, np.int32)
        self.generation = 0  # grows whenever a request leaves its seat
        self._progress = progress
        self._members: dict[Request, None] = {}  # in the order in which they began to decode
        self._rows: tuple[list[Request], list[int], Ints] | None = None

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def join(self, request: Request, room: int) -> None:
        self._members[request] = None
        self._rows = None
        self.limit[request.seat] = request.max_total
        self.make_room(request, room)

    def make_room(self, request: Request, room: int) -> None:
        """The blocks of `request` now hold `room` tokens."""
        self.room[request.seat] = min(room, request.max_total - 1)

    def leave(self, request: Request) -> None:
        self.generation += 1
        if request in self._members:
            del self._members[request]
            self._rows = None

    def due(self) -> list[Request]:
        """Members that need a look before this step."""
        requests, _, seats = self._cached()
        needy = self._progress.computed[seats] >= self.room[seats]
        return [requests[i] for i in needy.nonzero()[0].tolist()] if needy.any() else []

    def plan(self, held: Bools | None = None) -> Decodes:
        """A token for every member that is not at its end nor `held`, bool[seats]."""
        requests, epochs, seats = self._cached()
        starts = self._progress.computed[seats]
        runs = starts < self.room[seats]
        if held is not None:
            runs &= ~held[seats]
        if not runs.all():
            keep = runs.nonzero()[0].tolist()
            requests, epochs = [requests[i] for i in keep], [epochs[i] for i in keep]
            seats, starts = seats[runs], starts[runs]
        on_device = self._progress.in_flight[seats] > 0
        return Decodes(requests, epochs, seats, starts, on_device, self.generation)

    def advance(self, decodes: Decodes) -> None:
        """These decodes go into a step."""
        self._progress.computed[decodes.seats] += 1
        self._progress.in_flight[decodes.seats] += 1

    def landed(self, decodes: Decodes) -> Bools:
        """Which rows of a returned step their requests still want; counts those as read."""
        held = np.ones(len(decodes.requests), np.bool_)
        if decodes.generation != self.generation:
            pairs = zip(decodes.requests, decodes.epochs, strict=True)
            held[:] = [request.epoch == epoch for request, epoch in pairs]
        self._progress.in_flight[decodes.seats[held]] -= 1
        return held

    def _cached(self) -> tuple[list[Request], list[int], Ints]:
        if self._rows is None:
            requests = list(self._members)
            seats = np.array([request.seat for request in requests], np.int32)
            self._rows = requests, [request.epoch for request in requests], seats
        return self._rows
