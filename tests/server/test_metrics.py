"""/metrics and the log: every figure against what was asked of the server."""

import io
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.config import ServerConfig
from jaxserve.metrics import StepRecord
from jaxserve.server import protocol
from jaxserve.server.exposition import OWN
from jaxserve.server.protocol import Entry, Finish, Gauges, Prefill, Refused, Stepped
from jaxserve.server.request_log import LogLines
from jaxserve.server.tally import Histogram, Tally
from tests.server.rig import MODEL, Rig, running, wait_for

DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana" / "jaxserve.json"
OPTIONS: dict[str, Any] = {"ignore_eos": True, "temperature": 0}


def scrape(server: Rig) -> dict[str, float]:
    """Values by sample, `name{label="value",...}` with vLLM's common labels left out."""
    values: dict[str, float] = {}
    answer = server.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            common = {"model_name": MODEL, "engine": "0"}
            labels = [
                f'{key}="{value}"'
                for key, value in sorted(sample.labels.items())
                if common.get(key) != value
            ]
            name = f"{sample.name}{{{','.join(labels)}}}" if labels else sample.name
            assert name not in values
            values[name] = sample.value
    return values


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def test_counts_are_those_of_the_requests(server: Rig):
    wait_for(server.is_idle)
    before = scrape(server)
    prompt = "metrics " * 12 + "end"
    for _ in range(2):  # the second finds a prefix
        body = {"prompt": prompt, "max_tokens": 10, "n": 3, **OPTIONS}
        assert server.post("/v1/completions", json=body).status_code == 200
    assert server.post("/v1/completions", json={"prompt": "x", "top_p": 9}).status_code == 400
    wait_for(server.is_idle)
    after = scrape(server)
    got = grown(before, after)
    tokens = len(prompt)
    assert got["vllm:prompt_tokens_total"] == 6 * tokens
    assert got["vllm:prefix_cache_queries_total"] == 6 * tokens
    hits = got["vllm:prefix_cache_hits_total"]
    assert hits == 5 * (tokens - 1) // 32 * 32 or hits >= 5 * 64
    assert got["jaxserve_prompt_computed_tokens_total"] == 6 * tokens - hits
    assert got["vllm:generation_tokens_total"] == 60
    assert got["jaxserve_decode_tokens_total"] >= 54  # the first ones come with the prefill
    assert got['vllm:request_success_total{finished_reason="length"}'] == 6
    for name, count in {
        "vllm:time_to_first_token_seconds": 6,
        "vllm:inter_token_latency_seconds": 54,
        "vllm:request_time_per_output_token_seconds": 6,
        "vllm:e2e_request_latency_seconds": 6,
        "vllm:request_queue_time_seconds": 6,
        "vllm:request_prefill_time_seconds": 6,
        "vllm:request_decode_time_seconds": 6,
        "jaxserve_request_prefill_steps": 6,
    }.items():
        assert got[f"{name}_count"] == count == got[f'{name}_bucket{{le="+Inf"}}'], name
    assert got["vllm:request_prompt_tokens_sum"] == 6 * tokens
    assert got["vllm:request_generation_tokens_sum"] == 60
    assert got["vllm:e2e_request_latency_seconds_sum"] > 0.002 * 10  # the fake's steps take 2 ms
    # Steps, cut by three measures, are the same steps.
    steps = got["jaxserve_step_device_seconds_count"]
    assert steps == sum(v for k, v in got.items() if k.startswith("jaxserve_steps_total{"))
    assert steps == sum(v for k, v in got.items() if k.startswith("jaxserve_bucket_steps_total{"))
    assert steps == got["vllm:iteration_tokens_total_count"]
    padded = sum(v for k, v in got.items() if k.startswith("jaxserve_bucket_padded_tokens_total{"))
    assert padded == got["jaxserve_padded_tokens_total"] > 0
    # All blocks that came into use were given back.
    assert got["jaxserve_kv_allocated_blocks_total"] == got["jaxserve_kv_freed_blocks_total"] > 0
    assert after["jaxserve_kv_used_blocks"] == after["vllm:kv_cache_usage_perc"] == 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    # Why the budget was not used up: almost always for want of work.
    prefix = "jaxserve_budget_unused_steps_total{reason="
    reasons = {k.split('"')[1]: v for k, v in got.items() if k.startswith(prefix) and v}
    assert sum(reasons.values()) == steps
    assert set(reasons) <= {"no_work", "snap", "host_not_ready"} and reasons["no_work"] > steps / 2
    budget = after["jaxserve_token_budget"]
    tokens_done = got["vllm:iteration_tokens_total_sum"]
    unused = sum(v for k, v in got.items() if k.startswith("jaxserve_budget_unused_tokens_total{"))
    assert unused == budget * steps - tokens_done
    assert got['jaxserve_http_answers_total{route="/v1/completions",status="200"}'] == 2
    assert got['jaxserve_http_answers_total{route="/v1/completions",status="400"}'] == 1
    assert after['jaxserve_engine_state{state="idle"}'] == 1
    assert after["jaxserve_compiles_after_warmup_total"] == 0
    assert after["jaxserve_engine_starts_total"] == 1
    assert after['jaxserve_program_info{program="backbone[64]",why="fake"}'] == 1
    assert after['jaxserve_program_run_seconds{program="backbone[64]"}'] == 0.002


