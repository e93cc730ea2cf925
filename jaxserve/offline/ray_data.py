"""An engine as the class that Ray Data calls on batches.

    import ray
    from jaxserve.offline.ray_data import Generate

    ds = ray.data.read_json("prompts.jsonl").map_batches(
        Generate,
        fn_constructor_kwargs={"sampling": {"max_tokens": 64, "temperature": 0.0}},
        batch_size=256,
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    ds.write_json("answers")

Ray Data decides then what is redone after a failure; `jaxserve batch --ray` writes every line
exactly once.
"""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import settings
from jaxserve.config import EngineConfig
from jaxserve.offline.job import Job, JobOptions, Outcome
from jaxserve.offline.jsonl import Line, Place
from jaxserve.offline.parse import Failed, Parser, Ready, encoder
from jaxserve.offline.progress import Silent
from jaxserve.request import SamplingParams


class Generate:
    """Adds to a batch of rows the columns `text`, `finish_reason`, `output_tokens` and `error`.

    A row that cannot run has an error and an empty text; the others run.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        column: str = "prompt",
        sampling: Mapping[str, Any] | None = None,
        config: str | Path | None = None,
        sections: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """`column` holds text, token ids, or chat messages; `sampling` has the fields of
        SamplingParams.

        `config` is a TOML file and `sections` ({"scheduler": {"max_seqs": 32}}) go over it.  Raises
        ValueError for settings or a model that do not work.
        """
        from jaxserve.build import assemble

        chosen = settings.merge(
            settings.read(None if config is None else Path(config)), sections or {}, "sections"
        )
        if model is not None:
            chosen = settings.merge(chosen, {"model": {"name": model}}, "model")
        self._start(assemble(chosen), column, SamplingParams(**(sampling or {})))

    def _start(self, assembly: Any, column: str, sampling: SamplingParams) -> None:
        config: EngineConfig = assembly.config
        self._assembly = assembly
        self._column = column
        self._parse = Parser(sampling, encoder(assembly.tokenizer, config, any_model=True))
        self._next = secrets.randbits(48)  # so that rows without a seed differ between actors

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Columns in, columns out, row by row.  Raises KeyError without the prompts' column."""
        prompts = batch[self._column]
        first, self._next = self._next, self._next + len(prompts)
        rows = _Rows(
            [self._parse(_line(prompt, first + row)) for row, prompt in enumerate(prompts)]
        )
        Job(self._assembly, JobOptions()).run(rows, rows, Silent())
        return batch | rows.columns(first)


class _Rows:
    """Source and sink of one batch."""

    def __init__(self, lines: list[Ready | Failed]) -> None:
        self._lines = lines[::-1]
        self._results: dict[int, dict[str, Any]] = {}

    @property
    def ended(self) -> bool:
        return not self._lines

    def take(self, *, wait: bool) -> Ready | Failed | None:
        return self._lines.pop() if self._lines else None

    def write(self, place: Place, outcome: Outcome, result: bytes) -> None:
        self._results[place.index] = json.loads(result)

    def flush(self) -> None: ...

    def columns(self, first: int) -> dict[str, Any]:
        rows = [_flat(self._results[first + row]) for row in range(len(self._results))]
        kinds = {"text": object, "finish_reason": object, "output_tokens": np.int64}
        columns = {name: np.array([row[name] for row in rows], kinds[name]) for name in kinds}
        return columns | {"error": np.array([row["error"] for row in rows], object)}


def _flat(result: dict[str, Any]) -> dict[str, Any]:
    if result["error"] is not None:
        message = result["error"]["message"].partition(": ")[2]  # a row has no line number
        return {"text": "", "finish_reason": "error", "output_tokens": 0, "error": message}
    body = result["response"]["body"]
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return {
        "text": text,
        "finish_reason": choice["finish_reason"],
        "output_tokens": body["usage"]["completion_tokens"],
        "error": "",
    }


def _line(prompt: Any, index: int) -> Line:
    """A plain line, so that rows are checked as the lines of a file are."""
    value = _plain(prompt)
    name = "prompt"
    if isinstance(value, list):
        name = "messages" if value and isinstance(value[0], dict) else "prompt_token_ids"
    return Line(Place(index + 1, index), json.dumps({name: value}).encode())


def _plain(value: Any) -> Any:
    """Without numpy."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items() if entry is not None}
    return value
