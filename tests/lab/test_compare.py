"""`lab compare`: fresh processes, interleaved rounds, and a report that tells noise from change."""

import html.parser
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from jaxserve import settings
from jaxserve.kv.groups import row_blocks
from jaxserve.lab import bench_process, compare, compare_html, compare_text, page_parts
from jaxserve.lab.compare import Comparison, Run, RunFailed, Variant
from tests.cli.test_bench import lines, write
from tests.lab.rigs import Rig, prompt
from tests.lab.test_record import config

ROOT = Path(__file__).parent.parent.parent
FAKE = (sys.executable, str(Path(__file__).parent / "fake_jaxserve.py"))


def report(speed: float, **more) -> dict:
    return {
        "output_tokens_per_s": speed,
        "ttft_s": {"p50": 1 / speed, "p99": 2 / speed},
        "time_waste": 0.0,
        "budget_unused": {"no_work": 3},
        "programs": 9,
        "startup": {"compile": 4.0},
        "startup_s": 6.0,
        "peak_rss_mb": 100.0,
        **more,
    }


@pytest.fixture(scope="module")
def trace_of_a_run(tmp_path_factory: pytest.TempPathFactory):
    rig = Rig(tmp_path_factory.mktemp("run") / "t", config())
    for i in range(12):
        rig.add(prompt(20 + 5 * i, i), 20)
    rig.run()
    return rig.trace()


def compared(trace, speeds: dict[str, list[float]], main: str = "output tokens/s") -> Comparison:
    runs = {
        name: [
            Run(report(speed, peak_rss_mb=100.0 + 900 * (n == 0)), trace, n == 0)
            for n, speed in enumerate(values)
        ]
        for name, values in speeds.items()
    }
    return compare.compare("W", runs, {}, main)


def test_every_round_runs_all_and_none_always_follows_the_same_other():
    for count, rounds in itertools.product((2, 3, 5), (1, 4, 10)):
        found = compare.order(count, rounds)
        assert [sorted(line) for line in found] == [list(range(count))] * rounds
        if rounds >= 4:
            assert len({line[0] for line in found}) > 1
            before = {(a, b) for line in found for a, b in itertools.pairwise(line)}
            assert all((b, a) in before for a, b in before)


def test_sweeps_multiply():
    found = compare.variants([Path("a.toml"), Path("b.toml")], ["scheduler.token_budget=256,512"])
    assert [v.name for v in found] == [
        "a token_budget=256",
        "a token_budget=512",
        "b token_budget=256",
        "b token_budget=512",
    ]
    assert found[1].options == ("--config", "a.toml", "--set", "scheduler.token_budget=512")
    lists = compare.variants([], ["buckets.tokens=[8,64],[16,64]"])
    assert [v.options[1] for v in lists] == ["buckets.tokens=[8,64]", "buckets.tokens=[16,64]"]
    assert [v.name for v in compare.variants([Path("x/a.toml"), Path("y/a.toml")], [])] == [
        "x/a.toml",
        "y/a.toml",
    ]
    for bad in ("budget=1", "scheduler.token_budget", "scheduler.token_budget=1,,2"):
        with pytest.raises(ValueError, match="--sweep"):
            compare.variants([], [bad])


def test_a_difference_is_told_from_noise(trace_of_a_run):
    found = compared(
        trace_of_a_run,
        {
            "base": [100.0, 80.0, 120.0],  # drift, the same for all
            "fast": [121.0, 96.5, 144.0],
            "same": [100.5, 79.5, 121.0],
        },
    )
    base, fast, same = (r.figures["output tokens/s"] for r in found.results)
    assert base.versus is None
    assert (
        fast.versus and fast.versus.differs and fast.versus.change == pytest.approx(0.2, abs=0.02)
    )
    assert same.versus and not same.versus.differs
    assert ": better" in found.verdicts[0] and "noise" in found.verdicts[1]
    ttft = found.results[1].figures["TTFT p50"].versus
    assert ttft is not None and ttft.change < 0 and ttft.differs
    assert found.results[0].figures["host memory"].values == (100.0, 100.0)  # warm starts only
    assert found.results[0].compile_s == {"cold": 4.0, "warm": 4.0}


