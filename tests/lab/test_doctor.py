"""Every diagnosis, in a run that really has that fault, and in none that has not."""

import json
from pathlib import Path

import pytest

from jaxserve.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from jaxserve.costs import CostModel
from jaxserve.lab import doctor, trace
from jaxserve.lab.doctor import Finding
from tests.lab.rigs import Rig, prompt


def rig(path: Path, *, blocks: int = 2000, seconds=None, costs=None, **rules) -> Rig:
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_blocks=blocks),
        scheduler=SchedulerConfig(**{"token_budget": 64, "max_seqs": 16, **rules}),
    )
    return Rig(path, config, costs=costs, **({"seconds": seconds} if seconds else {}))


def streams(made: Rig, count: int = 8, tokens: int = 120) -> None:
    for i in range(count):
        made.add(prompt(5, i), tokens)


def drip(made: Rig, *, every: int, length: int, count: int, tokens: int = 2) -> None:
    """A prompt every few steps, while others decode."""
    for i in range(count):
        made.add(prompt(length, 100 + i), tokens)
        for _ in range(every):
            made.step()
    made.run()


def findings(made: Rig, **limits) -> dict[str, Finding]:
    return {found.name: found for found in doctor.diagnose(made.trace(), **limits)}


def healthy(path: Path) -> Rig:
    made = rig(path)
    streams(made)
    drip(made, every=6, length=40, count=10)
    return made


def test_nothing_stands_out_in_a_healthy_run(tmp_path: Path):
    assert findings(healthy(tmp_path / "t")) == {}


def test_chunk_too_big(tmp_path: Path):
    made = rig(tmp_path / "t", token_budget=512)
    streams(made)
    drip(made, every=10, length=900, count=6)
    found = findings(made)
    assert list(found) == [doctor.CHUNK_TOO_BIG]
    figures = found[doctor.CHUNK_TOO_BIG].figures
    assert figures["decode_ms"] == pytest.approx(2.16)  # 2 ms and 20 us a token of 8
    assert figures["p99_ms"] == pytest.approx(2 + 0.02 * 512)
    assert "lower scheduler.token_budget from 512" in found[doctor.CHUNK_TOO_BIG].turn


def test_chunk_too_big_is_judged_by_the_limit_and_names_what_fits_it(tmp_path: Path):
    costs = CostModel((8, 256), (0.00216, 0.00712))
    made = rig(tmp_path / "t", token_budget=256, costs=costs)
    streams(made)
    drip(made, every=10, length=600, count=6)
    loaded = made.trace()
    assert doctor.diagnose(loaded, tpot_ms=20) == []
    (found,) = doctor.diagnose(loaded, tpot_ms=5)
    assert found.name == doctor.CHUNK_TOO_BIG and found.figures["limit_ms"] == 5
    assert found.figures["fits"] == 128  # 4.56 ms; a step of 256 takes 7.12
    again = rig(tmp_path / "again", token_budget=128, costs=costs)
    streams(again)
    drip(again, every=10, length=600, count=6)
    assert doctor.diagnose(again.trace(), tpot_ms=5) == []


def test_chunk_too_small(tmp_path: Path):
    made = rig(tmp_path / "t", token_budget=16, max_seqs=4)
    for i in range(12):
        made.add(prompt(200, i), 2)
    made.run()
    found = findings(made)
    assert list(found) == [doctor.CHUNK_TOO_SMALL]
    figures = found[doctor.CHUNK_TOO_SMALL].figures
    # 2 ms + 20 us x 16: twice as many tokens cost 2.64 ms instead of 2 x 2.32.
    assert figures["saved"] == pytest.approx(1 - 2.64 / 4.64, abs=0.01)
    assert figures["chunks_per_prompt"] > 10
    assert "from 16 to 32" in found[doctor.CHUNK_TOO_SMALL].turn


def test_chunk_too_small_in_equal_chunks_names_the_chunk_size(tmp_path: Path):
    made = rig(tmp_path / "t", mode="fixed", chunk_size=16, token_budget=64)
    for i in range(12):
        made.add(prompt(200, i), 2)
    made.run()
    assert "scheduler.chunk_size from 16" in findings(made)[doctor.CHUNK_TOO_SMALL].turn


def test_thrash(tmp_path: Path):
    made = rig(tmp_path / "t", blocks=40, reserve_full_prompt=False, watermark=0.0)
    for i in range(16):
        made.add(prompt(30, i), 60)
    made.run()
    found = findings(made)[doctor.THRASH]
    assert found.figures["preemptions"] > 3 and found.figures["recomputed_share"] > 0.02
    assert "reserve_full_prompt = true" in found.turn and "max_seqs from 16" in found.turn