def test_load_and_ends_from_outside_are_seen(slow_server: Rig):
    server = slow_server
    before = scrape(server)
    with server.client() as client:
        long = client.completions.create(
            model=MODEL, prompt="long", stream=True, max_tokens=250, extra_body={"ignore_eos": True}
        )
        next(iter(long))
        during = scrape(server)
        assert during["vllm:num_requests_running"] == 1
        assert during["vllm:kv_cache_usage_perc"] > 0
        long.close()
        wait_for(server.is_idle)
        text = server.canary()
        client.completions.create(
            model=MODEL, prompt="canary", stop=[text[2:4]], temperature=0, max_tokens=8
        )
    got = grown(before, scrape(server))
    assert got['vllm:request_success_total{finished_reason="abort"}'] == 1
    assert got['vllm:request_success_total{finished_reason="stop"}'] >= 1  # found by the front
    assert server.engine.tally.num_open == 0


def test_a_prefix_is_chosen_and_openmetrics_is_spoken(tmp_path: Path):
    with running(tmp_path, server={"metrics_prefix": "our_", "log_requests": False}) as rig:
        names = set(scrape(rig))
        answer = rig.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert "our_num_requests_running" in names and OWN + "kv_blocks" in names
    assert not any(name.startswith("vllm:") for name in names)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize("prefix", ["9a", "a b", "a\n", "x" * 65, 'a"'])
def test_a_prefix_that_is_no_name_is_refused(prefix: str):
    with pytest.raises(ValueError, match="server.metrics_prefix"):
        ServerConfig(metrics_prefix=prefix)


def test_metrics_ask_for_the_key(tmp_path: Path):
    from jaxserve.server.keys import Keys

    with running(tmp_path, keys=Keys(["sesame"])) as rig:
        assert rig.get("/metrics").status_code == 401
        answer = rig.get("/metrics", headers={"authorization": "Bearer sesame"})
        assert answer.status_code == 200


def test_every_metric_of_the_dashboard_exists(server: Rig):
    server.canary()
    names = {name.partition("{")[0] for name in scrape(server)}
    dashboard = json.loads(DASHBOARD.read_text())
    (prefix,) = [v["query"] for v in dashboard["templating"]["list"] if v["name"] == "prefix"]
    expressions = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", ())]
    assert len(expressions) > 25
    used: set[str] = set()
    for expression in expressions:
        found = re.findall(r"\$\{prefix\}\w+|\b(?:jaxserve|process)_\w+", expression)
        assert found, expression
        used |= {name.replace("${prefix}", prefix) for name in found}
    assert used <= names
    # Nothing that the issue names is left out of the dashboard, nor of /metrics.
    families = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in used}
    assert families >= {
        *("vllm:prompt_tokens", "jaxserve_prompt_computed_tokens", "jaxserve_step_prefill_tokens"),
        *("jaxserve_partial_prefills", "vllm:request_queue_time_seconds"),
        *("vllm:request_prefill_time_seconds", "jaxserve_request_prefill_steps"),
        *("jaxserve_decode_tokens", "jaxserve_decode_mixed_tokens", "vllm:num_preemptions"),
        *("jaxserve_kv_allocated_blocks", "jaxserve_kv_freed_blocks"),
        *("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"),
        *("vllm:request_time_per_output_token_seconds", "jaxserve_step_device_seconds"),
        *("jaxserve_budget_unused_steps", "jaxserve_bucket_padded_tokens"),
        *("jaxserve_bucket_padding_seconds", "jaxserve_compiles_after_warmup"),
        "jaxserve_program_run_seconds",
    }


def test_panels_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def lines(err: str, event: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == event]


