"""The routes of the server."""

import logging
import re
import uuid
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server import keys, openapi
from jaxserve.server.body import read_body
from jaxserve.server.completions import Completions
from jaxserve.server.engine_client import State
from jaxserve.server.errors import ApiError
from jaxserve.server.exposition import Exposition
from jaxserve.server.files_batches import FilesAndBatches
from jaxserve.server.page import Page
from jaxserve.server.protocol import Answered
from jaxserve.server.request_log import RequestLog, Write
from jaxserve.server.service import Service

OPEN_PATHS = frozenset({"/", "/health", "/ready"})  # browsers and probes have no key
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_log = logging.getLogger(__name__)


def make_app(service: Service, files: FilesAndBatches | None, write: Write) -> ASGIApp:
    """Everything behind a port.  `write` gets a line a request where `server.log_requests`."""
    small = _Small(service, openapi.describe(service.names[0], has_files=files is not None))
    routes = [
        Route("/", Page().show),
        Route("/health", small.health),
        Route("/ready", small.ready),
        Route("/metrics", small.metrics),
        Route("/openapi.json", small.openapi),
        Route("/v1/models", small.models),
        Route("/v1/models/{name:path}", small.model),
        Route("/v1/chat/completions", Completions(service, is_chat=True), methods=["POST"]),
        Route("/v1/completions", Completions(service, is_chat=False), methods=["POST"]),
        Route("/tokenize", small.tokenize, methods=["POST"]),
        Route("/detokenize", small.detokenize, methods=["POST"]),
    ]
    if files is not None:
        routes += files.routes()
    edge = _Edge(Router(routes, redirect_slashes=False), service)
    engine = service.engine
    paths = frozenset(route.path.replace(":path", "") for route in routes)
    asked = engine.config.server.log_requests
    return RequestLog(edge, engine.tally, paths, write if asked else None)


class _Edge:
    """What holds for every route: keys, request ids, errors as JSON."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        name = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(name):  # only echoed, never used as a key
            name = uuid.uuid4().hex.encode()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", name)]
            await send(message)

        scope["app"] = self  # Starlette's routes raise HTTPException then
        try:
            self._check_key(scope["path"], headers)
            return await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return
        except ApiError as error:
            answer = error
        except HTTPException as error:
            answer = ApiError(error.status_code, "no_such_route", error.detail)
        except Exception:
            _log.exception("%s %s failed", scope["method"], scope["path"])
            answer = ApiError(500, "internal_error", "the server failed; its log says why")
        if not started:
            await answer.response()(scope, receive, send_with_id)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        allowed = self._service.keys
        if allowed is None or path in OPEN_PATHS:
            return
        if not allowed.allow(keys.bearer(headers.get(b"authorization", b""))):
            message = "send a valid API key as the header Authorization: Bearer KEY"
            raise ApiError(401, "invalid_api_key", message)


class _Small:
    """Routes that answer at once."""

    def __init__(self, service: Service, description: dict[str, Any]) -> None:
        self._service = service
        self._description = description
        self._exposition = Exposition(service)

    async def health(self, request: Request) -> Response:
        """Is there anything that a restart would mend?"""
        status = self._service.status
        return _json({"status": status}, 503 if status in (State.DEAD, State.STALLED) else 200)

    async def ready(self, request: Request) -> Response:
        """Would a request be taken?"""
        return _json({"status": self._service.status}, 200 if self._service.is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        data, content_type = self._exposition.encode(request.headers.get("accept", ""))
        return Response(data, headers={"content-type": content_type})

    async def openapi(self, request: Request) -> Response:
        return _json(self._description)

    async def models(self, request: Request) -> Response:
        data = [self._model(name) for name in self._service.names]
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Raises ApiError (404)."""
        name = request.path_params["name"]
        if name not in self._service.names:
            raise ApiError(404, "model_not_found", "there is no such model; see /v1/models")
        return _json(self._model(name))

    async def tokenize(self, request: Request) -> Response:
        return await self._text(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        return await self._text(request, "detokenize")

    def _model(self, name: str) -> dict[str, object]:
        config = self._service.engine.config.model
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "jaxserve",
            "root": config.name,
            "max_model_len": config.max_len or None,  # known once the engine is ready
        }

    async def _text(self, request: Request, kind: str) -> Response:
        limits = self._service.engine.config.server
        body = await read_body(request, limits.max_body_bytes, limits.idle_s)
        answer = await self._service.text.parse(kind, body)
        assert isinstance(answer, Answered)
        return Response(answer.body, media_type="application/json")


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
