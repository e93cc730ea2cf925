"""A job in an object store (fsspec's in memory): parts, leases, and a death at every call."""

import json
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile

from jaxserve.offline.errors import InputError
from jaxserve.offline.inputs import Input, InputFile
from jaxserve.offline.lock import LEASE_SECONDS, Lease
from jaxserve.offline.output import Layout
from jaxserve.offline.places import find_inputs, find_output, storage_of
from jaxserve.offline.remote import ObjectStorage
from tests.offline import small_job
from tests.offline.disk import Died
from tests.offline.small_job import Attempt

COUNT = 7
EXPECTED = {f"id-{i}": f"{i}" * 7 for i in range(COUNT)} | {
    f"line-{COUNT + i}": "same" * 7 for i in (1, 2)
}


class Flaky:
    """A client whose k-th call fails once, or is the last of the process (before or after it had
    its effect)."""

    def __init__(self, fs: Any, fault: str = "", at: int = -1) -> None:
        self._fs, self._fault, self._at, self.calls = fs, fault, at, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._fs, name)
        if name == "invalidate_cache":
            return method

        def call(*args: Any, **options: Any) -> Any:
            at, self.calls = self.calls, self.calls + 1
            if at == self._at and self._fault == "fails":
                raise ConnectionError("reset by peer")
            if at == self._at and self._fault == "dies before":
                raise Died
            result = method(*args, **options)
            if at == self._at and self._fault == "dies after":
                raise Died
            return result

        return call


class Bucket:
    def __init__(self) -> None:
        self.address = f"memory://bucket-{uuid.uuid4()}"
        self.fs = fsspec.filesystem("memory")
        self.fs.pipe_file(f"{self.address}/in.jsonl", small_job.lines(COUNT))

    def run(self, fault: str = "", at: int = -1) -> tuple[Attempt, int]:
        storage = ObjectStorage(self.address, sleep=lambda seconds: None)
        storage._fs = Flaky(storage._fs, fault, at)
        attempt = Attempt()
        path = f"{self.address}/in.jsonl"
        layout = Layout(f"{self.address}/out.jsonl", rolled=True)
        given = InputFile(storage, path, path)
        try:
            small_job.run(storage, layout, given, attempt, roll_bytes=100)
        except Died:
            pass
        return attempt, storage._fs.calls

    def results(self) -> dict[str, str]:
        paths = sorted(self.fs.glob(f"{self.address}/out-*.jsonl"))
        return small_job.results([self.fs.cat_file(path) for path in paths], "out.jsonl")


def test_b80_a_job_in_a_bucket_dies_at_every_call_and_ends_exactly_once():
    first, calls = Bucket().run()
    assert first.completed and calls > 20
    for fault in ("fails", "dies before", "dies after"):
        for k in range(calls):
            bucket = Bucket()
            before, _ = bucket.run(fault, k)
            assert before.completed or fault != "fails", k
            after, _ = bucket.run()
            assert after.completed
            assert bucket.results() == EXPECTED, (fault, k)
            assert not before.durable & set(after.ran), (fault, k)


def test_the_command_line_from_bucket_to_bucket(jaxserve):
    bucket = Bucket()
    for shard in range(2):
        rows = [{"custom_id": f"{shard}-{i}", "prompt": "x", "max_tokens": 3} for i in range(5)]
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        bucket.fs.pipe_file(f"{bucket.address}/shard-{shard}.jsonl", data)
    command = ("batch", f"{bucket.address}/shard-*.jsonl", "--output", f"{bucket.address}/o.jsonl")
    ran = jaxserve(*command)
    assert ran.code == 0, ran.err
    (part,) = bucket.fs.glob(f"{bucket.address}/o-*.jsonl")
    rows = [json.loads(line) for line in bucket.fs.cat_file(part).splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows) == 10
    assert jaxserve(*command).code == 0
    assert jaxserve(*command, "--temperature", 0).code == 2
    names = [
        path.rsplit("/", 1)[1]
        for path in bucket.fs.ls(f"{bucket.address}/o.jsonl.journal", detail=False)
    ]
    assert sorted(names) == ["records-00001", "settings.json", "status.json"], "no lease is left"


class Ranges(AbstractBufferedFile):
    """As files of real stores are: read in ranges, with a readline that takes no size."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start, end)


def test_files_of_real_stores_are_read_line_by_line(monkeypatch: pytest.MonkeyPatch):
    bucket = Bucket()
    path = f"{bucket.address}/in.jsonl"
    expected = bucket.fs.cat_file(path)
    storage = ObjectStorage(path)
    monkeypatch.setattr(type(bucket.fs), "open", lambda fs, *of: Ranges(fs, *of))
    lines = list(Input([InputFile(storage, path, path)]).lines())
    assert b"".join(line.data or b"" for line in lines) == expected and len(lines) > COUNT


def test_a_lease_keeps_another_process_out_until_it_ends():
    bucket = Bucket()
    storage = ObjectStorage(bucket.address)
    now = 1000.0
    folder = f"{bucket.address}/out.jsonl.journal"
    first = Lease(storage, folder, clock=lambda: now)
    first.sign()
    other = Lease(storage, folder, clock=lambda: now)  # the same process may
    other._me = {"pid": 1, "host": "elsewhere"}
    bucket.fs.pipe_file(
        f"{folder}/lease.json",
        json.dumps(
            {"owner": {"pid": 1, "host": "elsewhere"}, "until": now + LEASE_SECONDS}
        ).encode(),
    )
    with pytest.raises(InputError, match="pid 1 on elsewhere"):
        Lease(storage, folder, clock=lambda: now)
    now += LEASE_SECONDS + 1
    Lease(storage, folder, clock=lambda: now).sign()
    with pytest.raises(OSError, match="took over"):
        other._until = now
        other.renew()


@pytest.mark.parametrize("address", ["http://example.org/x.jsonl", "ftp://x/y", "nope://x/y"])
def test_only_declared_storage_is_ever_reached(address: str):
    with pytest.raises(InputError, match="no storage this knows"):
        storage_of(address)


def test_what_is_not_there_is_refused(tmp_path: Path):
    bucket = Bucket()
    for name in ("no.jsonl", "no-*.jsonl"):
        with pytest.raises(InputError, match="does not exist"):
            find_inputs([f"{bucket.address}/{name}"])
    files = find_inputs([f"{bucket.address}/in.jsonl"])
    with pytest.raises(InputError, match="is the input file"):
        find_output(f"{bucket.address}/in.jsonl", files, rolled=False)
    with pytest.raises(InputError, match="named twice"):
        find_inputs([f"{bucket.address}/in.jsonl", f"{bucket.address}/in.jsonl"])
    with pytest.raises(InputError, match="no file fits"):
        find_inputs([f"{tmp_path}/*.jsonl"])
