"""One line on stderr while a start compiles what no cache holds; nothing when all is cached."""

from typing import Any, TextIO

WHAT = "compiling programs for these settings"


class ColdStart:
    """On a terminal the line counts and goes away at the end; elsewhere it is plain, once.

    `later`: what the next start will do, in a few words.
    """

    def __init__(self, stream: TextIO, later: str) -> None:
        self._stream = stream
        self._later = later
        self._status: Any = None
        self._told = False

    def update(self, compiled: int) -> None:
        """`compiled`: programs so far."""
        if not self._stream.isatty():
            if not self._told:
                self._stream.write(f"jaxserve: {WHAT}; {self._later}\n")
                self._stream.flush()
            self._told = True
            return
        text = f"{WHAT} ({compiled} done); {self._later}"
        if self._status is None:
            from rich.console import Console  # slow to import, and only a terminal needs it

            self._status = Console(file=self._stream).status(text)
            self._status.start()
        else:
            self._status.update(text)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
