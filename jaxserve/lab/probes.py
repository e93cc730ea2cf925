"""Steps made up to be measured: their shapes, and the batches that a runner takes for them."""

import bisect
from typing import NamedTuple

import numpy as np

from jaxserve.batch.builder import BatchBuilder
from jaxserve.batch.step import Batch
from jaxserve.config import EngineConfig
from jaxserve.kv.groups import FULL, Windows
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler.plan import Chunk, Decodes, Plan

SAMPLING = {  # sampling program -> what a request asks for that needs it
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    "full": SamplingParams(temperature=0.8, logit_bias={1: 0.5}, seed=1),
}


class Probe(NamedTuple):
    """One step.  Rows that sample: all singles, and chunks when `sampler` is not "none" and there
    are no singles."""

    contexts: tuple[int, ...]  # of the rows of one token, the token itself included
    chunks: tuple[tuple[int, int], ...]  # computed tokens and new ones of each
    sampler: str  # none | greedy | random | full

    @property
    def tokens(self) -> int:
        return len(self.contexts) + sum(n for _, n in self.chunks)


class Probes:
    """Makes batches of probes for a runner of `config`, which is resolved.

    `windows`: of the groups of layers, each with a block table of its own.  Every row has KV blocks
    of its own, as in service: rows that shared them would read faster.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, windows: Windows = FULL) -> None:
        seats, size = config.scheduler.max_seqs, config.cache.block_size
        width = -(-config.model.max_len // size)
        self._config = config
        self._tables = np.zeros((len(windows), seats, width), np.int32)
        self._builder = BatchBuilder(config, self._tables, vocab_size, windows)

    def batch(self, probe: Probe) -> Batch:
        self._lay_blocks(probe)
        return self._builder.build(self._plan(probe))

    def _lay_blocks(self, probe: Probe) -> None:
        size = self._config.cache.block_size
        ends = [*probe.contexts, *(start + n for start, n in probe.chunks)]
        last = np.cumsum([-(-end // size) for end in ends])
        for seat, (end, stop) in enumerate(zip(ends, last.tolist(), strict=True)):
            count = -(-end // size)
            blocks = np.arange(stop - count, stop, dtype=np.int32)
            groups = len(self._tables)
            for group, table in enumerate(self._tables):
                own = blocks * groups + group
                table[seat, :count] = own % self._config.cache.num_blocks

    def _plan(self, probe: Probe) -> Plan:
        singles = len(probe.contexts)
        sampling = SAMPLING.get(probe.sampler, SAMPLING["greedy"])
        requests = [
            _request(seat, sampling, end)
            for seat, end in enumerate([1] * singles + [s + n for s, n in probe.chunks])
        ]
        starts = np.array(probe.contexts, np.int32) - 1
        on_device = np.ones(singles, np.bool_)
        seats = np.arange(singles, dtype=np.int32)
        decodes = Decodes(
            requests[:singles],
            [request.tokens for request in requests[:singles]],
            [0] * singles,
            seats,
            starts,
            starts + 2,
            on_device,
            0,
            frozenset(),
        )
        samples = probe.sampler != "none" and not singles
        chunks = [
            Chunk(request, start, n, 0, samples)
            for request, (start, n) in zip(requests[singles:], probe.chunks, strict=True)
        ]
        sizes = self._config.buckets.tokens
        return Plan(
            decodes=decodes,
            chunks=chunks,
            num_singles=singles + sum(n == 1 for _, n in probe.chunks),
            num_tokens=probe.tokens,
            bucket=sizes[bisect.bisect_left(sizes, probe.tokens)],
            recomputed_tokens=0,
            admitted=tuple(requests),
            preempted=(),
            hit_tokens=0,
            resume_hit_tokens=0,
            unused=None,
            last_chunk=0,
            cut_tokens=0,
        )


def _request(seat: int, sampling: SamplingParams, known: int) -> Request:
    request = Request(
        number=seat, tokens=[7] * known, num_prompt=known, sampling=sampling, max_total=1 << 20
    )
    request.seat = seat
    return request
