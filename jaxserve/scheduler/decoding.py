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
        self._mask: Bools = np.zeros(seats, np.bool_)  # seats of the members in `_rows`

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
        needy = self._needy()
        return [requests[i] for i in needy[seats].nonzero()[0].tolist()] if needy.any() else []

    def plan(self, held: Bools | None = None) -> Decodes:
        """A token for every member that is not at its end nor `held`, bool[seats]."""
        requests, epochs, seats = self._cached()
        starts = self._progress.computed[seats]
        waits = self._needy()
        if held is not None:
            waits |= held & self._mask
        if waits.any():
            runs = ~waits[seats]
            keep = runs.nonzero()[0].tolist()
            requests, epochs = [requests[i] for i in keep], [epochs[i] for i in keep]
            seats, starts = seats[runs], starts[runs]
        on_device = self._progress.in_flight[seats] > 0
        return Decodes(requests, epochs, seats, starts, on_device, self.generation)

    def advance(self, decodes: Decodes) -> None:
        """These decodes go into a step."""
        progress, every = self._progress, self._rows
        if every is not None and decodes.seats is every[2]:  # without looking up each seat
            progress.computed += self._mask
            progress.in_flight += self._mask
        else:
            progress.computed[decodes.seats] += 1
            progress.in_flight[decodes.seats] += 1

    def landed(self, decodes: Decodes) -> Bools | None:
        """Which rows of a returned step their requests still want, None: all; counts those as
        read."""
        if decodes.generation == self.generation:
            self._progress.in_flight[decodes.seats] -= 1
            return None
        pairs = zip(decodes.requests, decodes.epochs, strict=True)
        held = np.array([request.epoch == epoch for request, epoch in pairs], np.bool_)
        self._progress.in_flight[decodes.seats[held]] -= 1
        return held

    def _needy(self) -> Bools:
        """bool[seats]: members that need a look before they run."""
        return (self._progress.computed >= self.room) & self._mask

    def _cached(self) -> tuple[list[Request], list[int], Ints]:
        if self._rows is None:
            requests = list(self._members)
            seats = np.array([request.seat for request in requests], np.int32)
            self._rows = requests, [request.epoch for request in requests], seats
            self._mask = np.zeros(len(self.room), np.bool_)
            self._mask[seats] = True
        return self._rows
