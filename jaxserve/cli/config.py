"""`jaxserve config`: the settings that would run."""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common

if TYPE_CHECKING:
    from jaxserve.build import Plan
    from jaxserve.config import EngineConfig

_GIB = 1 << 30


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "config",
        help="print the settings that would run, as TOML",
        description=(
            "Prints every setting, from defaults, --config and --set, as TOML, with everything "
            "derived that does not depend on the model; what does stays 0 or auto. Where the model "
            "is on this machine, comments say what those come to on a CPU (an accelerator's memory "
            "is measured at the start), and which programs there will be. Fetches and loads "
            "nothing."
        ),
        allow_abbrev=False,
    )
    common.add_engine_options(parser)
    common.add_deadline_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    config = common.read_config(args)
    from jaxserve import settings

    try:
        resolved = _resolve_without_model(config)
        plan = _plan(config)
    except (ValueError, OSError) as error:
        raise common.UsageError(common.one_line(error)) from error
    if plan is None:
        common.write_out(settings.dump(resolved))
    else:
        lines = [settings.dump(resolved, plan.config), *_describe(plan)]
        common.write_out("\n".join(lines) + "\n")
    return common.DONE


def _resolve_without_model(config: "EngineConfig") -> "EngineConfig":
    """Buckets and scheduler are resolved; the length and the pool are the model's business.

    Raises ValueError for settings that contradict each other.
    """
    from jaxserve.batch.buckets import resolve

    longest, smallest_block = config.model.max_len or 1 << 30, 1  # no model contradicts these
    resolved = resolve(config, longest, smallest_block)
    scheduler = resolved.scheduler
    if not config.model.max_len:  # the threshold is a share of the length
        threshold = config.scheduler.long_prefill_threshold
        scheduler = dataclasses.replace(scheduler, long_prefill_threshold=threshold)
    return dataclasses.replace(config, buckets=resolved.buckets, scheduler=scheduler)


def _plan(config: "EngineConfig") -> "Plan | None":
    """What the settings come to with the model; None where it is not on this machine.

    Raises ValueError when they do not go together.
    """
    from jaxserve import sources

    path = sources.local(config.model.name)
    if path is None:
        return None
    import jax

    jax.config.update("jax_platforms", "cpu")  # no device is taken from whoever uses it
    from jaxserve.build import plan
    from model_zoo.weights import open_checkpoint

    return plan(config, open_checkpoint(path).hf_config, where=path)


def _describe(plan: "Plan") -> Iterator[str]:
    """Comment lines: sizes, and programs by kind."""
    from jaxserve.kv.groups import context_tokens

    cache = plan.config.cache
    layout, max_len = plan.model_config.kv_layout, plan.config.model.max_len
    sizes = cache.num_blocks, cache.block_size, plan.config.max_chunk, max_len
    tokens = context_tokens(layout.windows, *sizes)
    yield f"# weights: {plan.weight_bytes / _GIB:.2f} GiB in {plan.config.model.dtype}"
    yield (
        f"# KV pool: {cache.num_blocks} blocks of {plan.block_bytes / 1024:.0f} KiB, "
        f"{cache.num_blocks * plan.block_bytes / _GIB:.2f} GiB, {tokens} tokens"
    )
    if any(layout.windows):
        windows = ", ".join(str(window or "all") for window in layout.windows)
        yield f"# groups of {layout.depth} layers, a block in each; positions they see: {windows}"
    yield f"# block table: {plan.config.scheduler.max_seqs} rows of {plan.blocks_per_row} blocks"
    specs = sorted(plan.step().specs(), key=lambda spec: (spec.kind, spec.bucket))
    yield f"# programs: {len(specs)}"
    for kind, group in itertools.groupby(specs, key=lambda spec: spec.kind):
        yield f"#   {kind}: {', '.join(str(spec.bucket) for spec in group)}"
