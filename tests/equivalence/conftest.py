"""Rigs that several files share; one is compiled once for a whole run."""

from collections.abc import Callable

import pytest

from tests.equivalence.rig import Rig


@pytest.fixture(scope="session")
def make_rig(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Rig]:
    """Rig(name, **settings), the same object for the same arguments."""
    made: dict[str, Rig] = {}

    def make(name: str, **settings: object) -> Rig:
        key = f"{name} {settings}"
        if key not in made:
            made[key] = Rig(tmp_path_factory.mktemp(name), name, **settings)  # pyright: ignore
        return made[key]

    return make
