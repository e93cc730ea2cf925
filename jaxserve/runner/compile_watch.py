"""Compiles of this process: how many there were, and who wants to hear of them."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.monitoring

_COMPILED = "/jax/core/compile/backend_compile_duration"  # also of a program read from the cache
_CACHE_HIT = "/jax/compilation_cache/cache_hits"  # comes first


@contextlib.contextmanager
def watch(on_compile: Callable[[int], None]) -> Iterator[None]:
    """Calls `on_compile(count)` whenever this process has compiled one more program since, in the
    thread that did; one call at a time.  Never where everything comes from the cache.
    """
    heard = _listeners()
    watcher = _Watcher(on_compile)
    heard.append(watcher)
    try:
        yield
    finally:
        heard.remove(watcher)


def total() -> int:
    """Programs that the back end gave, compiled or read from the cache, since this was first
    asked."""
    return _all().compiled


class _Watcher:
    def __init__(self, on_compile: Callable[[int], None]) -> None:
        self._on_compile = on_compile
        self._lock = threading.Lock()
        self.compiled = 0  # those read from the cache included
        self._hits = 0

    def count(self, event: str) -> None:
        with self._lock:
            self._hits += event == _CACHE_HIT
            self.compiled += event == _COMPILED
            count = self.compiled - self._hits
            if event == _COMPILED and count > 0:
                self._on_compile(count)


@functools.cache
def _listeners() -> list[_Watcher]:
    """JAX is asked once a process: not every version of it lets a listener go."""
    heard: list[_Watcher] = []

    def on_event(event: str, **_: Any) -> None:
        for watcher in tuple(heard):
            watcher.count(event)

    def on_duration(event: str, duration_secs: float, **_: Any) -> None:
        on_event(event)

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    return heard


@functools.cache
def _all() -> _Watcher:
    watcher = _Watcher(lambda count: None)
    _listeners().append(watcher)
    return watcher
