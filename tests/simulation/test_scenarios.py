"""Thousands of random engines: every request gets what it gets alone, and the books agree."""

import pytest

from tests.simulation import scenario

SCENARIOS = 2400
GROUP = 100


@pytest.mark.parametrize("group", range(SCENARIOS // GROUP))
def test_busy_equals_alone(group: int) -> None:
    for seed in range(group * GROUP, (group + 1) * GROUP):
        scenario.run(seed)
