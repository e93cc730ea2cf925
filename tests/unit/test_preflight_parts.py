"""Parts of preflight that compile nothing: targets, what a program's text says, memory, advice."""

import types

import pytest

from jaxserve.preflight import check, hlo, roofline
from jaxserve.preflight.check import GIB, Result
from jaxserve.preflight.target import Target, chips, num_devices, parse


@pytest.mark.parametrize(
    ("text", "target", "devices"),
    [
        ("v5e:2x4", "v5e:2x4", 8),
        ("V6E:2x2", "v6e:2x2", 4),
        ("v5e", "v5e:1x1", 1),
        ("v5p:2x2x2", "v5p:2x2x2", 8),
        ("v4:2x2", "v4:2x2x1", 4),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8),
        ("h200", "h200:1", 1),
        ("h100:8", "h100:8", 8),
        ("cpu", "cpu", 0),
    ],
)
def test_targets(text: str, target: str, devices: int):
    assert str(parse(text)) == target
    assert num_devices(parse(text)) == devices


@pytest.mark.parametrize(
    "text", ["", "v9", "v5e:", "v5e:8", "v5e:0x4", "h200:2x4", "h200:9", "cpu:2"]
)
def test_what_is_no_target_is_refused(text: str):
    with pytest.raises(ValueError, match="target"):
        parse(text)


def test_every_chip_has_figures_and_their_source():
    for name, chip in chips().items():
        for figure in ("hbm_gib", "bandwidth_gbs", "bf16_tflops", "link_gbs"):
            assert chip[figure] > 0, (name, figure)
        assert len(chip["source"]) > 30, name


BLOCKS = 60013
PROGRAM = """\
HloModule jit__backbone, is_scheduled=true
%fused_computation.1 (p.1: bf16[32,60013,1,64,256]) -> bf16[32,60013,1,64,256] {
  %copy.9 = bf16[32,60013,1,64,256]{4,3,2,1,0:T(8,128)(2,1)} copy(%p.1)
}
%body (carry: (bf16[32,60013,1,64,256])) -> (bf16[32,60013,1,64,256]) {
  %get.1 = bf16[32,60013,1,64,256]{4,3,2,1,0} get-tuple-element(%carry), index=0
  %scatter_fusion.3 = bf16[32,60013,1,64,256]{4,3,2,1,0} fusion(%get.1), calls=%fused_computation.1
  %kv_write.1 = bf16[32,60013,1,64,256]{4,3,2,1,0} custom-call(%get.1, %s), \
custom_call_target="tpu_custom_call", output_to_operand_aliasing={{}: (0, {})}
  %all-reduce-start.1 = f32[1024,4096]{1,0:T(8,128)} all-reduce-start(%dot.1), channel_id=1
  %all-reduce-done.1 = f32[1024,4096]{1,0:T(8,128)} all-reduce-done(%all-reduce-start.1)
  %copy-start.4 = (bf16[32,768,4096]{2,1,0:T(8,128)(2,1)S(1)}, u32[]) copy-start(%w.1)
  ROOT %tuple.1 = (bf16[32,60013,1,64,256]{4,3,2,1,0}) tuple(%scatter_fusion.3)
}
"""
WEIGHTS = [(32, 768, 4096), (768, 4096), (32, 6144, 4096), (6144, 4096)]


def with_line(line: str) -> str:
    return PROGRAM.replace("  ROOT %tuple.1", f"  {line}\n  ROOT %tuple.1")


def test_a_program_that_copies_nothing_is_clean():
    assert hlo.kv_copies(PROGRAM, BLOCKS) == []
    assert hlo.weight_copies(PROGRAM, WEIGHTS) == []
    assert hlo.collectives(PROGRAM) == {"all-reduce": 1}


