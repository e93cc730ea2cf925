"""Runs batches one after the other, in a thread, through the offline runner and its journal."""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from jaxserve.config import EngineConfig
from jaxserve.offline import lock, places
from jaxserve.offline.errors import InputError
from jaxserve.offline.files import JobFiles, Wishes
from jaxserve.offline.fingerprint import changes
from jaxserve.offline.inputs import Input
from jaxserve.offline.job import Job, JobFailed, JobOptions, Outcome
from jaxserve.offline.output import Syncing
from jaxserve.offline.parse import Parser
from jaxserve.offline.progress import Snapshot
from jaxserve.offline.reader import Reader
from jaxserve.openai_api.bodies import Task
from jaxserve.openai_api.errors import RequestError
from jaxserve.request import SamplingParams
from jaxserve.server import batch_results, protocol
from jaxserve.server.batch_engine import BatchEngine, EngineLost
from jaxserve.server.batch_settings import BatchSettings
from jaxserve.server.batches import ENDPOINTS, BatchRecord, BatchStore, Counts
from jaxserve.server.errors import ApiError
from jaxserve.server.file_store import FileStore
from jaxserve.server.service import Service

SYNC_SECONDS = 5.0
SHARE_OF_SEATS = 0.75  # that a batch may take: requests find a free one
_POLL_SECONDS = 0.2
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Assembly:
    """What a Job needs of an assembled engine."""

    engine: BatchEngine
    tokenizer: Any
    config: EngineConfig


class _Stop:
    """The server ends, or the batch is cancelled: nothing is waited for, the journal holds."""

    def __init__(self, server_ends: threading.Event, batch: BatchRecord) -> None:
        self._server_ends = server_ends
        self._batch = batch

    @property
    def asked(self) -> bool:
        return self._server_ends.is_set() or self._batch.status == "cancelling"

    expired = asked


class _Progress:
    """Counts for those who poll."""

    def __init__(self, batch: BatchRecord, total: int, done: int, failed: int) -> None:
        self._batch, self._total, self._before = batch, total, (done, failed)

    def update(self, now: Snapshot) -> None:
        done, failed = self._before
        self._batch.request_counts = Counts(self._total, done + now.done, failed + now.failed)

    def close(self) -> None: ...