def test_one_round_gives_no_verdict(trace_of_a_run):
    found = compared(trace_of_a_run, {"a": [100.0], "b": [300.0]})
    assert "says nothing of noise" in found.verdicts[0]
    assert compare_text.text(found) and compare_html.page(found)


def test_a_configuration_that_fails_is_named_and_the_others_go_on(trace_of_a_run):
    tried: list[tuple[str, int]] = []

    def run(variant: Variant, number: int) -> Run:
        tried.append((variant.name, number))
        if variant.name == "bad":
            raise RunFailed("no memory left")
        return Run(report(100.0 + number), trace_of_a_run, False)

    wanted = [Variant(name, ()) for name in ("a", "bad", "b")]
    runs, failed = compare.measure(wanted, 3, run)
    assert failed == {"bad": "no memory left"} and list(runs) == ["a", "b"]
    assert sum(name == "bad" for name, _ in tried) == 1 and len(tried) == 7
    found = compare.compare("W", runs, failed, "output tokens/s")
    assert "bad failed: no memory left" in compare_text.text(found)
    assert "no memory left" in compare_html.page(found)


def test_per_bucket_figures_add_up(trace_of_a_run):
    (result, _) = compared(trace_of_a_run, {"a": [1.0, 1.0], "b": [1.0, 1.0]}).results
    steps = trace_of_a_run.steps
    assert sum(e["steps"] for e in result.buckets.values()) == len(steps)
    assert sum(e["device_s"] for e in result.buckets.values()) == pytest.approx(
        sum(s.device for s in steps) / 1e6
    )
    for bucket, entry in result.buckets.items():
        padded = sum(s.bucket - s.tokens for s in steps if s.bucket == bucket)
        assert entry["token_waste"] == pytest.approx(padded / (entry["steps"] * bucket))
    assert result.itl_ms == sorted(result.itl_ms) and len(result.ttft_ms) == 101


@pytest.mark.parametrize("windows", [(None,), (None, None), (16, None, 16)])
def test_a_token_takes_a_block_in_every_group_of_layers(trace_of_a_run, windows):
    """The pool of a model with windows is told in tokens of requests of the longest kind."""
    facts = {**trace_of_a_run.header.facts, "windows": list(windows)}
    header = msgspec.structs.replace(trace_of_a_run.header, facts=facts)
    run = msgspec.structs.replace(trace_of_a_run, header=header)
    result = compared(run, {"a": [1.0, 1.0], "b": [1.0, 1.0]}).results[0]
    of = settings.loads(header.config)
    pool, size, longest = of.cache.num_blocks, of.cache.block_size, of.model.max_len
    tokens = pool * size // len(windows)
    if 16 in windows:
        tokens = pool * longest // row_blocks(windows, longest, size, of.max_chunk)
        assert pool * size / 3 < tokens
    assert result.kv["tokens"] == tokens and result.kv["blocks"] == pool


class Page(html.parser.HTMLParser):
    """Collects what a page would load, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [v for k, v in attrs if k in ("src", "href", "data", "srcset") and v]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(trace_of_a_run):
    found = compared(trace_of_a_run, {"a <b>": [100.0, 101.0, 99.0], "c": [120.0, 121.0, 118.0]})
    text = compare_html.page(found)
    page = Page()
    page.feed(text)
    assert page.open == [] and page.loads == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert page.tags.count("svg") == 5
    assert not re.search(r"https?:|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text and "a &lt;b&gt;" in text and "<b>" not in text
    assert not re.search(r"\b(nan|inf)\b", text)


def test_the_picture_is_whole_without_a_page(trace_of_a_run):
    found = compared(trace_of_a_run, {"a <b>": [100.0, 101.0, 99.0], "c": [120.0, 121.0, 118.0]})
    root = ElementTree.fromstring(compare_html.picture(found))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <b>", "c", "output tokens/s"} <= set(words)
    dots = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(dots) >= 3 + 2


def test_colours_can_be_read_in_light_and_dark():
    """WCAG contrast: text 4.5, lines and dots 3, against the page and the cards."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        lin = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * lin[0] + 0.7152 * lin[1] + 0.0722 * lin[2]

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    style = page_parts.style(8)
    blocks = style.split("@media")
    for text in (blocks[0], blocks[1].split("body")[0]):
        colours = dict(re.findall(r"--(\w+): (#\w{6})", text))
        for ground in (colours["page"], colours["card"]):
            for name in ("ink", "soft", "good", "bad"):
                assert contrast(colours[name], ground) >= 4.5, (name, colours[name])
            for n in range(8):
                assert contrast(colours[f"c{n}"], ground) >= 3, n