@pytest.mark.parametrize(
    "line",
    [
        "%copy.3 = bf16[32,60013,1,64,256]{1,4,3,2,0:T(8,128)} copy(%get.1)",
        '%own.1 = bf16[32,60013,1,64,256] custom-call(%a), custom_call_target="tpu_custom_call"',
        "%slice.3 = bf16[1,60013,1,64,256]{4,3,2,1,0} dynamic-slice(%get.1, %i)",
        "%fusion.8 = bf16[60013,64,256]{2,1,0} fusion(%get.1), calls=%fused_computation.4",
        "%c = (bf16[32,60013,1,64,256]{4,3,2,1,0}, u32[]) copy-start(%get.1)",
    ],
)
def test_a_copy_of_the_kv_is_found(line: str):
    assert len(hlo.kv_copies(with_line(line), BLOCKS)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "%copy.3 = bf16[32,768,4096]{1,2,0:T(8,128)} copy(%w.1)",
        "%copy.4 = bf16[32,4096,768]{2,1,0:T(8,128)} copy(%w.1)",
        "%transpose.1 = bf16[4096,768]{1,0:T(8,128)} transpose(%w.2)",
        "%dynamic-slice.1 = bf16[1,768,4096]{2,1,0:T(8,128)} dynamic-slice(%w.1, %i)",
        "%loop_dynamic_slice_fusion.2 = bf16[768,4096]{1,0} fusion(%w.1), calls=%f",
        "%all-gather.1 = bf16[6144,4096]{1,0:T(8,128)} all-gather(%w.2), dimensions={0}",
        "%copy_fusion = bf16[768,4096]{1,0} fusion(%w.1), calls=%f",
    ],
)
def test_a_copy_of_a_weight_is_found(line: str):
    assert len(hlo.weight_copies(with_line(line), WEIGHTS)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "%copy.3 = bf16[1024,4096]{1,0:T(8,128)} copy(%x)",
        "%fusion.2 = bf16[768,4096]{1,0} fusion(%w.1), calls=%f",  # it computes
        "%slice.1 = bf16[1,768,4096]{2,1,0:T(8,128)S(1)} dynamic-slice(%w.1, %i)",
        "%s = (bf16[32,768,4096]{2,1,0}, bf16[1,768,4096]{2,1,0:S(1)}) slice-start(%w.1)",
    ],
)
def test_what_is_no_copy_of_a_weight_is_let_pass(line: str):
    assert hlo.weight_copies(with_line(line), WEIGHTS) == []


PLAN = {
    "weight_bytes": 4 * GIB,
    "state_bytes": 0,
    "block_bytes": 1 << 20,
    "num_blocks": 8191,
    "asked_blocks": 0,
    "block_size": 64,
    "windows": [None],
    "max_chunk": 512,
    "max_len": 4096,
    "max_seqs": 64,
    "token_budget": 512,
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "data": 1,
    "tensor": 8,
    "notes": [],
    "programs": ["backbone[512]", "backbone[64]", "head[64]", "head[16]"],
}
KV_BYTES = PLAN["num_blocks"] * PLAN["block_bytes"]


def program(name: str = "backbone[512]", **changes) -> dict:
    memory = {"temp": 1 << 28, "outputs": KV_BYTES, "aliased": KV_BYTES}
    facts = {"name": name, "kind": name.split("[")[0], "memory": memory}
    return facts | {"kv_copies": [], "weight_copies": []} | changes


def result(programs: list[dict] | None = None, **plan) -> Result:
    return Result(Target("v5e", "2x4"), PLAN | plan, programs or [program()])


def test_what_memory_leaves_is_the_pool():
    found = result()
    pool = check.largest_pool(found)
    assert pool is not None
    total = pool * PLAN["block_bytes"] + PLAN["weight_bytes"] + (1 << 28)
    usable = check.usable_bytes(found.target)
    assert usable is not None and 0 <= usable - total < PLAN["block_bytes"]
    assert not check.problems(found) and not check.advice(found)


