"""What preflight prints: one object, and the same as tables."""

import types
from collections.abc import Callable
from typing import Any

from jaxserve.kv.groups import context_tokens
from jaxserve.preflight import check, roofline
from jaxserve.preflight.check import Result
from jaxserve.runner.memory import GIB

_ITEMSIZE = {"float32": 4, "bfloat16": 2}
ESTIMATE = "estimate from data-sheet bandwidth and peak; not measured"


def report(result: Result, context: int, max_kv: int | None = None) -> dict[str, Any]:
    """Everything found, as one object for `--json`.

    `context`: tokens a row of the step whose time is estimated; `max_kv`: blocks that a search
    found to compile.
    """
    plan, usable = result.plan, check.usable_bytes(result.target)
    pool = check.largest_pool(result)
    if pool is not None and max_kv is not None:
        pool = min(pool, max_kv)
    wrong = check.problems(result)
    block_bytes = plan["block_bytes"]
    return {
        "target": str(result.target),
        "fits": not wrong,
        "problems": wrong,
        "warnings": check.warnings(result),
        "advice": check.advice(result),
        "checked": _checked(result),
        "mesh": {"data": plan["data"], "tensor": plan["tensor"]},
        "dtype": plan["dtype"],
        "kv_dtype": plan["kv_dtype"],
        "max_len": plan["max_len"],
        "device": {
            "kind": result.target.figures.get("kind", "cpu"),
            "usable_gib": usable and usable / GIB,
            "weights_gib": plan["weight_bytes"] / GIB,
            "state_gib": plan["state_bytes"] / GIB,
            "scratch_gib": check.scratch_bytes(result) / GIB,
            "compiled_kv_gib": plan["num_blocks"] * block_bytes / GIB,
        },
        "kv": {
            "block_bytes": block_bytes,
            "asked_blocks": plan["asked_blocks"] or None,
            "largest_blocks": pool,
            "largest_gib": None if pool is None else pool * block_bytes / GIB,
            "largest_tokens": None if pool is None else _tokens(plan, pool),
            "searched": max_kv is not None,
        },
        "programs": result.programs,
        "compile_s": sum(p.get("lower_s", 0) + p.get("compile_s", 0) for p in result.programs),
        "steps": steps(result, context),
        "figures": {
            name: result.target.figures[name]
            for name in ("bandwidth_gbs", "bf16_tflops", "link_gbs", "hbm_gib", "source")
            if name in result.target.figures
        },
    }


def _tokens(plan: dict[str, Any], blocks: int) -> int:
    """Tokens of context in requests of full length."""
    sizes = plan["block_size"], plan["max_chunk"], plan["max_len"]
    return context_tokens(plan["windows"], blocks, *sizes)


def steps(result: Result, context: int) -> list[dict[str, Any]]:
    """Estimated time of a step of each token bucket: decodes as many as it holds, and one prompt's
    chunk for the rest."""
    plan, chip = result.plan, result.target.figures
    model = types.SimpleNamespace(**plan["model"])
    found = []
    for tokens in plan["token_buckets"]:
        rows = min(tokens, plan["max_seqs"])
        step = {
            "tokens": tokens,
            "rows": rows,
            "context": context,
            "data": plan["data"],
            "tensor": plan["tensor"],
            "itemsize": _ITEMSIZE[plan["dtype"]],
            "kv_itemsize": _ITEMSIZE[plan["kv_dtype"]],
        }
        load = roofline.step_load(model, plan["weight_bytes"], step)
        seconds = roofline.seconds(load, chip)
        found.append(
            {
                "tokens": tokens,
                "rows": rows,
                "context": context,
                "estimated_ms": None if seconds is None else 1e3 * seconds,
                "tokens_per_s": None if not seconds else tokens / seconds,
                "read_gib": (load.weight_bytes + load.kv_bytes) / GIB,
                "tflop": load.flops / 1e12,
            }
        )
    return found


