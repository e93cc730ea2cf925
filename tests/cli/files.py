"""An input and an output of a job in one folder, and strict reading of results."""

import json
from pathlib import Path
from typing import Any


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


GOOD = {"prompt": "fine", "max_tokens": 5}  # a line that runs


class Files:
    """An input and an output in one folder."""

    def __init__(self, folder: Path) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def write(self, *lines: Any) -> None:
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.input.write_bytes(b"\n".join(texts) + b"\n")

    def read(self) -> list[dict[str, Any]]:
        return [strict(line) for line in self.output.read_text("utf-8").splitlines()]

    def by_id(self) -> dict[str, dict[str, Any]]:
        return {result["custom_id"]: result for result in self.read()}
