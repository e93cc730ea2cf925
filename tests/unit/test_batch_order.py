"""The order of a batch job: laws of the window, and what they are good for."""

import dataclasses
import random
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.batch.buckets import resolve
from jaxserve.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxserve.offline.jsonl import Place
from jaxserve.offline.lookahead import LookAhead
from jaxserve.offline.order import MAX_DEPTH, MAX_LEADING, Window, prefix_keys, rank
from jaxserve.offline.parse import Failed, Ready
from jaxserve.openai_api.bodies import Task
from jaxserve.openai_api.errors import RequestError
from jaxserve.request import SamplingParams

BLOCK = 4


def prompt(*blocks: int) -> list[int]:
    """Each number a block, and one token more."""
    return [block for block in blocks for _ in range(BLOCK)] + [0]


def drain(window: Window[Any]) -> list[Any]:
    out = []
    while window:
        taken = taken_from(window)
        out.append(taken.item)
        window.computed(taken.place)
    return out


def taken_from(window: Window[Any]) -> Any:
    taken = window.take()
    assert taken is not None
    return taken


prompts = st.lists(st.integers(0, 2), max_size=4).map(lambda blocks: prompt(*blocks))
actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), prompts, st.integers(0, 5)),
        st.tuples(st.just("take"), st.booleans()),
        st.tuples(st.just("computed")),
    ),
    max_size=120,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(actions=actions, max_items=st.integers(1, 8), max_delay=st.integers(0, 12))
def test_every_item_once_within_bounds(actions, max_items: int, max_delay: int):
    window = Window[int](BLOCK, max_items=max_items, max_tokens=100, max_delay=max_delay)
    put, out, pending, tokens = 0, [], [], {}

    def take(patient: bool = False):
        inside = set(range(put)) - set(out)
        taken = window.take(patient=patient)
        if taken is None:
            assert patient and len(pending) >= MAX_LEADING
            return
        assert taken.item == taken.place and taken.item in inside
        out.append(taken.item)
        assert len(out) - 1 - taken.item <= max_delay
        if taken.leads:
            pending.append(taken.place)

    for action, *more in actions:
        inside = set(range(put)) - set(out)
        assert len(window) == len(inside)
        assert window.has_room == (len(inside) < max_items and sum(tokens[i] for i in inside) < 100)
        if action == "put" and window.has_room:
            tokens[put] = len(more[0])
            window.put(put, more[0], more[1])
            put += 1
        elif action == "take" and inside:
            take(*more)
        elif action == "computed" and pending:
            window.computed(pending.pop(0))
    while window:
        take()
    assert sorted(out) == list(range(put))
    with pytest.raises(IndexError):
        window.take()


def test_the_longest_goes_first_and_equals_in_the_order_of_arrival():
    window = Window[int](BLOCK)
    ranks = [5, 9, 6, 9, 1]
    for item, value in enumerate(ranks):
        window.put(item, [item], value)
    assert drain(window) == [1, 3, 2, 0, 4]


def test_shared_prefixes_leave_together_the_longest_share_first():
    """Depth first: a system prompt for all, examples for some."""
    window = Window[str](BLOCK)
    blocks = {"a1": (1, 2, 3), "b1": (1, 7), "a2": (1, 2, 4), "c": (8,), "b2": (1, 7), "a3": (1, 2)}
    for name, path in blocks.items():
        window.put(name, prompt(*path), 1)
    out = drain(window)
    families = [name[0] for name in out]
    assert out[0] == "a1"
    assert families == ["a", "a", "a", "b", "b", "c"]


def test_the_first_of_a_group_goes_ahead_until_its_prompt_is_computed():
    window = Window[str](BLOCK)
    for name, path, length in (
        ("a1", (1, 2), 9), ("a2", (1, 2), 8), ("b1", (5, 6), 7), ("b2", (5, 6), 6), ("c", (), 1),
    ):  # fmt: skip
        window.put(name, prompt(*path), length)
    first = taken_from(window)
    assert (first.item, first.leads) == ("a1", True)
    assert [taken_from(window).item, taken_from(window).item] == ["b1", "c"]
    window.computed(first.place)
    assert taken_from(window).item == "a2"
    assert taken_from(window).item == "b2"  # nobody else is there, so it need not wait


def test_few_groups_are_begun_at_a_time_while_there_is_other_work():
    window = Window[int](BLOCK)
    for item in range(40):
        window.put(item, prompt(item % 20), 1)
    begun = [taken_from(window) for _ in range(MAX_LEADING)]
    assert window.take(patient=True) is None
    assert taken_from(window).item == MAX_LEADING  # an engine without other work gets one
    for taken in begun:
        window.computed(taken.place)
    found = window.take(patient=True)
    assert found is not None


def test_a_group_that_waits_does_not_hide_another_far_behind():
    window = Window[int](BLOCK)
    for item in range(100):
        window.put(item, prompt(1, 2), 9)
    window.put(100, prompt(3), 1)
    assert [taken_from(window).item for _ in range(3)] == [0, 100, 1]


def test_what_keeps_its_turn_goes_by_arrival_after_what_shares():
    window = Window[str](BLOCK)
    for name, path, value in (
        ("a", (1,), 3), ("b", (2,), 9), ("c", (), 8), ("b2", (2, 5), 4), ("d", (3,), 7),
    ):  # fmt: skip
        window.put(name, prompt(*path), value, keeps_turn=True)
    assert drain(window) == ["b2", "b", "a", "c", "d"]


