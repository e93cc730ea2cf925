"""The final report of a job, and the order of its lines."""

import pytest

from tests.cli import fakes
from tests.cli.files import GOOD, Files, strict


def test_the_report_has_tokens_time_cost_waste_and_what_was_done_again(run, files: Files):
    files.write(*({"prompt": f"{i}", "max_tokens": 5, "ignore_eos": True} for i in range(30)))
    report = strict(run("--json", "--price-per-hour", 3.6).out)
    assert (report["done"], report["output_tokens"]) == (30, 150)
    assert report["cost"] == pytest.approx(0.001 * (report["wall_s"] + report["startup_s"]))
    assert 0 <= report["idle_share"] <= 1
    assert 0 < report["token_waste"] < 1
    assert (report["retried"], report["redone"], report["done_before"]) == (0, 0, 0)
    assert report["engines"] == 1 and report["steps"] > 0
    again = strict(run("--json").out)
    assert (again["done"], again["done_before"], again["output_tokens"]) == (30, 30, 0)
    assert "cost" not in again


def test_retried_lines_are_counted(run, files: Files, monkeypatch):
    calls, dispatch = 0, fakes.FakeRunner.dispatch

    def once(self, batch):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("a bad step")
        return dispatch(self, batch)

    monkeypatch.setattr(fakes.FakeRunner, "dispatch", once)
    files.write(*({"prompt": f"{i}", "max_tokens": 9} for i in range(20)))
    first = run("--json", "--set", "scheduler.max_seqs=4")
    failed = strict(first.out)["failed"]
    assert first.code == 1 and failed > 0
    second = run("--json", "--retry-errors", "--set", "scheduler.max_seqs=4")
    assert second.code == 0, second.err
    assert strict(second.out)["retried"] == failed


def test_the_summary_tells_idle_padding_and_cost(run, files: Files):
    files.write(GOOD)
    err = run("--price-per-hour", 2).err
    assert "idle " in err and "padding " in err and "cost 0.0" in err
    assert run("--price-per-hour", -1).code == 2


@pytest.mark.parametrize("in_order", [True, False])
def test_long_lines_first_unless_told_otherwise(in_order: bool, run, files: Files):
    """With one seat, results come in the order in which lines were started."""
    lengths = [1 + 7 * i % 40 for i in range(40)]
    files.write(*({"prompt": "x", "max_tokens": n, "ignore_eos": True} for n in lengths))
    more = ["--in-order"] if in_order else []
    assert run("--set", "scheduler.max_seqs=1", *more).code == 0
    started = [int(result["id"].rpartition("_")[2]) - 1 for result in files.read()]
    assert (started == list(range(40))) == in_order
    if not in_order:
        later = [lengths[index] for index in started[5:]]  # the first ones had no choice
        assert sum(a < b for a, b in zip(later, later[1:], strict=False)) < 12


def test_a_text_without_a_seed_does_not_depend_on_the_order(run, files: Files):
    lines = [{"prompt": f"{i}", "max_tokens": 1 + i * 7 % 20, "temperature": 1} for i in range(30)]
    texts = []
    for more in ([], ["--in-order"]):
        files.write(*lines)
        assert run("--restart", *more).code == 0
        texts.append(
            {n: r["response"]["body"]["choices"][0]["text"] for n, r in files.by_id().items()}
        )
    assert texts[0] == texts[1]
    assert len(set(texts[0].values())) > 20
