"""What is wrong with a request: for people, and for programs."""

_SHOWN = 80  # characters of foreign text in a message


class RequestError(ValueError):
    """A request, or a line of a batch job, that cannot be run.

    `code` is stable and machine-readable, the message is for people, `param` names the field that
    is wrong where there is one.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def shorten(text: str) -> str:
    """Foreign text as a message shows it: escaped, and not longer than a line."""
    return ascii(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
