"""`jaxserve` in a process of its own, with the fake assembly, whose steps take 20 us a token of
their bucket; a workload with 13 prompt tokens on one line breaks the engine of budget 13."""

import sys
import time
import types

from jaxserve.cli.main import main
from jaxserve.costs import CostModel
from tests.cli import fakes


def assemble(config, **options):
    if config.scheduler.token_budget == 13:
        raise ValueError("thirteen is not a budget")
    made = fakes.assemble(config, **options)
    runner = made.runner
    answer = runner.dispatch

    def dispatch(batch):
        time.sleep(20e-6 * batch.token_bucket)
        return answer(batch)

    runner.dispatch = dispatch
    made.startup["compile"] = 0.25
    sizes = made.config.buckets.tokens
    made.engine.set_costs(CostModel(sizes, tuple(20e-6 * size for size in sizes)))
    return made


build = types.ModuleType("jaxserve.build")
build.assemble = assemble  # type: ignore[attr-defined]
sys.modules["jaxserve.build"] = build
sys.exit(main())
