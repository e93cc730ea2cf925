"""Results of a batch job in the form of OpenAI's batch output files."""

from typing import Any

from jaxserve.offline.jsonl import Place
from jaxserve.openai_api.errors import RequestError

ID_PREFIX = "batch_req_"  # and the number of the line in the whole input


def failure(
    place: Place, custom_id: str | None, error: RequestError, status: int = 400
) -> dict[str, Any]:
    """The result of a line that gave none: as a success, but with `error` in place of
    `response`."""
    where: dict[str, Any] = {"line": place.number}
    if place.file:
        where = {"file": place.file, "line": place.line}
    return {
        "id": f"{ID_PREFIX}{place.number}",
        "custom_id": custom_id,
        "response": None,
        "error": {
            "code": error.code,
            "message": f"{place}: {error}",
            **where,
            "status_code": status,
        },
    }


def success(place: Place, custom_id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"{ID_PREFIX}{place.number}",
        "custom_id": custom_id,
        "response": {"status_code": 200, "request_id": f"req_{place.number}", "body": body},
        "error": None,
    }
