"""`/metrics`: what is counted, in the form of Prometheus.

Metrics that mean the same in vLLM have its names and labels, behind `server.metrics_prefix`; the
others begin with jaxserve_.  Values are read when somebody asks.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxserve.server.engine_client import State
from jaxserve.server.service import Service
from jaxserve.server.tally import Histogram

OWN = "jaxserve_"


class Exposition:
    """One registry, of this server alone."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(service))
        ProcessCollector(registry=self._registry)  # of the front

    def encode(self, accept: str) -> tuple[bytes, str]:
        """The text, and its content type, which `accept` (a header) may choose."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _Collector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service
        config = service.engine.config
        self._prefix = config.server.metrics_prefix
        self._labels = {"model_name": service.names[0], "engine": "0"}

    def describe(self) -> Iterable[Metric]:
        return []  # so that registering asks for nothing

    def collect(self) -> Iterator[Metric]:
        yield from self._load()
        yield from self._requests()
        yield from self._steps()
        yield from self._time()
        yield from self._kv()
        yield from self._programs()
        yield from self._server()

    # -- in vLLM too -----------------------------------------------------------------------------

    def _load(self) -> Iterator[Metric]:
        gauges, totals = self._service.engine.gauges, self._service.engine.tally.steps.totals
        yield self._gauge("num_requests_running", "Samples that have a seat.", gauges.running)
        yield self._gauge("num_requests_waiting", "Samples that wait for one.", gauges.waiting)
        usage = gauges.kv_used / gauges.kv_blocks if gauges.kv_blocks else 0.0
        yield self._gauge("kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1.", usage)
        hits = totals.hit_tokens
        for name, text, value in (
            (
                "prompt_tokens",
                "Prompt tokens done, prefix hits included.",
                totals.prefill_tokens + hits,
            ),
            ("generation_tokens", "Tokens generated.", totals.output_tokens),
            ("num_preemptions", "Requests that lost their seat.", totals.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", totals.query_tokens),
            ("prefix_cache_hits", "Prompt tokens found.", hits),
        ):
            yield self._counter(name, text, value)
        steps = self._service.engine.tally.steps
        yield self._histogram("iteration_tokens_total", "Tokens of a step.", steps.tokens)
        cache = self._service.engine.config.cache
        yield InfoMetricFamily(
            f"{self._prefix}cache_config",
            "The KV pool.",
            {
                **self._labels,
                "block_size": str(cache.block_size),
                "num_gpu_blocks": str(gauges.kv_blocks),
                "enable_prefix_caching": str(cache.prefix_caching),
            },
        )

    def _requests(self) -> Iterator[Metric]:
        seen = self._service.engine.tally.requests
        ended = CounterMetricFamily(
            f"{self._prefix}request_success",
            "Samples of HTTP requests that have ended, by reason (as vLLM, all of them).",
            labels=[*self._labels, "finished_reason"],
        )
        for reason in ("stop", "length", "abort", "error"):
            ended.add_metric([*self._labels.values(), reason], seen.finished[reason])
        yield ended
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From submission to the first token.", seen.ttft),
            ("inter_token_latency_seconds", "Between two tokens.", seen.between_tokens),
            (
                "request_time_per_output_token_seconds",
                "Mean of a request, without the first.",
                seen.per_token,
            ),
            ("e2e_request_latency_seconds", "From submission to the end.", seen.whole),
            ("request_queue_time_seconds", "Wait for a seat.", seen.prefill_wait),
            (
                "request_prefill_time_seconds",
                "From a seat to the first token.",
                seen.prefill_compute,
            ),
            ("request_decode_time_seconds", "From the first token to the last.", seen.decode),
            ("request_prompt_tokens", "Tokens of a prompt.", seen.prompt_tokens),
            ("request_generation_tokens", "Tokens generated for a sample.", seen.output_tokens),
        ):
            yield self._histogram(name, text, histogram)

    # -- ours ------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[Metric]:
        tally = self._service.engine.tally
        steps, totals = tally.steps, tally.steps.totals
        for name, text, value in (
            (
                "prompt_computed_tokens",
                "Prompt tokens computed for the first time.",
                totals.prefill_tokens,
            ),
            (
                "recomputed_tokens",
                "Tokens computed again after a preemption.",
                totals.recomputed_tokens,
            ),
            (
                "prefix_resume_hit_tokens",
                "Found in the cache by preempted requests.",
                totals.resume_hit_tokens,
            ),
            ("decode_tokens", "Tokens of decodes.", totals.decode_tokens),
            (
                "decode_mixed_tokens",
                "Those with a prefill in the same step.",
                steps.mixed_decode_tokens,
            ),
            ("padded_tokens", "Places of compiled shapes without a token.", totals.padded_tokens),
            (
                "dropped_tokens",
                "Sampled for requests that had ended or lost their seat.",
                totals.dropped_tokens,
            ),
            (
                "partial_prefills",
                "Chunks that did not complete their prompt.",
                totals.partial_prefills,
            ),
            (
                "failed_steps",
                "Steps that raised, since the engine's start.",
                self._service.engine.gauges.failed_steps,
            ),
        ):
            yield _counter(name, text, value)
        yield _counters(
            "steps",
            "Steps by what they did.",
            "kind",
            {kind: steps.kinds[kind] for kind in ("decode", "prefill", "mixed")},
        )
        budgets = {reason: count for reason, count in totals.unused.items() if reason != "full"}
        yield _counters(
            "budget_unused_steps", "Steps below the token budget, by reason.", "reason", budgets
        )
        yield _counters(
            "budget_unused_tokens", "What they were below it.", "reason", steps.unused_tokens
        )
        yield _gauge("token_budget", "Most tokens in a step.", tally.budget)
        yield _histogram(
            "step_prefill_tokens", "Prefill tokens of a step that has some.", steps.prefill_tokens
        )
        yield _histogram(
            "request_prefill_steps", "Steps until the first token.", tally.requests.prefill_steps
        )

    def _time(self) -> Iterator[Metric]:
        steps = self._service.engine.tally.steps
        yield _histogram("step_device_seconds", "Time of a step on the device.", steps.device_s)
        parts = ("schedule", "build", "dispatch", "wait", "update")
        yield _counters(
            "step_host_seconds",
            "Time of the engine's loop by part.",
            "part",
            {part: getattr(steps.totals, f"{part}_s") for part in parts},
        )
        buckets = steps.by_bucket
        for name, text, field in (
            ("bucket_steps", "Steps by token bucket.", "steps"),
            ("bucket_padded_tokens", "Padded tokens by token bucket.", "padded_tokens"),
            ("bucket_padding_seconds", "Device time that padding cost.", "padding_s"),
            ("bucket_device_seconds", "Device time by token bucket.", "device_s"),
        ):
            values = {str(bucket): getattr(buckets[bucket], field) for bucket in sorted(buckets)}
            yield _counters(name, text, "bucket", values)

    def _kv(self) -> Iterator[Metric]:
        gauges = self._service.engine.gauges
        yield _gauge("kv_blocks", "Blocks of the KV pool.", gauges.kv_blocks)
        yield _gauge("kv_used_blocks", "Blocks that requests hold.", gauges.kv_used)
        text = "Blocks that came into use, since the engine's start."
        yield _counter("kv_allocated_blocks", text, gauges.kv_allocated)
        text = "Blocks that nobody holds any more, since the engine's start."
        yield _counter("kv_freed_blocks", text, gauges.kv_allocated - gauges.kv_used)

    def _programs(self) -> Iterator[Metric]:
        engine = self._service.engine
        yield _counter(
            "compiles_after_warmup",
            "Compilations while serving; there must be none.",
            engine.gauges.compiles,
        )
        table = InfoMetricFamily(f"{OWN}program", "The program table.", labels=["program", "why"])
        runs = GaugeMetricFamily(
            f"{OWN}program_run_seconds", "One run, as warm-up measured it.", labels=["program"]
        )
        compiles = GaugeMetricFamily(
            f"{OWN}program_compile_seconds", "Compiling or loading it.", labels=["program"]
        )
        for program in engine.programs:
            table.add_metric([], {"program": program.name, "why": program.why})
            runs.add_metric([program.name], program.run_s)
            compiles.add_metric([program.name], program.compile_s)
        yield from (table, runs, compiles)

    def _server(self) -> Iterator[Metric]:
        service = self._service
        state = GaugeMetricFamily(
            f"{OWN}engine_state", "1 for the state it is in.", labels=["state"]
        )
        for name in State:
            state.add_metric([name.value], float(service.engine.state is name))
        yield state
        yield _counter("engine_starts", "Engines that became ready.", service.engine.num_starts)
        yield _gauge(
            "queued_samples",
            "Samples without a first token, as the front counts them.",
            service.engine.num_queued,
        )
        answers = CounterMetricFamily(
            f"{OWN}http_answers", "Answers by route and status.", labels=["route", "status"]
        )
        for (route, status), count in sorted(service.engine.tally.http.items()):
            answers.add_metric([route, str(status)], count)
        yield answers

    # -- with vLLM's labels ----------------------------------------------------------------------

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        return _filled(self._prefix + name, text, histogram, self._labels)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(OWN + name, text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(OWN + name, text, value)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(OWN + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return _filled(OWN + name, text, histogram, {})


def _filled(name: str, text: str, histogram: Histogram, labels: Mapping[str, str]) -> Metric:
    family: Any = HistogramMetricFamily(name, text, labels=list(labels))
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, histogram.cumulative(), strict=True))
    family.add_metric(list(labels.values()), buckets, histogram.sum)
    return family