class BatchRunner:
    """Takes the oldest batch that has not ended, until closed."""

    def __init__(self, service: Service, files: FileStore, batches: BatchStore) -> None:
        self._service = service
        self._settings = BatchSettings(service)
        self._files = files
        self._batches = batches
        self._ends = threading.Event()
        self._wake = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="jaxserve-batches", daemon=True)

    def start(self) -> None:
        """In the event loop of the server."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    async def close(self) -> None:
        """What is in flight is given up: it is run again after the next start."""
        self._ends.set()
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        while not self._ends.is_set():
            self._wake.clear()
            batch = self._batches.next()
            if batch is None or not (self._service.is_ready or batch.status == "cancelling"):
                self._wake.wait(None if batch is None else _POLL_SECONDS)
                continue
            try:
                self._run(batch)
            except EngineLost as error:
                _log.warning("batch %s waits for the engine: %s", batch.id, error)
                self._ends.wait(_POLL_SECONDS)
            except OSError as error:  # a full disk: what is done holds
                _log.error("batch %s waits: %s", batch.id, error)
                self._ends.wait(SYNC_SECONDS)
            except Exception:
                _log.exception("batch %s failed", batch.id)
                self._fail(batch, "internal_error", "the server failed; its log says why")

    def _run(self, batch: BatchRecord) -> None:
        """Raises EngineLost and OSError when it is to be tried again later."""
        record = self._files.get(batch.input_file_id)
        if record is None:
            self._fail(batch, "no_such_file", "the input file was deleted")
            return
        place = self._batches.place(batch)
        output = str(place / "results.jsonl")
        given = places.find_inputs([str(self._files.path(record))])
        storage, layout = places.find_output(output, given, rolled=False)
        job_files = JobFiles(storage, layout, lock.take)
        try:
            try:
                now = self._settings.of(batch.endpoint, self._defaults(batch))
                before = job_files.begun_with()
                begun = now if before is None else before
                job_files.prepare(source := Input(given), begun, Wishes())
            except InputError as error:
                self._fail(batch, "invalid_file", str(error).replace(str(given[0].path), "input"))
                return
            if batch.status == "validating":
                self._batches.move(batch, "in_progress")
            differing = changes(begun, {**begun, **now})
            if job_files.finished.all():
                job_files.settle()
            elif differing and batch.status != "cancelling":
                batch.request_counts = Counts(job_files.scan.num_lines)
                job_files.open_output(Syncing(SYNC_SECONDS)).close()  # cuts what does not hold
                self._refuse(batch, Path(output), differing)
                return
            else:
                self._run_job(batch, job_files, source)
        finally:
            job_files.close()
        if self._ends.is_set() and batch.status != "cancelling":
            return
        self._finish(batch, Path(output))

    def _run_job(self, batch: BatchRecord, files: JobFiles, source: Input) -> None:
        engine: BatchEngine = self._call(self._open)
        reader: Reader | None = None
        try:
            assembly = _Assembly(engine, self._service.tokenizer, self._job_config())
            job = Job(cast(Any, assembly), JobOptions())
            parse = Parser(self._defaults(batch), self._encoder(batch))
            reader = Reader(source.lines(files.finished), parse)
            failed = int((files.outcomes[files.finished] != Outcome.DONE).sum())
            done = int(files.finished.sum()) - failed
            progress = _Progress(batch, files.scan.num_lines, done, failed)
            output = files.open_output(Syncing(SYNC_SECONDS))
            try:
                job.run(reader, output, progress, _Stop(self._ends, batch))
            finally:
                output.close()
        except JobFailed as error:
            raise EngineLost(str(error)) from error
        finally:
            if reader is not None:
                reader.stop()
            self._call(lambda: self._service.engine.close_batch_engine(engine))

    def _open(self) -> BatchEngine:
        if not self._service.is_ready:
            raise EngineLost("it is not ready")
        return self._service.engine.open_batch_engine()

    def _job_config(self) -> EngineConfig:
        """Results name the model as requests do, and some seats are left to them."""
        config = self._service.engine.config
        rules = config.scheduler
        most = max(1, int(rules.max_seqs * SHARE_OF_SEATS))
        return dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, name=self._service.names[0]),
            scheduler=dataclasses.replace(rules, max_waiting=most),
        )

    def _defaults(self, batch: BatchRecord) -> SamplingParams:
        """Those of the endpoint."""
        load = self._service.text.load
        is_chat = batch.endpoint == ENDPOINTS[0]
        return SamplingParams(max_tokens=load.chat_max_tokens if is_chat else load.text_max_tokens)

    def _encoder(self, batch: BatchRecord) -> Callable[[Task], list[int]]:
        """Token ids from a text process, as for a request."""

        def encode(task: Task) -> list[int]:
            if task.is_chat != (batch.endpoint == ENDPOINTS[0]):
                message = f"url must be {batch.endpoint}, the endpoint of the batch"
                raise RequestError("invalid_request", message)
            if task.token_ids is not None:
                return task.token_ids
            body: dict[str, Any] = {"model": task.model}
            body |= {"messages": task.messages} if task.is_chat else {"prompt": task.text}
            assert self._loop is not None
            parsing = self._service.text.parse("tokenize", msgspec.json.encode(body))
            try:
                answer = asyncio.run_coroutine_threadsafe(parsing, self._loop).result()
            except ApiError as error:
                raise RequestError(error.code, str(error)) from error
            return msgspec.json.decode(cast(protocol.Answered, answer).body)["tokens"]

        return encode

    def _finish(self, batch: BatchRecord, results: Path) -> None:
        if batch.status == "in_progress":
            self._batches.move(batch, "finalizing")
        batch_results.keep(self._files, batch, results)
        self._batches.move(batch, "cancelled" if batch.status == "cancelling" else "completed")

    def _refuse(self, batch: BatchRecord, results: Path, differing: list[str]) -> None:
        """One output is never of two models: what is finished is kept, the rest is not run."""
        batch_results.keep(self._files, batch, results)
        message = (
            f"this server would not give the results of the one that began the batch: "
            f"{'; '.join(differing)}. The lines that were finished are in its output and error "
            f"files; create a batch of the others"
        )
        self._fail(batch, "settings_changed", message)

    def _fail(self, batch: BatchRecord, code: str, message: str) -> None:
        error = {"code": code, "message": message, "param": None, "line": None}
        batch.errors = {"object": "list", "data": [error]}
        self._batches.move(batch, "failed")

    def _call[T](self, function: Callable[[], T]) -> T:
        """Runs `function` in the event loop."""

        async def run() -> T:
            return function()

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()