def test_what_every_block_in_common_means():
    assert prefix_keys(prompt(1, 2, 3), BLOCK)[:2] == prefix_keys(prompt(1, 2, 4), BLOCK)[:2]
    assert prefix_keys(prompt(1, 2, 3), BLOCK)[2] != prefix_keys(prompt(1, 2, 4), BLOCK)[2]
    # A block without its own beginning is another one.
    assert not set(prefix_keys(prompt(1, 2), BLOCK)) & set(prefix_keys(prompt(2, 2), BLOCK))
    assert prefix_keys([7] * BLOCK, BLOCK) == []  # its last token is always computed
    assert prefix_keys([], BLOCK) == []
    assert len(prefix_keys([1] * 10_000, BLOCK)) == MAX_DEPTH
    assert prefix_keys([2**70] * 9, BLOCK) == []  # no token ids: refused later


def test_what_a_line_takes_of_the_engine():
    def of(num_prompt: int, max_tokens: int, n: int = 1) -> int:
        return rank(num_prompt, SamplingParams(max_tokens=max_tokens, n=n), 1000)

    assert of(10, 100) > of(10, 20)
    assert of(500, 20) > of(10, 20)
    assert of(10, 400) > of(900, 20)
    assert of(990, 5000) == of(990, 10)  # the model's length ends it
    assert of(10, 100, n=3) > of(10, 299)
    assert of(2000, 128) == 500  # to be refused


def lru_hits(order: list[tuple[int, int]], capacity: int) -> int:
    """Blocks found in a cache of `capacity` groups' prefixes that forgets the oldest."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for group, _ in order:
        hits += group in cache
        cache[group] = None
        cache.move_to_end(group)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def test_a_cache_smaller_than_the_input_is_hit_all_the_same():
    rng = random.Random(3)
    lines = [(group, item) for group in range(40) for item in range(20)]
    rng.shuffle(lines)
    window = Window[tuple[int, int]](BLOCK)
    for line in lines:
        window.put(line, prompt(line[0] + 1, 100 + line[1]), rng.randrange(50))
    ordered = drain(window)
    assert sorted(ordered) == sorted(lines)
    assert lru_hits(lines, 4) < 100
    assert lru_hits(ordered, 4) == 40 * 19


def ready(index: int, max_tokens: int = 5) -> Ready:
    task = Task(SamplingParams(max_tokens=max_tokens), token_ids=[1])
    return Ready(Place(index + 1, index), f"id-{index}", task, [1])


class Listed:
    """A source; None stands for a line that is not parsed yet."""

    def __init__(self, *lines: Ready | Failed | None) -> None:
        self.lines = list(lines)
        self.waited = 0

    @property
    def ended(self) -> bool:
        return not self.lines

    def take(self, *, wait: bool) -> Ready | Failed | None:
        self.waited += wait
        return self.lines.pop(0) if self.lines else None


CONFIG = resolve(EngineConfig(), 256, 1 << 20)


def take_all(look: LookAhead) -> list[int]:
    out = []
    while not look.ended:
        line = look.take(wait=True)
        if line is not None:
            out.append(line.place.index)
    return out


def test_in_order_is_the_order_of_the_input():
    lines = [ready(index, 1 + index % 7) for index in range(50)]
    assert take_all(LookAhead(Listed(*lines), CONFIG, in_order=True)) == list(range(50))
    ordered = take_all(LookAhead(Listed(*lines), CONFIG))
    assert sorted(ordered) == list(range(50)) and ordered[:7] == [6, 13, 20, 27, 34, 41, 48]


@pytest.mark.parametrize(
    ("windows", "blocks", "sorts"),
    [((None,), 64, True), ((None,), 63, False), ((None, None), 64, False), ((32, None), 64, False)],
)
def test_lines_are_sorted_by_length_only_where_the_pool_holds_full_seats(
    windows, blocks: int, sorts: bool
):
    """16 tokens a block, 32 seats, lines of one token and 16 to 31 more: two blocks a group."""
    lines = [ready(index, 16 + index % 16) for index in range(63)]
    asked = dataclasses.replace(
        EngineConfig(),
        cache=CacheConfig(block_size=16, num_blocks=blocks),
        scheduler=SchedulerConfig(max_seqs=32),
    )
    out = take_all(LookAhead(Listed(*lines), resolve(asked, 256, 1 << 20), windows))
    assert sorted(out) == list(range(63))
    assert (out == list(range(63))) == (not sorts)


def test_a_bad_line_is_not_kept_and_nothing_waits_while_a_line_is_there():
    bad = Failed(Place(3, 2), None, RequestError("invalid_json", "bad"))
    source = Listed(ready(0), ready(1, 9), bad, None, ready(3), None)
    look = LookAhead(source, CONFIG)
    taken = [look.take(wait=True) for _ in range(3)]
    assert [line.place.index for line in taken if line is not None] == [2, 1, 0]
    assert source.waited == 1  # for the very first line only
    assert not look.ended
    assert take_all(look) == [3]
    assert look.take(wait=True) is None
