"""Bodies of requests within bounds."""

import asyncio

from starlette.requests import Request
from starlette.types import Message

from jaxserve.server import errors


def bounded(request: Request, most: int, idle_s: float, what: str) -> Request:
    """The same request, whose body may have `most` bytes, with at most `idle_s` seconds between
    two pieces.  `what` names it in messages: "the body".

    Raises ApiError (413) when its length is declared; reading it: ApiError (413, 408),
    ClientDisconnect.
    """
    too_long = errors.ApiError(413, "body_too_long", f"{what} may have {most} bytes at most")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise too_long
    received = 0

    async def receive() -> Message:
        nonlocal received
        try:
            async with asyncio.timeout(idle_s):
                message = await request.receive()
        except TimeoutError:
            raise errors.ApiError(408, "body_too_slow", "the body did not arrive") from None
        received += len(message.get("body", b""))
        if received > most:
            raise too_long
        return message

    return Request(request.scope, receive)


async def read_body(request: Request, most: int, idle_s: float) -> bytes:
    """All of it, see `bounded`."""
    return await bounded(request, most, idle_s, "the body").body()
