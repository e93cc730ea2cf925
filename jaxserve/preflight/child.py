"""Run as a program: compiles the programs of one job, a line of JSON each; compilers may abort it.

stdin: one `Job` as JSON.  stdout: first the plan, then for each program `{"begin": name}` and its
facts, so that the parent knows in which program a compiler died.
"""

import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.preflight import target as targets

CARRIES_KV = ("backbone", "layer")  # kinds of programs that update the KV
_KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|mosaic_gpu)')


@dataclasses.dataclass(frozen=True)
class Job:
    """What one child does."""

    target: str
    settings: str  # the config as TOML
    hf_config: dict[str, Any]
    num_blocks: int = 0  # of the KV pool to compile with; 0: a large one that should fit
    only: list[str] | None = None  # names of programs; None: all; []: only the plan
    bundle: str = ""  # folder for serialised executables


def main() -> None:
    job = Job(**json.load(sys.stdin))
    target = targets.parse(job.target)
    from jaxserve import settings

    config = settings.loads(job.settings)
    targets.set_environment(target, config.mesh.data * config.mesh.tensor)
    for line in run(job, target, config):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def run(job: Job, target: targets.Target, config: Any) -> Iterator[dict[str, Any]]:
    """The lines for the parent."""
    import jax

    from jaxserve.preflight.abstract import make_plan

    jax.config.update("jax_enable_compilation_cache", False)  # compile times are wanted
    devices = targets.devices(target)
    plan = make_plan(config, job.hf_config, devices, target, job.num_blocks, exact=bool(job.bundle))
    yield {"plan": plan.facts()}
    for spec in plan.programs():
        if job.only is None or spec.name in job.only:
            yield {"begin": spec.name}
            yield _compile(spec, plan, target, devices[0], job.bundle)


def _compile(spec: Any, plan: Any, target: Any, device: Any, bundle: str) -> dict[str, Any]:
    import contextlib

    import jax

    from jaxserve.preflight import hlo
    from jaxserve.runner.programs import lower, memory_of

    # Mosaic GPU asks the default device for its architecture.
    gpu = jax.default_device(device) if target.platform == "cuda" else contextlib.nullcontext()
    start = time.perf_counter()
    try:
        with gpu:
            lowered = lower(spec, (target.platform,))
        lowered_at = time.perf_counter()
        compiled = lowered.compile(compiler_options=dict(spec.compiler_options) or None)
    except Exception as error:  # a compiler's own kinds; the message says what does not fit
        return {"name": spec.name, "error": " ".join(str(error).split())[:2000]}
    done = time.perf_counter()
    text = compiled.as_text() or ""
    weights = plan.weight_shapes()
    looked_for = spec.kind in CARRIES_KV and not bundle  # whose pool is of any number of blocks
    facts = {
        "name": spec.name,
        "kind": spec.kind,
        "bucket": spec.bucket,
        "lower_s": lowered_at - start,
        "compile_s": done - lowered_at,
        "memory": memory_of(compiled),
        "collectives": hlo.collectives(text),
        "kv_copies": hlo.kv_copies(text, plan.num_blocks) if looked_for else [],
        "weight_copies": hlo.weight_copies(text, weights),
        "kernels": len(_KERNEL.findall(text)),
    }
    if bundle:
        from jaxserve.runner import bundle as bundles

        facts["bundle_bytes"] = bundles.save(Path(bundle), spec, lowered, compiled)
    return facts


def largest_prime(limit: int) -> int:
    """The largest prime of at most `limit`: a number of blocks that nothing else is."""
    for candidate in range(limit, 2, -1):
        if candidate % 2 and all(candidate % d for d in range(3, math.isqrt(candidate) + 1, 2)):
            return candidate
    return max(1, limit)


if __name__ == "__main__":
    main()
