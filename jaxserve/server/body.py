"""Reads the body of a request within bounds."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from jaxserve.server import errors


async def read_body(request: Request, most: int, idle_s: float) -> bytes:
    """At most `most` bytes, with at most `idle_s` seconds between two pieces.

    Raises ApiError (413, 408), ClientDisconnect.
    """
    declared = request.headers.get("content-length", "")
    too_long = errors.ApiError(413, "body_too_long", f"the body may have {most} bytes at most")
    if declared.isdecimal() and int(declared) > most:
        raise too_long
    body = bytearray()
    while True:
        try:
            async with asyncio.timeout(idle_s):
                message = await request.receive()
        except TimeoutError:
            raise errors.ApiError(408, "body_too_slow", "the body did not arrive") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > most:
            raise too_long
        if not message.get("more_body", False):
            return bytes(body)
