"""What a simulation found, as a table for people."""

import io
from typing import Any

from rich.console import Console
from rich.table import Table


def text(report: dict[str, Any]) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, width=100, highlight=False)
    console.print(
        f"Simulated, costs of {report['costs']}: {report['requests']} requests in "
        f"{report['wall_s']:.2f} virtual seconds, {report['refused']} refused."
    )
    table = Table()
    for name in ("", "median", "P99", "most"):
        table.add_column(name, justify="right" if name else "left")
    for title, name, scale in (
        ("time to first token, ms", "ttft_s", 1e3),
        ("of it in the queue, ms", "queue_s", 1e3),
        ("time per output token, ms", "tpot_ms", 1.0),
        ("between two tokens, ms", "itl_ms", 1.0),
    ):
        values = [report[name][key] for key in ("p50", "p99", "max")]
        table.add_row(title, *("-" if v is None else f"{scale * v:,.1f}" for v in values))
    console.print(table)
    for line in _lines(report):
        console.print(line)
    return buffer.getvalue()


def _lines(report: dict[str, Any]) -> list[str]:
    good, kv = report["goodput"], report["kv"]
    lines = [
        f"throughput: {report['requests_per_s']:.2f} requests/s, "
        f"{report['output_tokens_per_s']:,.1f} output tokens/s, "
        f"{report['total_tokens_per_s']:,.1f} tokens/s",
        f"KV in use: {kv['mean']:.1%} on average, {kv['max']:.1%} at most; "
        f"{report['preemptions']} preemptions",
        f"device idle {report['device_idle_share']:.1%}; padding takes "
        f"{report['time_waste']:.1%} of its time",
    ]
    limits = [
        f"{name} {good[key]:g} ms"
        for name, key in (("TTFT", "slo_ttft_ms"), ("TPOT", "slo_tpot_ms"))
        if good[key] is not None
    ]
    if limits:
        rate = good["requests_per_s"]
        lines.append(
            f"goodput at {' and '.join(limits)}: {rate:.2f} requests/s, {good['share']:.1%}"
        )
    if report["budget_unused"]:
        reasons = sorted(report["budget_unused"].items(), key=lambda item: -item[1])
        parts = ", ".join(f"{why} {count / report['steps']:.0%}" for why, count in reasons)
        lines.append(f"steps that left budget unused, by reason: {parts}")
    return lines
