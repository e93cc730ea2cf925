"""`jaxserve batch --ray`: the engines are Ray actors, this process owns journal and output."""

import argparse
import re
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common

if TYPE_CHECKING:
    from jaxserve.cli.batch_run import Work
    from jaxserve.offline.job import Sink
    from jaxserve.offline.progress import Progress
    from jaxserve.offline.stop import StopSignals

CREDIT_SEATS = 4  # lines an actor may hold, in multiples of max_seqs
_RESOURCES = re.compile(r"([A-Za-z][\w.:-]*)=(\d+(?:\.\d+)?)")


def add_options(group: Any) -> None:
    group.add_argument(
        "--ray",
        action="store_true",
        help="run on a Ray cluster (that of RAY_ADDRESS, else one on this machine); needs the "
        "extra ray",
    )
    group.add_argument(
        "--ray-workers", type=int, metavar="N", help="actors; default: one for each machine"
    )
    group.add_argument(
        "--ray-resources",
        type=_resources,
        metavar="NAME=X,...",
        help="of each actor, such as TPU=4 or CPU=8,GPU=1; default CPU=1",
    )


def check(args: argparse.Namespace) -> None:
    """Raises UsageError."""
    if not args.ray and (args.ray_workers is not None or args.ray_resources is not None):
        raise common.UsageError("--ray-workers and --ray-resources need --ray")
    common.check_at_least_one(args, "ray_workers")
    if args.ray and (args.record is not None or args.trace_out is not None):
        raise common.UsageError("--record and --trace-out are for one engine, not for --ray")
    if args.ray:
        import importlib.util

        if importlib.util.find_spec("ray") is None:
            raise common.UsageError("--ray needs ray: pip install 'jaxserve[ray]'")


class RayRunner:
    """As the runner of one engine (`cli.batch_run`), for several."""

    dtype = None  # of the actors, each of which may resolve `auto` by itself

    def __init__(self, work: "Work") -> None:
        common.start_logging(work.args.verbose)
        from jaxserve.offline.crew import CrewJob
        from jaxserve.offline.job import JobOptions
        from jaxserve.offline.ray_crew import RayCrew, WorkerSpec

        args = work.args
        spec = WorkerSpec(
            work.config,
            JobOptions(token_ids=args.token_ids, in_order=args.in_order),
            work.defaults,
            any_model=args.any_model,
        )
        self._lines = work.lines
        try:
            self._crew = RayCrew(spec, args.ray_workers, resources=args.ray_resources)
        except (OSError, RuntimeError, ValueError) as error:  # no such cluster, a wrong resource
            raise common.UsageError(f"--ray: {common.one_line(error)}") from error
        for name, most in self._crew.missing().items():
            common.note(f"no machine of the cluster has what an actor asks for: {name}={most:g}")
        credit = CREDIT_SEATS * work.config.scheduler.max_seqs
        self.job = CrewJob(self._crew, credit=credit, max_errors=args.max_errors)
        self.close = self._crew.close

    @property
    def redone(self) -> int:
        return self.job.redone

    def run(self, sink: "Sink", progress: "Progress", stop: "StopSignals") -> None:
        self.job.run(self._lines(), sink, progress, stop)


def _resources(text: str) -> dict[str, float]:
    found = [_RESOURCES.fullmatch(part.strip()) for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=X,... such as TPU=4")
    return {part[1]: float(part[2]) for part in found if part is not None}