BAD = {
    "not in place": ([program(memory={"temp": 0, "outputs": KV_BYTES, "aliased": 0})], {}, "place"),
    "copied": ([program(kv_copies=["copy copy.1"])], {}, "copies the whole KV"),
    "no compile": ([{"name": "head[8]", "error": "E1001 Scoped"}], {}, "E1001 Scoped"),
    "weights": (None, {"weight_bytes": 15 * GIB}, "weights take 15.00"),
    "pool": (None, {"asked_blocks": 20000}, "cache needs"),
    "one request": (None, {"max_len": 1 << 20}, "model.max_len"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_said(case: str):
    programs, plan, words = BAD[case]
    found = result(programs, **plan)
    assert any(words in line for line in check.problems(found))


def test_advice_is_a_change_that_helps():
    small = result(asked_blocks=20000)
    (line,) = check.advice(small)
    pool = int(line.split("cache.num_blocks=")[1].split(" ")[0])
    assert not check.problems(result(asked_blocks=pool))
    many = result(weight_bytes=15 * GIB)
    chips_line = check.advice(many)[0]
    tensor = int(chips_line.split("mesh.tensor=")[1].split(" ")[0])
    assert not check.problems(result(weight_bytes=15 * GIB * 8 // tensor))


def test_the_largest_of_each_kind():
    assert check.largest_programs(PLAN["programs"]) == ["backbone[512]", "head[64]"]


MODEL = types.SimpleNamespace(L=32, D=4096, F=14336, N=32, K=8, H=128, V=128256, tie=False)
STEP = {"tokens": 1, "rows": 1, "context": 1, "data": 1, "tensor": 1}
STEP |= {"itemsize": 2, "kv_itemsize": 2}


def test_a_decode_of_one_row_takes_as_long_as_reading_the_weights():
    """8.03e9 parameters less the embedding table, at 819 GB/s: 18.3 ms."""
    weights = 2 * 8_030_261_248
    load = roofline.step_load(MODEL, weights, STEP)
    seconds = roofline.seconds(load, chips()["v5e"])
    assert seconds == pytest.approx((weights - 2 * 128256 * 4096) / 819e9, rel=1e-3)
    assert load.flops == pytest.approx(2 * (8_030_261_248 - 128256 * 4096), rel=1e-3)


def test_kv_is_read_in_its_own_type():
    step = STEP | {"context": 1000}
    half = roofline.step_load(MODEL, 1 << 30, step)
    whole = roofline.step_load(MODEL, 1 << 30, step | {"kv_itemsize": 4})
    assert whole.kv_bytes == 2 * half.kv_bytes == 4 * 2 * 32 * 8 * 128 * 1000
    assert whole.weight_bytes == half.weight_bytes


def test_a_large_prefill_is_bound_by_arithmetic_and_chips_share_it():
    weights = 2 * 8_030_261_248
    one = roofline.step_load(MODEL, weights, STEP | {"tokens": 4096})
    eight = roofline.step_load(MODEL, weights // 8, STEP | {"tokens": 4096, "tensor": 8})
    assert one.flops / eight.flops == pytest.approx(8, rel=0.01)
    chip = chips()["v5e"]
    assert roofline.seconds(one, chip) == pytest.approx(one.flops / 197e12)
    assert one.link_bytes == 0 and eight.link_bytes > 0


def test_an_unknown_machine_has_no_estimate():
    assert roofline.seconds(roofline.step_load(MODEL, 1 << 30, STEP), {}) is None


def test_a_child_that_dies_is_a_line(monkeypatch: pytest.MonkeyPatch):
    """The program it died in is marked; the others are compiled by the next child."""
    jobs = []

    def child(job):
        jobs.append(job.only)
        if len(jobs) == 1:
            yield {"plan": PLAN}
            yield {"begin": "backbone[512]"}
            yield {"died": "LLVM ERROR: Cannot select (signal 6)"}
            return
        yield {"plan": PLAN}
        for name in job.only:
            yield {"begin": name}
            yield program(name)

    monkeypatch.setattr(check, "_child", child)
    found = check.compile_all(check.Job("v5e:2x4", "", {}))
    assert jobs == [None, PLAN["programs"][1:]]
    assert [p["name"] for p in found.programs] == PLAN["programs"]
    assert "LLVM ERROR" in found.programs[0]["error"]
