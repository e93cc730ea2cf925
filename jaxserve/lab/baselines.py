"""Schedulers to compare with, for simulations alone: what others do, or half of what ours does.

They are rules of choosing over the production scheduler: a step takes either decodes or prefills.
"""

from collections.abc import Callable
from typing import Any

from jaxserve.engine import Engine
from jaxserve.request import Request
from jaxserve.scheduler.plan import Draft, Plan
from jaxserve.scheduler.scheduler import Scheduler


class Unmixed(Scheduler):
    """Chunked prefills without mixing: a chunk, a step of decodes, a chunk, ..."""

    _prefills_now = False

    def schedule(self, begin: float = 0.0) -> Plan:
        self._prefills_now = self._next_is_prefill()
        plan = super().schedule(begin)
        if not plan.num_tokens:  # nobody fits, or nobody decodes
            self._prefills_now = not self._prefills_now
            plan = super().schedule(begin)
        return plan

    def _next_is_prefill(self) -> bool:
        return not self._prefills_now

    def _take_decodes(self, draft: Draft) -> None:
        if not self._prefills_now:
            super()._take_decodes(draft)

    def _take_prefills(self, draft: Draft, partial: list[Request], admit: bool) -> None:
        if self._prefills_now:
            super()._take_prefills(draft, partial, admit)


class PrefillFirst(Unmixed):
    """Whole prompts before any decode, as vLLM did before it chunked and Orca's iterations allow:
    running streams stall until nobody waits who fits."""

    def _next_is_prefill(self) -> bool:
        return True

    def _chunk_size(self, request: Request, start: int, draft: Draft) -> int:
        pending = request.num_tokens - start
        return pending if pending <= draft.left else 0


def engine_with(scheduler: type[Scheduler]) -> Callable[..., Engine]:
    """An engine of these rules, made as `Engine` is."""

    def make(*args: Any, **options: Any) -> Engine:
        engine = Engine(*args, **options)
        engine.scheduler = scheduler(engine.config, engine.kv)
        return engine

    return make


ENGINES: dict[str, Callable[..., Engine]] = {
    "production": Engine,
    "prefill-first": engine_with(PrefillFirst),
    "unmixed": engine_with(Unmixed),
}