def test_a_line_a_request_and_a_line_an_interval(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with running(tmp_path, server={"log_interval_s": 0.05}) as rig:
        capfd.readouterr()
        body = {"prompt": "secret prompt", "max_tokens": 60, **OPTIONS}
        answer = rig.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
        rig.get("/v1/models/a%0Ab")
        assert rig.get("/metrics").status_code == rig.get("/ready").status_code == 200
        rig.get("/nowhere/" + "x" * 99)
        wait_for(rig.is_idle)
        time.sleep(0.5)  # some intervals
    err = capfd.readouterr().err
    first, second, third = lines(err, "request")  # none about /metrics and /ready
    seconds, ttft = first.pop("seconds"), first.pop("ttft_s")
    assert 0.06 < ttft + 0.06 < seconds < 20
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    assert first == {
        **{"event": "request", "request_id": "mine", "method": "POST", "status": 200},
        **{"route": "/v1/completions", "complete": True, "stream": False, "samples": 1},
        **{"prompt_tokens": 13, "cached_tokens": 0, "output_tokens": 60},
        "finish_reasons": ["length"],
    }
    assert (second["route"], second["status"]) == ("/v1/models/{name}", 404)
    assert re.fullmatch(r"[0-9a-f]{32}", second["request_id"])
    assert (third["route"], third["status"]) == ("other", 404)
    intervals = lines(err, "interval")
    assert intervals
    assert sum(line["steps"] for line in intervals) >= 60
    for line in intervals:
        assert line["seconds"] >= 0.05 and 0 < line["budget_use"] <= 1 and line["step_ms"] > 0
    assert "secret" not in err and "Traceback" not in err


def test_a_reader_of_the_log_that_stands_still_holds_up_nobody(monkeypatch: pytest.MonkeyPatch):
    """Each line is written or counted as dropped."""
    goes_on, written = threading.Event(), io.StringIO()

    class Still(io.StringIO):
        def write(self, text: str) -> int:
            assert goes_on.wait(60)
            return written.write(text)

    monkeypatch.setattr("sys.stderr", Still())
    log = LogLines(most=10)
    for number in range(100):
        log.write({"event": "request", "number": number})
    goes_on.set()
    wait_for(lambda: log._waiting.empty())
    log.write({"event": "request", "number": 100})
    log.close(60)
    whole = written.getvalue()
    numbers = [line["number"] for line in lines(whole, "request")]
    dropped = sum(line["count"] for line in lines(whole, "dropped_lines"))
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] == 100
    assert 10 <= len(numbers) <= 20 and len(numbers) + dropped == 101


def test_a_client_that_goes_leaves_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with running(tmp_path) as rig:
        body = {"prompt": "a", "max_tokens": 250, "stream": True, **OPTIONS}
        with rig.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        wait_for(rig.is_idle)
        wait_for(lambda: rig.engine.tally.http["/v1/completions", 200] == 1)
    (line,) = lines(capfd.readouterr().err, "request")[-1:]
    assert (line["complete"], line["finish_reasons"], line["stream"]) == (False, ["abort"], True)


def test_a_histogram_counts_every_value_once():
    histogram = Histogram((1, 2.5, 5))
    for value in (0, 1, 1.1, 2.5, 5, 5.1, 1e9):
        histogram.add(value)
    assert histogram.cumulative() == [2, 4, 5, 7]
    assert histogram.count == 7
    assert histogram.sum == pytest.approx(0 + 1 + 1.1 + 2.5 + 5 + 5.1 + 1e9)


def stepped(*entries: Entry) -> Stepped:
    return Stepped(list(entries), list[StepRecord](), Gauges())


def test_a_tally_forgets_every_request_however_it_ends():
    now = [10.0]
    tally = Tally(lambda: now[0])
    three = protocol.Add(5, protocol.pack_ids([1, 2]), protocol.SamplingParams(n=3), 0, "")
    tally.sent(three)
    tally.sent(protocol.Add(8, protocol.pack_ids([1]), protocol.SamplingParams(), 0, ""))
    tally.refused(Refused(5, "no", True))
    assert tally.num_open == 1 and tally.requests.finished == {"error": 3}
    now[0] = 10.5
    tally.stepped(stepped(Entry(8, (7,), prefill=Prefill(0.1, 0.4, 2)), Entry(99, (1,))))
    now[0] = 11.5
    tally.stepped(stepped(Entry(8, (7, 8), "stop")))
    seen = tally.requests
    assert (seen.ttft.sum, seen.between_tokens.sum, seen.whole.sum) == (0.5, 1.0, 1.5)
    assert (seen.per_token.sum, seen.decode.sum) == (0.5, 1.0)
    assert (seen.prompt_tokens.sum, seen.output_tokens.sum) == (1, 3)
    assert (seen.prefill_wait.sum, seen.prefill_compute.sum) == (0.1, 0.4)
    tally.sent(three)
    tally.sent(Finish([6], "abort"))
    tally.lost()
    assert tally.num_open == 0
    assert seen.finished == {"error": 5, "stop": 1, "abort": 1}
    assert seen.whole.count == 1  # of those that ended by themselves
