"""`/v1/files` and `/v1/batches`."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from jaxserve.offline.lock import LocalLock
from jaxserve.openai_api import strict_json
from jaxserve.openai_api.bodies import convert
from jaxserve.openai_api.errors import RequestError
from jaxserve.server import errors
from jaxserve.server.batch_runner import BatchRunner
from jaxserve.server.batches import ENDPOINTS, BatchRecord, BatchStore
from jaxserve.server.body import bounded, read_body
from jaxserve.server.errors import ApiError
from jaxserve.server.file_store import FileRecord, FileStore
from jaxserve.server.service import Service

MAX_LISTED = 100
MAX_METADATA, MAX_METADATA_TEXT = 16, 512  # entries, and characters of a value (as OpenAI)


class NewBatch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class _Named(Protocol):
    @property
    def id(self) -> str: ...


class FilesAndBatches:
    """The routes, over stores that outlive the server."""

    def __init__(self, service: Service, folder: Path) -> None:
        """Finds what an earlier server left in `folder`.  Raises InputError when another server
        uses it, OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = LocalLock(str(folder))
        self._service = service
        self._files = FileStore(folder / "files")
        self._batches = BatchStore(folder / "batches")
        self._runner = BatchRunner(service, self._files, self._batches)

    def start(self) -> None:
        """In the event loop of the server: batches that have not ended go on."""
        self._runner.start()

    async def close(self) -> None:
        """Batches go on after the next start."""
        await self._runner.close()
        self._lock.release()

    def routes(self) -> list[Route]:
        post, delete = ["POST"], ["DELETE"]
        return [
            Route("/v1/files", self.upload, methods=post),
            Route("/v1/files", self.list_files),
            Route("/v1/files/{name}", self.delete_file, methods=delete),
            Route("/v1/files/{name}", self.file),
            Route("/v1/files/{name}/content", self.content),
            Route("/v1/batches", self.create_batch, methods=post),
            Route("/v1/batches", self.list_batches),
            Route("/v1/batches/{name}", self.batch),
            Route("/v1/batches/{name}/cancel", self.cancel_batch, methods=post),
        ]

    async def upload(self, request: Request) -> Response:
        """A form with `file` and `purpose`, which must be batch."""
        limits = self._service.engine.config.server
        body = bounded(request, limits.max_upload_bytes, limits.idle_s, "a file")
        try:
            async with body.form(max_files=1, max_fields=4, max_part_size=1024) as form:
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    raise errors.invalid("invalid_request", "send a form with a file", "file")
                if purpose != "batch":
                    raise errors.invalid("invalid_request", "purpose must be batch", "purpose")
                name = file.filename or "upload"
                if not name.isprintable():
                    message = "the name of the file has characters that cannot be shown"
                    raise errors.invalid("invalid_request", message, "file")
                create = self._files.create
                record = await asyncio.to_thread(create, file.file, name, "batch")
        except MultiPartException as error:
            raise errors.invalid("invalid_request", f"no usable form: {error.message}") from error
        except OSError as error:
            raise _not_kept(error) from error
        return _json(record)

    async def list_files(self, request: Request) -> Response:
        files = self._files.list()
        purpose = request.query_params.get("purpose")
        return _page(request, [f for f in files if purpose in (None, f.purpose)])

    async def file(self, request: Request) -> Response:
        return _json(self._file(request))

    async def content(self, request: Request) -> Response:
        record = self._file(request)
        return FileResponse(self._files.path(record), media_type="application/octet-stream")

    async def delete_file(self, request: Request) -> Response:
        record = self._file(request)
        used = [b for b in self._batches.list() if b.input_file_id == record.id and not b.ended]
        if used:
            message = f"{used[0].id} reads it; cancel that first"
            raise ApiError(409, "file_in_use", message)
        await asyncio.to_thread(self._files.delete, record)
        return _json({"id": record.id, "object": "file", "deleted": True})

    async def create_batch(self, request: Request) -> Response:
        limits = self._service.engine.config.server
        body = await read_body(request, min(limits.max_body_bytes, 1 << 20), limits.idle_s)
        try:
            asked = convert(strict_json.parse_object(body, "body"), NewBatch, "")
        except RequestError as error:
            raise errors.invalid(error.code, str(error), error.param) from error
        _check(asked)
        if self._files.get(asked.input_file_id) is None:
            message = "there is no such file; upload it to /v1/files first"
            raise errors.invalid("no_such_file", message, "input_file_id")
        try:
            record = await asyncio.to_thread(
                self._batches.create,
                asked.input_file_id,
                asked.endpoint,
                asked.completion_window,
                asked.metadata,
            )
        except OSError as error:
            raise _not_kept(error) from error
        self._runner.wake()
        return _json(record)

    async def list_batches(self, request: Request) -> Response:
        return _page(request, self._batches.list())

    async def batch(self, request: Request) -> Response:
        return _json(self._batch(request))

    async def cancel_batch(self, request: Request) -> Response:
        record = self._batch(request)
        if record.ended or record.status == "finalizing":
            raise ApiError(409, "batch_ended", f"the batch is {record.status}")
        if record.status != "cancelling":
            await asyncio.to_thread(self._batches.move, record, "cancelling")
            self._runner.wake()
        return _json(record)

    def _file(self, request: Request) -> FileRecord:
        record = self._files.get(request.path_params["name"])
        if record is None:
            raise ApiError(404, "no_such_file", "there is no such file")
        return record

    def _batch(self, request: Request) -> BatchRecord:
        record = self._batches.get(request.path_params["name"])
        if record is None:
            raise ApiError(404, "no_such_batch", "there is no such batch")
        return record


def _check(asked: NewBatch) -> None:
    """Raises ApiError."""
    if asked.endpoint not in ENDPOINTS:
        message = f"endpoint must be {' or '.join(ENDPOINTS)}"
        raise errors.invalid("invalid_request", message, "endpoint")
    if asked.completion_window != "24h":
        message = "completion_window must be 24h (the only one of OpenAI's; nothing expires here)"
        raise errors.invalid("invalid_request", message, "completion_window")
    entries = asked.metadata or {}
    if len(entries) > MAX_METADATA or any(
        len(text) > MAX_METADATA_TEXT for pair in entries.items() for text in pair
    ):
        message = f"metadata has at most {MAX_METADATA} entries of {MAX_METADATA_TEXT} characters"
        raise errors.invalid("invalid_request", message, "metadata")


def _page(request: Request, records: Sequence[_Named]) -> Response:
    """`limit` entries behind the one named by `after`.  Raises ApiError."""
    limit, after = request.query_params.get("limit", "20"), request.query_params.get("after")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= 10_000):
        raise errors.invalid("invalid_request", "limit must be from 1 to 10000", "limit")
    names = [record.id for record in records]
    if after is not None and after not in names:
        raise errors.invalid("invalid_request", "after names nothing in the list", "after")
    begin = 0 if after is None else names.index(after) + 1
    end = begin + min(int(limit), MAX_LISTED)
    page = records[begin:end]
    return _json(
        {
            "object": "list",
            "data": page,
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": end < len(records),
        }
    )


def _not_kept(error: OSError) -> ApiError:
    return ApiError(507, "not_kept", f"it could not be written: {error.strerror or 'disk error'}")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
