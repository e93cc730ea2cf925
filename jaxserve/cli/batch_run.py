"""The part of `jaxserve batch` between open files and a report: engines at work."""

import argparse
import sys
import time
from typing import TYPE_CHECKING

from jaxserve.cli import batch_ray, common, recording
from jaxserve.offline import shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxserve.config import EngineConfig
    from jaxserve.offline.files import JobFiles
    from jaxserve.offline.inputs import Input
    from jaxserve.offline.job import Sink
    from jaxserve.offline.jsonl import Line
    from jaxserve.offline.progress import Progress
    from jaxserve.offline.status import StatusFile
    from jaxserve.offline.stop import StopSignals
    from jaxserve.request import SamplingParams

LEARNED = "model.dtype"  # what `auto` is on this machine, only a started engine says
REMOTE_PART = 64 << 20  # bytes of a part where the storage cannot append


class Work:
    """What is to be run."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: "EngineConfig",
        defaults: "SamplingParams",
        files: "JobFiles",
        source: "Input",
    ) -> None:
        from jaxserve.offline.job import Outcome as JobOutcome

        self.args, self.config, self.defaults = args, config, defaults
        self.files, self.source = files, source
        self._mine = shard.mask(args.shard, files.scan.num_lines)
        finished = files.finished & self._mine
        failed = int((files.outcomes[finished] != JobOutcome.DONE).sum())
        self.num_lines = int(self._mine.sum())
        self.num_before = int(finished.sum()) - failed, failed
        self.num_left = self.num_lines - int(finished.sum())
        self.num_retried = files.num_retried

    def lines(self) -> "Iterator[Line]":
        """Those that are not finished."""
        return self.source.lines(self.files.finished | ~self._mine)

    def status_file(self) -> "StatusFile":
        """Begins it anew."""
        from jaxserve.offline.status import StatusFile

        facts = {"model": self.config.model.name, "shard": shard.name(self.args.shard)}
        before, folder = sum(self.num_before), self.files.layout.folder
        return StatusFile(self.files.storage, folder, self.num_lines, before, **facts)


class Outcome:
    """How a run of the engine ended."""

    def __init__(self) -> None:
        from jaxserve.offline.job import Totals
        from jaxserve.offline.report import EngineUse

        self.code: int | None = None  # the exit code when something went wrong
        self.seconds = 0.0
        self.totals = Totals()
        self.use = EngineUse()
        self.redone = 0  # lines of lost workers


def run_engine(work: Work, stop: "StopSignals") -> Outcome:
    """Runs what is not finished."""
    from jaxserve.offline.job import JobFailed
    from jaxserve.offline.output import Syncing
    from jaxserve.offline.progress import Several, make_progress

    args, files, outcome = work.args, work.files, Outcome()
    roll_bytes = args.roll_size
    if roll_bytes is None and not files.storage.appends:
        roll_bytes = REMOTE_PART
    runner = batch_ray.RayRunner(work) if args.ray else _LocalRunner(work)
    begun = time.monotonic()
    status = None
    try:
        if runner.dtype is not None:
            files.learn({LEARNED: runner.dtype})
        output = files.open_output(Syncing(args.sync_interval, roll_bytes))
        status = work.status_file()
        progress = Several([make_progress(work.num_left, sys.stderr), status])
        try:
            stop.begin()
            runner.run(output, progress, stop)
        finally:
            progress.close()
            output.close()
    except OSError as error:  # a full disk, a share that is gone
        common.note(f"error: {common.one_line(error)}; what is done is kept, run it again to go on")
        outcome.code = common.PARKED
    except JobFailed as error:
        common.note(f"error: {common.one_line(error)}")
        outcome.code = common.SOME_FAILED
    finally:
        outcome.seconds = time.monotonic() - begun
        job, outcome.redone = runner.job, runner.redone
        outcome.totals, outcome.use = job.totals, job.use
        if status is not None:
            left = work.num_left - outcome.totals.done - outcome.totals.failed
            ended = "parked" if left else "done"
            status.update(job.snapshot(), last=True)
            status.end("failed" if outcome.code == common.SOME_FAILED else ended)
        runner.close()
    return outcome


class _LocalRunner:
    """One engine in this process."""

    redone = 0

    def __init__(self, work: Work) -> None:
        from jaxserve.offline.job import Job, JobOptions
        from jaxserve.offline.parse import Parser, encoder

        args = work.args
        self._assembly = common.assemble(work.config, args)
        tokenizer, config = self._assembly.tokenizer, self._assembly.config
        self.dtype = config.model.dtype
        self._parse = Parser(work.defaults, encoder(tokenizer, config, any_model=args.any_model))
        self._lines = work.lines
        options = JobOptions(args.token_ids, in_order=args.in_order, max_errors=args.max_errors)
        self.job = Job(self._assembly, options)
        self.close = self._assembly.close
        self._recording = lambda: recording.during(args, self._assembly)

    def run(self, sink: "Sink", progress: "Progress", stop: "StopSignals") -> None:
        from jaxserve.offline.reader import Reader

        source = Reader(self._lines(), self._parse)
        try:
            with self._recording():
                self.job.run(source, sink, progress, stop)
        finally:
            source.stop()
