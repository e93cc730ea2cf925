"""A crew of Ray actors with one engine each.  Needs the extra `ray`.

Ray is told to send no usage statistics; its own processes talk to each other over sockets, local
ones on one machine.
"""

import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import ray
from ray import exceptions

from jaxserve.config import EngineConfig
from jaxserve.offline.crew import Lost
from jaxserve.offline.job import JobOptions
from jaxserve.offline.jsonl import Line
from jaxserve.offline.worker import Answer
from jaxserve.request import SamplingParams

_NAMED = {"CPU": "num_cpus", "GPU": "num_gpus"}  # resources that Ray has arguments for


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What each actor makes its engine of.  Paths in it must lead to the same on every machine."""

    config: EngineConfig
    options: JobOptions
    defaults: SamplingParams
    any_model: bool = False


class EngineActor:
    """Runs in a process of its own."""

    def __init__(self, spec: WorkerSpec) -> None:
        from jaxserve.build import assemble
        from jaxserve.offline.parse import Parser, encoder
        from jaxserve.offline.worker import EngineWorker

        assembly = assemble(spec.config)
        encode = encoder(assembly.tokenizer, assembly.config, any_model=spec.any_model)
        self._worker = EngineWorker(assembly, Parser(spec.defaults, encode), spec.options)

    def exchange(self, lines: Sequence[Line]) -> Answer:
        return self._worker.exchange(lines)


class RayCrew:
    """`workers` actors.  A context manager: they are gone at its end."""

    def __init__(
        self,
        spec: WorkerSpec,
        workers: int | None = None,
        *,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        """`workers`: one for each machine of the cluster by default.  `resources` of each actor, by
        the names of Ray: {"CPU": 1} if none, or {"TPU": 4}.

        Joins the cluster that this process is connected to or that RAY_ADDRESS names; otherwise one
        is started here.
        """
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._started = not ray.is_initialized()
        if self._started:
            handler = signal.getsignal(signal.SIGTERM)
            ray.init(include_dashboard=False, configure_logging=False, log_to_driver=False)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray puts its own in the place of ours
        self._asked = dict(resources or {"CPU": 1.0})
        asked = dict(self._asked)
        arguments: dict[str, Any] = {
            name: asked.pop(key) for key, name in _NAMED.items() if key in asked
        }
        actor: Any = ray.remote(EngineActor)
        actor = actor.options(
            max_restarts=0, max_task_retries=0, resources=asked or None, **arguments
        )
        self._make: Callable[[WorkerSpec], Any] = actor.remote
        self._spec = spec
        self._actors: dict[int, Any] = {
            number: self._make(spec) for number in range(workers or _machines())
        }
        self._under_way: dict[Any, int] = {}  # reference -> member

    @property
    def members(self) -> Sequence[int]:
        return tuple(self._actors)

    def missing(self) -> dict[str, float]:
        """Resources that no machine has enough of: until one joins, actors do not start."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return {
            name: amount
            for name, amount in self._asked.items()
            if not any(node.get(name, 0.0) >= amount for node in nodes)
        }

    def send(self, member: int, lines: Sequence[Line]) -> None:
        reference = self._actors[member].exchange.remote(list(lines))
        self._under_way[reference] = member

    def wait(self, seconds: float) -> list[tuple[int, Answer | Lost]]:
        waiting = list(self._under_way)
        ended, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        if not ended:
            ended, _ = ray.wait(waiting, num_returns=1, timeout=seconds)
        return [(self._under_way.pop(reference), _answer(reference)) for reference in ended]

    def replace(self, member: int) -> None:
        ray.kill(self._actors[member], no_restart=True)  # it may only be out of reach
        self._actors[member] = self._make(self._spec)

    def close(self) -> None:
        """Idempotent."""
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors.clear()
        if self._started:
            ray.shutdown()
            self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _answer(reference: Any) -> Answer | Lost:
    try:
        return ray.get(reference)
    except exceptions.RayTaskError as error:  # the actor's own code, its start included
        return Lost(_last_line(error), for_good=True)
    except exceptions.ActorDiedError as error:
        return Lost(_last_line(error), for_good="creation task" in str(error))
    except exceptions.RayError as error:
        return Lost(_last_line(error))


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _machines() -> int:
    return max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
