"""One server that all tests share which do not break it."""

from collections.abc import Iterator

import pytest

from tests.cli.conftest import assembled, jaxserve
from tests.server.rig import SLOW_ENGINE, Rig, running, wait_for

__all__ = ["assembled", "jaxserve"]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running(tmp_path_factory.mktemp("model")) as rig:
        yield rig


@pytest.fixture
def server(shared: Rig) -> Iterator[Rig]:
    """Idle before and after the test."""
    yield shared
    wait_for(shared.is_idle)


@pytest.fixture(scope="session")
def shared_slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running(tmp_path_factory.mktemp("model"), engine=SLOW_ENGINE) as rig:
        yield rig


@pytest.fixture
def slow_server(shared_slow: Rig) -> Iterator[Rig]:
    """One whose steps take 20 ms: what is cancelled would run for seconds."""
    yield shared_slow
    wait_for(shared_slow.is_idle)
