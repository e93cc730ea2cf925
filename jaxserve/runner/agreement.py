"""Several processes, one step: every process must hand its devices the same batch.

Each runs its own scheduler over the same requests.  A digest of all batches so far is compared now
and then; a difference is an error, where without it chips would wait for each other, or answer
nonsense.
"""

import hashlib
from collections.abc import Callable

import jax
import numpy as np

from jaxserve.batch.step import Batch

FIRST = 8  # steps that are all compared; most mistakes show at once
EVERY = 64  # then one in so many; the digest has every step in it
Exchange = Callable[[np.ndarray], np.ndarray]  # u32[n] of this process -> u32[processes, n]


class DisagreementError(RuntimeError):
    """The processes of one mesh have scheduled different steps; none may go on."""


class Agreement:
    """The digest of this process's batches, and when it is compared with the others'."""

    def __init__(self, exchange: Exchange, process: int):
        self._exchange = exchange
        self._process = process
        self._digest = hashlib.blake2b(digest_size=16)
        self._steps = 0
        self.compare()  # compiles the exchange, before serving

    def add(self, batch: Batch) -> None:
        """One more step; raises DisagreementError when the processes differ in any step so far."""
        for part in _parts(batch):
            self._digest.update(part)
        self._steps += 1
        if self._steps <= FIRST or self._steps % EVERY == 0:
            self.compare()

    def compare(self) -> None:
        """Raises DisagreementError unless every process has seen the same steps."""
        own = np.frombuffer(self._digest.digest(), np.uint32)
        all_of_them = np.asarray(self._exchange(own))
        others = [i for i, row in enumerate(all_of_them) if not np.array_equal(row, own)]
        if others:
            raise DisagreementError(
                f"process {self._process} and process(es) {', '.join(map(str, others))} have "
                f"different batches within the last {EVERY} steps before step {self._steps}; every "
                f"process must be given the same requests in the same order, and the same config"
            )


def of_processes() -> Agreement | None:
    """None where there is only one process."""
    if jax.process_count() == 1:
        return None
    from jax.experimental import multihost_utils

    return Agreement(multihost_utils.process_allgather, jax.process_index())


def _parts(batch: Batch) -> list[bytes]:
    """Everything of a batch that reaches the devices, with what tells its fields apart."""
    samples = batch.samples if batch.samples is not None else ()
    arrays = [batch.packed, *samples, *(array for score in batch.scores for array in score)]
    arrays += [reset.tokens for reset in batch.resets]
    shape = (batch.sampler, batch.logprobs, len(batch.scores))
    seats = [(reset.seat, reset.num_prompt) for reset in batch.resets]
    sizes = [array.shape for array in arrays]
    return [repr((shape, seats, sizes)).encode(), *(array.tobytes() for array in arrays)]
