"""A job with a local model opens no connection, whatever its input names."""

import json
import subprocess
import sys
from pathlib import Path

PROBE = """
import os, sys
seen = []
def watch(event, args):
    if event == "socket.__new__" and args[1] == 1:  # AF_UNIX never leaves the machine
        return
    if event.startswith("socket.") and event not in ("socket.gethostname",):
        seen.append((event, repr(args[1:])))
        raise ConnectionRefusedError(f"{event} in a job")
    if event in ("urllib.Request", "http.client.connect"):
        seen.append((event, repr(args)))
sys.addaudithook(watch)
from jaxserve.cli.main import main
code = main(sys.argv[1:])
links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
         if os.path.exists(f"/proc/self/fd/{fd}")]
open_sockets = [link for link in links if link.startswith("socket:")]
print(repr((seen, open_sockets)))
sys.exit(code)
"""


def without_network(command: list[str]) -> list[str]:
    """In a network namespace that has nothing, where the system lets us."""
    tried = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False)
    return ["unshare", "-rn", *command] if tried.returncode == 0 else command


def test_cve_2026_34753_a_job_opens_no_connection(tmp_path: Path, engine_options: list[str]):
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    address = "http://127.0.0.1:9/x"
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}
    lines = [
        {"custom_id": "runs", "prompt_token_ids": [3, 4], "max_tokens": 4},
        {"custom_id": "url", "method": "POST", "url": address, "body": {"prompt": "x"}},
        {"custom_id": "picture", "messages": [picture]},
        {"custom_id": "model", "prompt_token_ids": [3], "model": address},
        {"custom_id": "ref", "$ref": address, "prompt_token_ids": [3]},
    ]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-c", PROBE, "batch", str(given), "--output", str(output)]
    done = subprocess.run(
        without_network([*command, *engine_options]), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.strip() == "([], [])"
    failed = {
        result["custom_id"]: result["error"] is not None
        for result in map(json.loads, output.read_text().splitlines())
    }
    assert failed == {"runs": False, "url": True, "picture": True, "model": True, "ref": True}
