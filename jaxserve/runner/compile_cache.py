"""The persistent compile cache: on by default, and never a reason to fail."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import jax
import platformdirs
from jax.experimental.compilation_cache import compilation_cache


def enable(setting: str, warn: Callable[[str], None]) -> Path | None:
    """Points JAX at its cache folder; call it before the first array is made.  Returns the folder
    in use.

    `setting` is `runner.compile_cache`: "auto", "off" or a folder.  The versions of jax and jaxlib
    are part of the path, so that an upgrade never reads what another compiler wrote.  A folder that
    cannot be used gives one warning and no cache.
    """
    if setting == "off":
        _point(None)
        return None
    if setting == "auto":
        root = Path(platformdirs.user_cache_dir("jaxserve")) / "compiled"
    else:
        root = Path(setting).expanduser()
    folder = root / f"jax-{jax.__version__}-jaxlib-{version('jaxlib')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            os.write(probe.fileno(), b"probe")
    except OSError as error:
        warn(f"compile cache {folder} cannot be used ({error.strerror}); compiling without it")
        _point(None)
        return None
    _point(str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def in_use() -> bool:
    """May a compiled program have come from the cache?"""
    return bool(jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """What compiles meanwhile is neither read from the cache nor written to it."""
    folder = jax.config.jax_compilation_cache_dir
    _point(None)
    try:
        yield
    finally:
        _point(folder)


def _point(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()  # JAX keeps the folder that its first program met
