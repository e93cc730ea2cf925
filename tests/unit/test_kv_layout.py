"""Laws of how layers are cut into groups of equal size."""

import random

import pytest

from model_zoo.kv_layout import kv_layout

GEMMA3_270M = [None if (layer + 1) % 6 == 0 else 512 for layer in range(18)]
GEMMA3_27B = [None if (layer + 1) % 6 == 0 else 1024 for layer in range(62)]


@pytest.mark.parametrize("seed", range(40))
def test_every_layer_has_a_place_of_its_own_in_a_group_that_sees_as_far(seed: int) -> None:
    rng = random.Random(seed)
    kinds = rng.sample([None, 4, 16, 4096], rng.randint(1, 3))
    windows = [rng.choice(kinds) for _ in range(rng.randint(1, 80))]
    layout = kv_layout(len(windows), windows)
    places = list(zip(layout.groups, layout.places, strict=True))
    assert len(set(places)) == len(windows)
    assert all(0 <= place < layout.depth for place in layout.places)
    assert [layout.windows[group] for group in layout.groups] == windows
    assert set(layout.groups) == set(range(layout.num_groups))
    unused = layout.depth * layout.num_groups - len(windows)
    assert 6 * unused <= len(windows)


def test_layers_that_all_see_equally_far_are_one_group_as_they_lie() -> None:
    for windows in ((), (None,) * 5, (128,) * 5):
        layout = kv_layout(5, windows)
        assert layout.depth == 5 and layout.num_groups == 1
        assert layout.places == (0, 1, 2, 3, 4)
    assert layout.windows == (128,)


def test_published_models_have_few_groups() -> None:
    assert kv_layout(26, [4096, None] * 13).windows == (None, 4096)
    small = kv_layout(18, GEMMA3_270M)
    assert (small.depth, small.windows) == (3, (None, *[512] * 5))
    large = kv_layout(62, GEMMA3_27B)
    assert (large.depth, large.windows) == (10, (None, *[1024] * 6))
