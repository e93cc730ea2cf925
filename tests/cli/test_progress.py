"""Progress of a job, on a terminal and elsewhere."""

import io

from jaxserve.offline.progress import Bar, Lines, Snapshot, format_seconds, make_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_now_and_then_and_say_how_long_it_takes():
    now, stream = 0.0, io.StringIO()
    lines = Lines(100, stream, clock=lambda: now)
    for second in range(1, 26):
        now = float(second)
        done = second * 2 - 5 if second > 5 else second
        lines.update(Snapshot(done=done, failed=5, tokens=100 * second, kv_used=0.25))
    lines.close()
    assert stream.getvalue().splitlines() == [
        "15 done, 5 failed, 80 left; 100 tok/s; ETA 0:40; KV 25%",
        "35 done, 5 failed, 60 left; 100 tok/s; ETA 0:30; KV 25%",
    ]


def test_a_terminal_gets_a_bar_that_goes_away():
    stream = Terminal()
    bar = make_progress(10, stream)
    assert isinstance(bar, Bar)
    bar.update(Snapshot(done=3, failed=1, tokens=50, kv_used=0.5))
    bar.close()
    assert "3 done" in stream.getvalue()
    assert "1 failed" in stream.getvalue()
    assert "KV 50%" in stream.getvalue()
    assert isinstance(make_progress(10, io.StringIO()), Lines)


def test_times():
    assert [format_seconds(s) for s in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]
