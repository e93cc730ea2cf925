"""For all tests."""

import signal


def pytest_configure() -> None:
    """Ctrl-C reaches the tests that send it, also where whoever started them ignores it (a job in
    the background of a shell does)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