def _checked(result: Result) -> list[str]:
    """What these compiles prove, and what they cannot."""
    kernels = sum(p.get("kernels", 0) for p in result.programs)
    lines = ["every program above went through the target's whole compiler"]
    if result.target.platform == "tpu":
        lines.append("on-chip (VMEM) and HBM limits are the compiler's own; no chip ran anything")
    elif result.target.platform == "cuda":
        lines.append(
            "no GPU was there to tune matmuls on: these binaries prove shapes, memory and "
            "collectives, not speed, and are not for shipping"
        )
    else:
        lines.append("compiled for the CPU of this machine, which has no memory limit of its own")
    lines.append(
        f"attention: {kernels} kernel calls in all programs"
        if kernels
        else "attention: the portable XLA path, no kernel of ours in these programs"
    )
    lines += result.plan["notes"]
    lines.append("step times are an " + ESTIMATE)
    return lines


def write_tables(found: dict[str, Any], write: Callable[[str], Any], width: int = 110) -> None:
    """The same for people."""
    import io

    from rich.console import Console
    from rich.table import Table

    buffer = io.StringIO()
    console = Console(file=buffer, width=width, highlight=False)
    programs = Table(title=f"Programs on {found['target']} ({found['device']['kind']})")
    for name in ("program", "lower s", "compile s", "scratch MiB", "collectives", "result"):
        programs.add_column(name, justify="left" if name in ("program", "result") else "right")
    for p in found["programs"]:
        if "error" in p:
            programs.add_row(p["name"], "", "", "", "", "does not compile")
            continue
        bad = len(p["kv_copies"]) + len(p["weight_copies"])
        programs.add_row(
            p["name"],
            f"{p['lower_s']:.2f}",
            f"{p['compile_s']:.2f}",
            f"{p['memory']['temp'] / (1 << 20):.1f}",
            ", ".join(f"{count} {name}" for name, count in p["collectives"].items()) or "none",
            f"{bad} large copies" if bad else "ok",
        )
    console.print(programs)
    console.print(_memory_table(found))
    if found["steps"] and found["steps"][0]["estimated_ms"] is not None:
        console.print(_step_table(found))
    for line in found["checked"]:
        console.print(f"checked: {line}")
    for line in found["warnings"]:
        console.print(f"slow: {line}")
    for line in found["problems"]:
        console.print(f"problem: {line}")
    for line in found["advice"]:
        console.print(f"change: {line}")
    console.print(f"{found['target']}: {'fits' if found['fits'] else 'does not fit'}")
    write(buffer.getvalue())


def _memory_table(found: dict[str, Any]) -> Any:
    from rich.table import Table

    device, kv, mesh = found["device"], found["kv"], found["mesh"]
    table = Table(title=f"One device of {mesh['data']} x {mesh['tensor']}", show_header=False)
    table.add_column("what")
    table.add_column("GiB", justify="right")
    usable = device["usable_gib"]
    rows = [("may be planned for", "unknown" if usable is None else f"{usable:.2f}")]
    rows += [(name, f"{device[f'{name}_gib']:.2f}") for name in ("weights", "state", "scratch")]
    if kv["largest_gib"] is not None:
        tokens = f"{kv['largest_tokens']:,} tokens in {kv['largest_blocks']:,} blocks"
        how = "searched by compiling" if kv["searched"] else "what is left"
        rows.append((f"largest KV pool ({how}): {tokens}", f"{kv['largest_gib']:.2f}"))
    for what, gib in rows:
        table.add_row(what, gib)
    return table


def _step_table(found: dict[str, Any]) -> Any:
    from rich.table import Table

    context = found["steps"][0]["context"]
    table = Table(title=f"Step time at {context} tokens a row ({ESTIMATE})")
    for name in ("tokens", "rows", "ms", "tokens/s", "read GiB", "TFLOP"):
        table.add_column(name, justify="right")
    for step in found["steps"]:
        table.add_row(
            str(step["tokens"]),
            str(step["rows"]),
            f"{step['estimated_ms']:.2f}",
            f"{step['tokens_per_s']:,.0f}",
            f"{step['read_gib']:.2f}",
            f"{step['tflop']:.2f}",
        )
    return table
