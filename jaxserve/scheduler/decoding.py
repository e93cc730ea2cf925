"""The requests that decode: a step moves hundreds of them on with a few array operations."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.request import Request, SeatProgress
from jaxserve.scheduler.plan import Bools, Decodes, Ints


class _Rows(NamedTuple):
    """The members."""

    requests: list[Request]
    tokens: list[list[int]]
    epochs: list[int]
    seats: Ints
    places: NDArray[np.intp]  # the same, as numpy looks them up fastest
    limits: Ints  # `limit` of their seats
    mask: Bools  # bool[seats of the engine]: which are theirs
    stop_ids: frozenset[int]  # of all of them


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
        self._rows: _Rows | None = None

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
        """Members that need room before they run; the others that need a look are at their end."""
        rows = self._cached()
        needy = self._needy(rows)
        if not needy.any():
            return []
        needy &= self._progress.computed + 1 < self.limit  # the last token is not on its way
        return [rows.requests[i] for i in needy[rows.places].nonzero()[0].tolist()]

    def plan(self, held: Bools | None = None) -> Decodes:
        """A token for every member that is not at its end nor `held`, bool[seats]."""
        rows = self._cached()
        requests, tokens, epochs = rows.requests, rows.tokens, rows.epochs
        seats, places, limits = rows.seats, rows.places, rows.limits
        starts = self._progress.computed[places]
        waits = self._needy(rows)
        if held is not None:
            waits |= held & rows.mask
        if waits.any():
            runs = ~waits[places]
            keep = runs.nonzero()[0].tolist()
            requests, tokens = [requests[i] for i in keep], [tokens[i] for i in keep]
            epochs = [epochs[i] for i in keep]
            seats, places = seats[runs], places[runs]
            starts, limits = starts[runs], limits[runs]
        on_device = self._progress.in_flight[places] > 0
        return Decodes(
            requests,
            tokens,
            epochs,
            seats,
            starts,
            limits,
            on_device,
            self.generation,
            rows.stop_ids,
        )

    def advance(self, decodes: Decodes) -> None:
        """These decodes go into a step."""
        self._count(np.add, self._progress.computed, decodes)
        self._count(np.add, self._progress.in_flight, decodes)

    def landed(self, decodes: Decodes) -> Bools | None:
        """Which rows of a returned step their requests still want, None: all; counts those as
        read."""
        if decodes.generation == self.generation:
            self._count(np.subtract, self._progress.in_flight, decodes)
            return None
        pairs = zip(decodes.requests, decodes.epochs, strict=True)
        held = np.array([request.epoch == epoch for request, epoch in pairs], np.bool_)
        self._progress.in_flight[decodes.seats[held]] -= 1
        return held

    def _count(self, change: np.ufunc, counts: Ints, decodes: Decodes) -> None:
        """Adds one to the counts, i32[seats], of these decodes, or subtracts it."""
        rows = self._rows
        if rows is not None and decodes.seats is rows.seats:  # without looking up each seat
            change(counts, rows.mask, out=counts)
        else:
            counts[decodes.seats] = change(counts[decodes.seats], 1)

    def _needy(self, rows: _Rows) -> Bools:
        """bool[seats]: members that need a look before they run."""
        return (self._progress.computed >= self.room) & rows.mask

    def _cached(self) -> _Rows:
        if self._rows is None:
            requests = list(self._members)
            seats = np.array([request.seat for request in requests], np.int32)
            mask = np.zeros(len(self.room), np.bool_)
            mask[seats] = True
            self._rows = _Rows(
                requests=requests,
                tokens=[request.tokens for request in requests],
                epochs=[request.epoch for request in requests],
                seats=seats,
                places=seats.astype(np.intp),
                limits=self.limit[seats],
                mask=mask,
                stop_ids=frozenset[int]().union(*[request.stop_ids for request in requests]),
            )
        return self._rows
