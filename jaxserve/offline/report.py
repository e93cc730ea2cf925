"""What work on engines cost, and how well it used them."""

import dataclasses
from typing import Any, Self

from jaxserve import metrics


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """Work of one or more engines; adds up."""

    engines: int = 0
    steps: int = 0
    device_s: float = 0.0
    padding_s: float = 0.0  # part of device_s
    tokens: int = 0  # computed, padding aside
    padded_tokens: int = 0
    recomputed_tokens: int = 0  # after a preemption
    hit_tokens: int = 0  # not computed: the prefix cache had them
    preemptions: int = 0

    @classmethod
    def of(cls, totals: metrics.Totals) -> Self:
        """Of one engine since its start."""
        t = totals
        return cls(
            engines=1,
            steps=t.steps,
            device_s=t.device_s,
            padding_s=t.padding_s,
            tokens=t.decode_tokens + t.prefill_tokens + t.recomputed_tokens,
            padded_tokens=t.padded_tokens,
            recomputed_tokens=t.recomputed_tokens,
            hit_tokens=t.hit_tokens,
            preemptions=t.preemptions,
        )

    def since(self, earlier: "EngineUse") -> "EngineUse":
        """The part that came after `earlier`, of the same engine."""
        parts = {
            field.name: getattr(self, field.name) - getattr(earlier, field.name)
            for field in dataclasses.fields(self)
        }
        return EngineUse(**parts | {"engines": self.engines})

    def __add__(self, other: "EngineUse") -> "EngineUse":
        return EngineUse(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in dataclasses.fields(self)
            }
        )

    def figures(self, seconds: float) -> dict[str, Any]:
        """`idle_share`: of the `seconds` the job had the engines, how much no step was on the
        device; `time_waste` and `token_waste`: of device time and of computed tokens, how much was
        padding."""
        available = seconds * max(1, self.engines)
        return {
            "engines": self.engines,
            "steps": self.steps,
            "idle_share": max(0.0, 1 - share(self.device_s, available)) if self.steps else 0.0,
            "time_waste": share(self.padding_s, self.device_s),
            "token_waste": share(self.padded_tokens, self.tokens + self.padded_tokens),
            "hit_tokens": self.hit_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "preemptions": self.preemptions,
        }


def cost(seconds: float, price_per_hour: float, output_tokens: int) -> dict[str, float | None]:
    """`seconds` of rented machine, its start included."""
    total = seconds / 3600 * price_per_hour
    return {
        "price_per_hour": price_per_hour,
        "cost": total,
        "cost_per_million_output_tokens": 1e6 * total / output_tokens if output_tokens else None,
    }


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
