"""The lines of a job in the order that is best for the engine."""

from typing import TYPE_CHECKING

from jaxserve.config import EngineConfig
from jaxserve.kv.groups import FULL, Windows, row_blocks
from jaxserve.offline.order import Window, rank
from jaxserve.offline.parse import Failed, Ready
from jaxserve.request import SamplingParams

if TYPE_CHECKING:
    from jaxserve.offline.job import Source

MAX_READ = 64  # lines that are let in at a time: the engine does not wait for the reader


class LookAhead:
    """Looks at the lines that are parsed by now and chooses among them.  Lines that cannot run are
    not kept waiting.

    Never waits for a line while it has one.
    """

    def __init__(
        self,
        lines: "Source",
        config: EngineConfig,
        windows: Windows = FULL,
        *,
        in_order: bool = False,
    ) -> None:
        """`config` is resolved; `windows` are those of the model's groups of layers."""
        self._lines = lines
        self._config = config
        self._windows = windows
        self._max_len = config.model.max_len
        self._samples = self._kv_blocks = 0  # of the lines so far
        self._window = None if in_order else Window[Ready](config.cache.block_size)
        self._leading: dict[int, int] = {}  # index of a line -> its place in the window's order

    @property
    def ended(self) -> bool:
        """Every line was taken."""
        return self._lines.ended and not self._window

    def take(self, *, wait: bool, patient: bool = False) -> Ready | Failed | None:
        """The next line; None when none is ready, or when the engine has enough to do and should
        take none yet (only with `patient`).  With `wait` it may block for a moment."""
        window = self._window
        if window is None:
            return self._lines.take(wait=wait)
        for _ in range(MAX_READ):
            if not window.has_room:
                break
            line = self._lines.take(wait=wait and not window)
            if line is None:
                break
            if isinstance(line, Failed):
                return line
            asked, num_prompt = line.task.sampling, len(line.prompt)
            tight = self._is_tight(num_prompt, asked)
            order = rank(num_prompt, asked, self._max_len)
            window.put(line, line.prompt, order, keeps_turn=tight)
        if not window:
            return None
        taken = window.take(patient=patient)
        if taken is None:
            return None
        if taken.leads:
            self._leading[taken.item.place.index] = taken.place
        return taken.item

    def computed(self, line: Ready) -> None:
        """The prompt of a line that was taken has been computed, or never will be.  Idempotent."""
        place = self._leading.pop(line.place.index, None) if self._leading else None
        if place is not None and self._window is not None:
            self._window.computed(place)

    def _is_tight(self, num_prompt: int, sampling: SamplingParams) -> bool:
        """Seats full of lines like this one and those before could need more KV than there is."""
        cache, seats = self._config.cache, self._config.scheduler.max_seqs
        longest = min(num_prompt + sampling.max_tokens, self._max_len)
        blocks = row_blocks(self._windows, longest, cache.block_size, self._config.max_chunk)
        self._samples += sampling.n
        self._kv_blocks += sampling.n * blocks
        return self._kv_blocks * seats > self._samples * cache.num_blocks