def test_a_real_browser_shows_the_page(trace_of_a_run, tmp_path: Path):
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    found = compared(
        trace_of_a_run,
        {
            "base": [100.0, 80.0, 120.0],
            "budget 1024": [121.0, 96.5, 144.0],
            "same": [100.5, 79.5, 121.0],
        },
    )
    (tmp_path / "page.html").write_text(compare_html.page(found))
    pictures = {}
    for name, options in (("light", []), ("dark", ["--blink-settings=preferredColorScheme=0"])):
        picture = tmp_path / f"{name}.png"
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += [f"--user-data-dir={tmp_path / name}", "--window-size=1040,2600", *options]
        words += [f"--screenshot={picture}", (tmp_path / "page.html").as_uri()]
        subprocess.run(words, capture_output=True, timeout=60, check=True)
        pictures[name] = picture.read_bytes()
        assert pictures[name].startswith(b"\x89PNG") and len(pictures[name]) > 20_000
    assert pictures["light"] != pictures["dark"]


def test_fresh_processes_from_files_to_report(jaxserve, tmp_path: Path, monkeypatch):
    """The command, its child processes, a budget that is really slower, and one that fails."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(
        bench_process.Processes.__init__,
        "__kwdefaults__",
        {
            **bench_process.Processes.__init__.__kwdefaults__,
            "command": FAKE,
        },
    )
    workload = write(tmp_path / "w.jsonl", lines(6, max_tokens=20))
    page, keep = tmp_path / "page.html", tmp_path / "runs"
    words = ("lab", "compare", "--workload", workload, "--repeats", 2, "--json", "--html", page)
    sweep = ("--sweep", "buckets.tokens=[512],[8,16,64,512]", "--keep", keep)
    ran = jaxserve(*words, *sweep, "--ttft-slo", 60_000)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["main"] == "goodput requests/s" and found["rounds"] == 2
    slow, fast = found["results"]
    assert len(slow["figures"]["output tokens/s"]["values"]) == 2
    assert fast["figures"]["output tokens/s"]["versus"]["change"] > 0.3
    assert set(slow["buckets"]) == {"512"} and "512" not in set(fast["buckets"]) - {"512"}
    assert slow["compile_s"] == {"cold": 0.25, "warm": 0.25}
    assert len(list(keep.rglob("*.trace"))) == 4
    assert page.read_text().startswith("<!doctype html>")
    assert ran.err.count("output tokens/s") == 4

    sweep = ("--sweep", "scheduler.token_budget=64,13")
    ran = jaxserve("lab", "compare", "--workload", workload, "--repeats", 1, *sweep)
    assert ran.code == 1
    assert "token_budget=13 failed: jaxserve: error: thirteen is not a budget" in ran.out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["a.toml"],
        ["--sweep", "scheduler.token_budget=1,x"],
        ["--sweep", "scheduler.token_bugdet=1,2"],
        ["--sweep", "scheduler.token_budget=1,2", "--repeats", "0"],
        ["--sweep", "scheduler.token_budget=1,2", "--html", "absent/f"],
    ],
)
def test_bad_usage_is_refused_before_anything_runs(words, jaxserve, assembled, tmp_path: Path):
    workload = write(tmp_path / "w.jsonl", lines(1))
    ran = jaxserve("lab", "compare", "--workload", workload, *words)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert assembled == []
