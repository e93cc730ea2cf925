"""Laws of the kernels' plans: every query and every position is worked on exactly once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_write.plan import slab_runs
from pallas_kernels.ragged_paged_attention import plan, tuning
from tests.kernels import harness

TOKENS, ROWS, SPAN = 96, 10, 32
SIZES = (16, 4)


@jax.jit
def planned(starts, lens, decodes, window):
    rows = plan.Rows(jnp.zeros((ROWS, 1), jnp.int32), starts, lens, decodes)
    at, laid = starts[:-1], []
    for size, tiles in zip(SIZES, plan.chunk_tiles(rows, SIZES), strict=True):
        laid.append(plan.lay_tiles(rows, tiles, at, TOKENS, size, SPAN, window))
        at = at + tiles * size
    packs = plan.decode_packs(rows, TOKENS, 3, SPAN, window)
    return laid, packs, plan.decode_parts(rows, ROWS, (3, 2), SPAN, window)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(case=harness.batches(), window=st.sampled_from([1, 24, 64, plan.NO_WINDOW]))
def test_every_query_and_position_once(case, window):
    counts = np.zeros(ROWS, int)
    lens = np.zeros(ROWS, np.int32)
    counts[: len(case.rows)] = [count for count, _ in case.rows]
    lens[: len(case.rows)] = [length for _, length in case.rows]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    decodes = case.num_decodes
    laid, packs, parts = jax.tree.map(
        np.asarray, planned(starts, lens, np.int32(decodes), np.int32(window))
    )

    seen = np.zeros(TOKENS, int)
    for size, tiles in zip(SIZES, laid, strict=True):
        assert tiles.count <= len(tiles.rows)
        for tile in range(tiles.count):
            row, first = tiles.rows[tile], tiles.queries[tile]
            assert starts[row] <= first < starts[row + 1]
            position = lens[row] - (starts[row + 1] - first)
            assert tiles.positions[tile] == position
            assert tiles.ends[tile] == min(position + size, lens[row])
            low = max(0, position + 1 - window)
            assert tiles.first_turns[tile] * SPAN <= low
            assert tiles.end_turns[tile] * SPAN >= tiles.ends[tile]
        placed = np.flatnonzero(tiles.places < len(tiles.rows) * size)
        seen[placed] += 1
        for token in placed:
            tile, offset = divmod(int(tiles.places[token]), size)
            assert tile < tiles.count and tiles.queries[tile] + offset == token
    chunked = np.arange(TOKENS)
    chunked = (chunked >= starts[decodes]) & (chunked < starts[-1])
    np.testing.assert_array_equal(seen, chunked)

    assert packs.count == -(-decodes // 3)
    np.testing.assert_array_equal(packs.lens[:decodes], lens[:decodes])
    assert not packs.lens[decodes:].any()
    for row in range(ROWS):
        wanted = range(0)
        if row < decodes:
            wanted = range(max(0, lens[row] - window) // SPAN, -(-lens[row] // SPAN))
        worked = [
            turn
            for piece in np.flatnonzero(parts.rows == row)
            for turn in range(parts.first_turns[piece], parts.end_turns[piece])
        ]
        assert worked == list(wanted)


runs_of = jax.jit(functools.partial(slab_runs, num_slots=64, slab=8))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(slots=st.lists(st.integers(0, 90), max_size=20, unique=True))
def test_every_slot_is_in_one_run_and_every_slab_in_one_run(slots):
    padded = np.full(20, 1000, np.int32)
    padded[: len(slots)] = slots
    runs = jax.tree.map(np.asarray, runs_of(padded))
    found = []
    for run in range(runs.count):
        places = range(runs.starts[run], runs.starts[run + 1])
        assert len({runs.slots[place] // 8 for place in places}) == 1
        found += [int(runs.slots[place]) for place in places]
        assert all(padded[runs.order[place]] == runs.slots[place] for place in places)
    assert found == sorted(slot for slot in slots if slot < 64)
    slabs = [runs.slots[runs.starts[run]] // 8 for run in range(runs.count)]
    assert len(set(slabs)) == len(slabs)


def test_tuned_sizes_win_over_the_rule_and_unknown_devices_take_the_rule():
    problem = tuning.Problem(32, 8, 128, 16, "bfloat16", "bfloat16")
    rule = tuning.tpu_sizes(problem)
    assert rule.cores == 1 and tuning.tpu_sizes(problem, "TPU of next year") == rule
    assert tuning.tpu_sizes(problem, "TPU v4").cores == 2


def test_the_rule_keeps_to_the_vmem_budget():
    for heads, kv_heads in ((9, 3), (8, 1), (32, 8), (32, 32), (64, 8), (4, 1)):
        for width in (64, 128, 256):
            problem = tuning.Problem(heads, kv_heads, width, 16, "bfloat16", "bfloat16")
            sizes = tuning.tpu_sizes(problem)
            used = max(
                tuning.decode_vmem(problem, sizes),
                *(tuning.tile_vmem(problem, sizes, tile) for tile in sizes.tiles),
            )
            assert used <= tuning.VMEM_BUDGET, (problem, sizes, used)
