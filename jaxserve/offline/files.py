"""All files of one job: opened, compared with what the journal remembers, and locked.

The order is the point.  Whatever can be refused is refused before anything is changed.
"""

import dataclasses
import json
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from jaxserve.offline import output
from jaxserve.offline.errors import InputError
from jaxserve.offline.fingerprint import changes
from jaxserve.offline.inputs import Input, Scan
from jaxserve.offline.job import Outcome
from jaxserve.offline.lock import Lock
from jaxserve.offline.output import Damaged, Layout, Lines, Output, Part, Syncing
from jaxserve.offline.storage import Storage, read_all

FORMAT = 1
_SETTINGS = "settings.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for when journal and job may not agree."""

    restart: bool = False  # begin anew; what is there is set aside
    accept_changes: bool = False  # go on although settings or input changed
    retry_errors: bool = False  # redo the lines that failed for a passing reason


class JobFiles:
    """Input, output and journal of one job; nobody else works on them until `close`."""

    def __init__(
        self,
        storage: Storage,
        layout: Layout,
        lock: Callable[[Storage, str], Lock],
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Makes the journal's folder, or finds it.  Raises InputError when another process holds
        the lock, OSError when the folder cannot be made."""
        self.storage = storage
        self.layout = layout
        self._note = note
        storage.make_folder(layout.folder)
        self.lock = lock(storage, layout.folder)
        self._fresh = storage.size(f"{layout.folder}/{_SETTINGS}") is None
        self._parts: list[Part] = []
        self._keep: Callable[[np.ndarray], np.ndarray] | None = None  # lines that a rewrite keeps
        self._settings: dict[str, Any] = {}
        self._wishes = Wishes()
        self._moves: list[tuple[str, str]] = []
        self._replaced: tuple[str, str] | None = None  # standard input: the new copy, the old one
        self._given: Input
        self.scan: Scan
        self.finished: np.ndarray  # bool[N]
        self.outcomes: np.ndarray  # u8[N], for finished lines
        self.num_retried = 0  # lines that failed before and are to be redone

    def prepare(
        self,
        given: Input,
        settings: dict[str, Any],
        wishes: Wishes,
        later: Collection[str] = (),
    ) -> None:
        """Looks through the input and finds out what is done.  `later`: settings that only a
        started engine knows (`learn`).

        Raises InputError when the job cannot go on like this: nothing of it was changed then.
        """
        self._given = given
        self._wishes = wishes
        self.scan = given.scan()
        count = self.scan.num_lines
        described = {"input": self.scan.digest, "lines": count, "rolled": self.layout.rolled}
        self._settings = {**settings, **described}
        self.finished = np.zeros(count, bool)
        self.outcomes = np.zeros(count, np.uint8)
        if wishes.restart:
            self._plan_restart()
        elif self._fresh:
            self._refuse_foreign_output()
        else:
            self._compare(later)
            self._resume(wishes)

    def begun_with(self) -> dict[str, Any] | None:
        """The settings that the journal remembers; None of a job that never began.  Raises
        InputError, OSError."""
        if self._fresh:
            return None
        path = f"{self.layout.folder}/{_SETTINGS}"
        try:
            content = json.loads(read_all(self.storage, path))
            if content["format"] != FORMAT:
                raise ValueError(f"it has format {content['format']}, this version knows {FORMAT}")
            return dict(content["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} cannot be used ({error}); --restart begins anew") from error

    def learn(self, settings: dict[str, Any]) -> None:
        """What a started engine says of settings that `prepare` left open.  Raises InputError as
        `prepare` does, and changes nothing."""
        known, self._settings = self._settings, {**self._settings, **settings}
        if not (self._fresh or self._wishes.restart):
            self._accept(changes(known, self._settings))

    def replace(self, side: str, path: str) -> None:
        """`side`, the file that `prepare` is given, takes the place of `path` in `settle`; in
        `close` it is dropped when it came to nothing."""
        self._replaced = (side, path)

    def settle(self) -> None:
        """Does what was planned: sets aside, rewrites, remembers accepted settings.  Touches
        nothing when there is nothing to do.  Raises OSError."""
        for source, target in self._moves:
            self.storage.rename(source, target)
        if self._keep is not None:
            output.rewrite(self.storage, self.layout, self._parts, self._keep)
            self._parts = [part.trimmed() for part in output.load(self.storage, self.layout)]
        if self._replaced is not None:
            side, path = self._replaced
            self.storage.rename(side, path)
            self._given.files = [file._replace(path=path) for file in self._given.files]
            self._replaced = None
        data = json.dumps({"format": FORMAT, "settings": self._settings}, indent=1).encode()
        path = f"{self.layout.folder}/{_SETTINGS}"
        if self._fresh or self._moves or read_all(self.storage, path) != data:
            self.storage.put(path, data)
        self._moves, self._keep, self._fresh = [], None, False

    def open_output(self, syncing: Syncing) -> Output:
        """From here on files change.  Raises OSError."""
        self.lock.sign()
        self.settle()
        lines = Lines(self.scan.identities, self.finished)
        return Output(self.storage, self.layout, self._parts, lines, syncing, self.lock.renew)

    def close(self) -> None:
        """A job that never began leaves nothing behind.  Idempotent."""
        if self._fresh:
            self._fresh = False
            for name in self.storage.names(self.layout.folder):
                self.storage.remove(f"{self.layout.folder}/{name}")
            self.storage.remove_folder(self.layout.folder)
        elif self._replaced is not None:
            self.storage.remove(self._replaced[0])
        self._replaced = None
        self.lock.release()

    def _refuse_foreign_output(self) -> None:
        for number in (1, 2):
            path = self.layout.part(number)
            if self.storage.size(path) is not None:
                raise InputError(
                    f"--output {path} exists, but no journal of it; name another file, or add "
                    f"--restart to set it aside and begin anew"
                )

    def _compare(self, later: Collection[str]) -> None:
        before = self.begun_with() or {}
        self._settings |= {key: before[key] for key in later if key in before}
        differing = changes(before, self._settings)
        fixed = [change for change in differing if change.startswith("rolled")]
        if fixed:
            was, do = ("with", "give it again")
            if self.layout.rolled:
                was, do = ("without", "leave it out")
            raise InputError(
                f"{self.layout.output} was begun {was} --roll-size; {do}, or add --restart to "
                f"begin anew"
            )
        self._accept(differing)

    def _accept(self, differing: list[str]) -> None:
        if differing and not self._wishes.accept_changes:
            raise InputError(
                f"this is not the job that {self.layout.output} was begun with: "
                f"{'; '.join(differing)}. Add --accept-changes to go on all the same, or --restart "
                f"to begin anew"
            )
        for change in differing:
            self._note(f"accepted: {change}")

    def _resume(self, wishes: Wishes) -> None:
        output.finish_rewrite(self.storage, self.layout)
        self._parts = output.load(self.storage, self.layout)
        if not self._parts and self.storage.appends:
            self._refuse_foreign_output()  # a journal is there before the results that it is of
        rewrite = False
        try:
            output.refuse_damage(self._parts, self.layout)
        except Damaged as error:
            if not wishes.accept_changes:
                raise InputError(
                    f"{error}. Add --accept-changes to redo what is missing, or --restart to begin "
                    f"anew"
                ) from error
            self._note(f"accepted: {error}")
            rewrite = True
        if not rewrite:
            self._parts = [part.trimmed() for part in self._parts]
        lines = _all_lines(self._parts)
        index = _find(self.scan.identities, lines["identity"])
        lost = int(np.count_nonzero(index < 0))
        if lost:
            self._note(f"{lost} results are of lines that the input has no more")
        lines, index = lines[index >= 0], index[index >= 0]
        self._refuse_moved_lines(lines, index)
        if wishes.retry_errors:
            wanted = lines["outcome"] != Outcome.RETRYABLE
            rewrite = rewrite or not wanted.all()
            self.num_retried = int(np.count_nonzero(~wanted))
            lines, index = lines[wanted], index[wanted]
        self.finished[index] = True
        self.outcomes[index] = lines["outcome"]
        if rewrite or np.count_nonzero(self.finished) < len(index):
            self._keep = _first_of_each(drop_retryable=wishes.retry_errors)

    def _refuse_moved_lines(self, lines: np.ndarray, index: np.ndarray) -> None:
        """A result without a custom_id is known to its reader by its line number alone."""
        unnamed = np.zeros(self.scan.num_lines, bool)
        unnamed[self.scan.unnamed] = True
        numbers = self.scan.numbers[index]
        moved = np.flatnonzero(unnamed[index] & (numbers != lines["number"]))
        if len(moved):
            was, now = lines["number"][moved[0]], numbers[moved[0]]
            raise InputError(
                f"line {now} was line {was} when it was run and has no custom_id to know it by; "
                f"give lines a custom_id, or add --restart to begin anew"
            )

    def _plan_restart(self) -> None:
        layout, storage = self.layout, self.storage
        names = storage.names(layout.folder)
        records = [name for name in names if name.startswith(("records-", "rewrite-", _SETTINGS))]
        files = [layout.part(number) for number in range(1, len(records) + 2)]
        if not layout.rolled:
            files = files[:1]
        found = [path for path in files if storage.size(path) is not None]
        number = 1
        while any(name.startswith(f"old-{number}.") for name in names) or any(
            storage.size(f"{path}.old-{number}") is not None for path in found
        ):
            number += 1
        self._moves = [(path, f"{path}.old-{number}") for path in found]
        self._moves += [
            (f"{layout.folder}/{name}", f"{layout.folder}/old-{number}.{name}") for name in records
        ]
        for path in found:
            self._note(f"{path} is set aside as {path}.old-{number}")


def _all_lines(parts: list[Part]) -> np.ndarray:
    arrays = [part.lines for part in parts]
    return np.concatenate(arrays) if arrays else output.no_lines()


def _first_of_each(*, drop_retryable: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Keeps the first result of every line, through all parts."""
    seen: set[bytes] = set()

    def keep(lines: np.ndarray) -> np.ndarray:
        mask = np.ones(len(lines), bool)
        if drop_retryable:
            mask = lines["outcome"] != Outcome.RETRYABLE
        for at in np.flatnonzero(mask):
            key = lines["identity"][at].tobytes()
            mask[at] = key not in seen
            seen.add(key)
        return mask

    return keep


def _find(identities: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Index of each wanted identity (u64[M, 2]) among `identities` (u8[N, 16]); -1: none."""
    pairs = identities.view("<u8").reshape(-1, 2)
    if not len(pairs) or not len(wanted):
        return np.full(len(wanted), -1, np.int64)
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    high = pairs[order, 0]
    at = np.searchsorted(high, wanted[:, 0])
    result = np.full(len(wanted), -1, np.int64)
    for _ in range(4):  # equal first halves lie side by side; more than two of them do not happen
        inside = np.minimum(at, len(order) - 1)
        hit = (pairs[order[inside]] == wanted).all(1) & (at < len(order))
        result[hit] = order[inside][hit]
        at = at + 1
    return result
