"""The command line with the fake assembly, as in tests/cli."""

from tests.cli.conftest import assembled, jaxserve

__all__ = ["assembled", "jaxserve"]