def test_too_many_partial_prefills(tmp_path: Path):
    rules = {"policy": "round_robin", "max_partial_prefills": 16, "max_long_partial_prefills": 16}
    made = rig(tmp_path / "t", mode="fixed", chunk_size=32, token_budget=64, **rules)
    for i in range(10):
        made.add(prompt(256, i), 2)
    made.run()
    found = findings(made)[doctor.THRASH]
    assert found.figures["stretch"] > 2 and found.figures["partial_prefills_p90"] > 2
    assert "max_partial_prefills from 16" in found.turn and "fcfs" in found.turn
    one = rig(tmp_path / "one", mode="fixed", chunk_size=32, token_budget=64)
    for i in range(10):
        one.add(prompt(256, i), 2)
    one.run()
    assert doctor.THRASH not in findings(one)


@pytest.mark.parametrize("by_context", [True, False])
def test_time_varies(by_context: bool, tmp_path: Path):
    calls = []

    def seconds(batch) -> float:
        calls.append(1)
        if by_context:
            return 0.001 + 4e-6 * float(batch.inputs.kv_lens.sum())
        return 0.002 * (3 if len(calls) % 11 == 5 else 1)  # a neighbour takes the device

    made = rig(tmp_path / "t", seconds=seconds)
    streams(made, count=8, tokens=400)
    made.run()
    found = findings(made)
    assert list(found) == [doctor.TIME_VARIES]
    assert (found[doctor.TIME_VARIES].figures["explained"] > 0.9) == by_context
    assert ("mode = time" in found[doctor.TIME_VARIES].turn) == by_context


def test_prefix_cache_out_of_step(tmp_path: Path):
    made = rig(tmp_path / "t")
    for i in range(6):
        made.add(prompt(120) + prompt(8, i), 3)
    made.run()
    found = findings(made)[doctor.OUT_OF_STEP]
    assert found.figures["same_time"] > 0.05 * found.figures["prompt"]
    assert "go ahead" in found.turn
    calm = rig(tmp_path / "calm")
    for i in range(6):
        calm.add(prompt(120) + prompt(8, i), 3)
        calm.run()
    assert doctor.OUT_OF_STEP not in findings(calm)


def test_hits_cut_to_whole_chunks(tmp_path: Path):
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_blocks=2000),
        scheduler=SchedulerConfig(token_budget=96, chunk_size=64, max_seqs=8),
        runner=RunnerConfig(deterministic=True),
    )
    made = Rig(tmp_path / "t", config)
    for i in range(6):
        made.add(prompt(124) + prompt(8, i), 3)
        made.run()
    found = findings(made)[doctor.OUT_OF_STEP]
    assert found.figures["rounded"] == 5 * 60 and found.figures["cached"] == 5 * 64
    assert found.figures["same_time"] == found.figures["evicted"] == 0
    assert "lower scheduler.chunk_size from 64" in found.turn


def test_cancelled_work_not_released(tmp_path: Path):
    made = rig(tmp_path / "t")
    streams(made, count=6, tokens=100)
    release = made.engine.kv.release

    def keep(request) -> None:  # the fault: a cancelled request keeps its blocks
        if request.finish_reason != "abort":
            release(request)

    made.engine.kv.release = keep  # type: ignore[method-assign]
    gone = [made.add(prompt(60, 50 + i), 50)[0] for i in range(4)]
    for _ in range(5):
        made.step()
    for request in gone:
        made.engine.finish(request, "abort")
    made.run()
    found = findings(made)[doctor.NOT_RELEASED]
    assert found.figures["cancelled"] == 4 and found.figures["blocks"] >= 4 * 60 // 4
    assert found.figures["late_tokens"] == 0


def test_cancelled_work_that_goes_on(tmp_path: Path):
    made = rig(tmp_path / "t")
    (gone,) = made.add(prompt(60), 60)
    for _ in range(5):
        made.step()
    made.recording._recorder.ended(gone)  # the fault: the client was told, the scheduler never
    made.run()
    assert findings(made)[doctor.NOT_RELEASED].figures["late_tokens"] > 0


def test_cancelling_as_it_should_be(tmp_path: Path):
    made = rig(tmp_path / "t")
    streams(made, count=6, tokens=60)
    gone = [made.add(prompt(60, 50 + i), 50)[0] for i in range(4)]
    for _ in range(5):
        made.step()
    for request in gone:
        made.engine.finish(request, "abort")
    made.run()
    assert doctor.NOT_RELEASED not in findings(made)


def test_the_command(jaxserve, tmp_path: Path):
    healthy(tmp_path / "good").trace()
    ran = jaxserve("lab", "doctor", tmp_path / "good")
    assert ran.code == 0 and "nothing stands out" in ran.out
    made = rig(tmp_path / "bad", token_budget=512)
    streams(made)
    drip(made, every=10, length=900, count=6)
    made.trace()
    ran = jaxserve("lab", "doctor", tmp_path / "bad")
    assert ran.code == 0 and ran.out.startswith("chunk too big\n") and "Turn: lower" in ran.out
    report = json.loads(jaxserve("lab", "doctor", tmp_path / "bad", "--json").out)
    assert report["findings"][0]["name"] == "chunk too big"
    assert trace.load(tmp_path / "bad").steps
    for bad in ([tmp_path / "absent"], [tmp_path / "bad", "--tpot-slo", "0"]):
        ran = jaxserve("lab", "doctor", *bad)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
