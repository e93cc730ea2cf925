"""Preflight: what compiling every program for a target says about a config.  No jax here: each
compile runs in a child process, since compilers abort.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from jaxserve.kv.groups import longest_row, row_blocks
from jaxserve.preflight.child import CARRIES_KV, Job
from jaxserve.preflight.target import Target
from jaxserve.runner.memory import GIB, HEADROOM

_TIMEOUT_S = 1800  # of one child without a word
_CAUSE = re.compile(r"\w*(Error|Exception)\b|LLVM ERROR|F\d{4} |.*Check failed")
Notice = Callable[[str], None]


class PreflightError(ValueError):
    """Model, config and target do not go together: one line for the user."""


@dataclasses.dataclass
class Result:
    """The plan, and the facts of each program in the order in which they were compiled."""

    target: Target
    plan: dict[str, Any]
    programs: list[dict[str, Any]]

    @property
    def with_kv(self) -> list[dict[str, Any]]:
        """Programs that update the KV."""
        return [p for p in self.programs if p.get("kind") in CARRIES_KV]


def compile_all(job: Job, notice: Notice = lambda line: None) -> Result:
    """Compiles all programs of a job; a child that dies costs its program, not the run.

    Raises PreflightError when there is nothing to compile.
    """
    from jaxserve.preflight.target import parse

    plan: dict[str, Any] | None = None
    programs: list[dict[str, Any]] = []
    while True:
        died = None
        for line in _child(job):
            if "plan" in line:
                plan = plan or line["plan"]
            elif "begin" in line:
                died = line["begin"]
                notice(f"compiling {died}")
            elif "died" in line:
                break
            else:
                programs.append(line)
                died = None
        else:
            break
        reason = line["died"]
        if plan is None:
            raise PreflightError(reason)
        if died is None:
            raise PreflightError(f"the compiler ended between two programs: {reason}")
        programs.append({"name": died, "error": f"the compiler died: {reason}"})
        done = {program["name"] for program in programs}
        wanted = plan["programs"] if job.only is None else job.only
        left = [name for name in wanted if name not in done]
        if not left:
            break
        job = dataclasses.replace(job, only=left)
    assert plan is not None
    return Result(parse(job.target), plan, programs)


def _child(job: Job) -> Iterator[dict[str, Any]]:
    """The lines of one child; `{"died": why}` last when it did not end well."""
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "jaxserve.preflight.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps(dataclasses.asdict(job)))
            child.stdin.close()
            for line in child.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            code = child.wait(_TIMEOUT_S)
        except BrokenPipeError:
            code = child.wait(_TIMEOUT_S)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            child.stdout.close()
        if code:
            errors.seek(0)
            yield {"died": _last_line(errors.read(), code)}


def _last_line(text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    picked = [line for line in lines if _CAUSE.match(line)]
    line = (picked or lines or ["no message"])[-1]
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    message = line.removeprefix("ValueError: ")
    return message if code == 1 and line.startswith("ValueError: ") else f"{message} ({ended})"


def usable_bytes(target: Target) -> int | None:
    """Bytes of one device that may be planned for; None where nobody knows."""
    gib = target.figures.get("hbm_gib")
    return int(gib * GIB * HEADROOM) if gib else None


def largest_pool(result: Result) -> int | None:
    """Blocks of KV that weights, state and the programs' scratch leave; None where nobody knows."""
    usable = usable_bytes(result.target)
    if usable is None:
        return None
    plan = result.plan
    free = usable - plan["weight_bytes"] - plan["state_bytes"] - scratch_bytes(result)
    return max(0, free // plan["block_bytes"])


def largest_programs(names: list[str]) -> list[str]:
    """Of each kind the program of the largest bucket."""
    largest: dict[str, int] = {}
    for name in names:
        kind, _, bucket = name.rstrip("]").partition("[")
        largest[kind] = max(largest.get(kind, 0), int(bucket))
    return [f"{kind}[{bucket}]" for kind, bucket in largest.items()]


def search_largest(job: Job, result: Result, notice: Notice = lambda line: None) -> int:
    """Blocks of the largest pool with which the largest backbone compiles, to 1 %.

    Where the compiler knows no limit (GPU, CPU) it is what memory leaves.
    """
    upper = largest_pool(result)
    if upper is None:
        raise PreflightError(f"--max-kv: nobody knows how much memory {result.target} has")
    if result.target.platform != "tpu" or not upper:
        return upper
    name = next(n for n in largest_programs(result.plan["programs"]) if n.startswith("backbone"))

    def compiles(blocks: int) -> bool:
        notice(f"{name} with {blocks} blocks")
        trial = dataclasses.replace(job, num_blocks=blocks, only=[name], bundle="")
        return all("error" not in program for program in compile_all(trial, notice).programs)

    low, high = 0, upper + 1
    while high - low > max(1, upper // 100):
        middle = upper if high == upper + 1 and not low else (low + high) // 2
        low, high = (middle, high) if compiles(middle) else (low, middle)
        if low == upper:
            break
    return low


def scratch_bytes(result: Result) -> int:
    """Of the program that needs most, and of the outputs that exist beside it."""
    memory = [p["memory"] for p in result.programs if "memory" in p]
    outputs = [m["outputs"] - m["aliased"] for m in memory]
    return max((m["temp"] for m in memory), default=0) + max([0, *outputs])


def problems(result: Result) -> list[str]:
    """What is wrong, each with what to change; [] when the config fits."""
    plan, found = result.plan, []
    for program in result.programs:
        if "error" in program:
            found.append(f"{program['name']} does not compile: {program['error']}")
    pool = result.plan["num_blocks"] * plan["block_bytes"]
    for program in result.with_kv:
        aliased, copies = program["memory"]["aliased"], program["kv_copies"]
        if aliased < pool:
            found.append(
                f"{program['name']} does not update the KV in place: {aliased} bytes are aliased, "
                f"the KV has {pool}"
            )
        if copies:
            found.append(
                f"{program['name']} copies the whole KV {len(copies)} times a step "
                f"({', '.join(copies[:3])})"
            )
    return found + _memory_problems(result)


def warnings(result: Result) -> list[str]:
    """What fits, but is slower than it need be."""
    return [
        f"{program['name']} copies weights in each step: {', '.join(program['weight_copies'][:3])}"
        for program in result.programs
        if program.get("weight_copies")
    ]


def _memory_problems(result: Result) -> list[str]:
    plan, pool = result.plan, largest_pool(result)
    if pool is None:
        return []
    needed = plan["asked_blocks"] or row_blocks(
        plan["windows"], plan["max_len"], plan["block_size"], plan["max_chunk"]
    )
    if pool >= needed:
        return []
    usable = usable_bytes(result.target)
    assert usable is not None
    over = needed * plan["block_bytes"] - pool * plan["block_bytes"]
    what = "cache" if plan["asked_blocks"] else f"one request of model.max_len={plan['max_len']}"
    return [
        f"a device can plan for {usable / GIB:.2f} GiB: weights take "
        f"{plan['weight_bytes'] / GIB:.2f}, scratch and state "
        f"{(scratch_bytes(result) + plan['state_bytes']) / GIB:.2f}, {what} needs "
        f"{needed * plan['block_bytes'] / GIB:.2f} GiB of KV: {over / GIB:.2f} too many"
    ]


def advice(result: Result) -> list[str]:
    """What to change when it does not fit, most effective first."""
    if not _memory_problems(result):
        return []
    plan, usable = result.plan, usable_bytes(result.target)
    assert usable is not None
    pool, found = largest_pool(result) or 0, []
    tensor = plan["tensor"]
    if plan["weight_bytes"] > usable // 2:
        need = 2 * tensor
        while plan["weight_bytes"] * tensor / need > usable // 2:
            need *= 2
        found.append(f"more chips: mesh.tensor={need} leaves half of each for the KV")
    if plan["asked_blocks"] and pool:
        found.append(f"a smaller pool: cache.num_blocks={pool} (or leave it at 0)")
    elif pool:
        longest = longest_row(
            tuple(plan["windows"]), pool, plan["block_size"], plan["max_chunk"], plan["max_len"]
        )
        found.append(f"shorter requests: model.max_len={longest}")
    if scratch_bytes(result) > usable // 10:
        found.append(f"a smaller scheduler.token_budget than {plan['token_budget']}")
    if plan["dtype"] == "float32":
        found.append("model.dtype=bfloat16: half the weights")
    if plan["kv_dtype"] == "float32":
        found.append("cache.dtype=bfloat16: half the KV")
    return found or ["a chip with more memory, or a smaller model"]
