"""Errors as OpenAI's API has them."""

from typing import Any

import msgspec
from starlette.responses import Response

_STATUS = {"model_not_found": 404, "overloaded": 503, "not_ready": 503}
RETRY_SECONDS = 1


class ApiError(Exception):
    """An answer that is no success.  `code` is for programs, `message` for people."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_s = retry_s  # seconds until it makes sense to try again

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        headers: dict[str, str] = {}
        if self.retry_s is not None:
            headers["retry-after"] = str(self.retry_s)
        if self.status in (408, 413):  # what is left of the body is not waited for
            headers["connection"] = "close"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(msgspec.json.encode(self.body()), self.status, headers, "application/json")


def invalid(code: str, message: str, param: str | None = None) -> ApiError:
    """A request that is wrong, and would be wrong again."""
    return ApiError(_STATUS.get(code, 400), code, message, param=param)


def unavailable(code: str, message: str, retry_s: int = RETRY_SECONDS) -> ApiError:
    """A request that may succeed later."""
    return ApiError(503, code, message, retry_s=retry_s)


def failed(message: str) -> ApiError:
    """A request that failed while it ran."""
    return ApiError(500, "generation_error", message)
