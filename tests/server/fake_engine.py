"""The engine process with an arithmetic model in place of the real one (`tests/cli/fakes.py`).

`python -m tests.server.fake_engine [SECONDS] FD`.  A step takes so many seconds, so that a request
has something to be cancelled in, and some characters of a prompt make it go wrong.
"""

import os
import socket
import sys
import time
from typing import Any

from jaxserve.batch.step import Batch, StepResult
from jaxserve.config import EngineConfig
from jaxserve.server import engine_process
from jaxserve.text.tokenizer import Tokenizer
from tests.cli import fakes

DIES, RAISES, HANGS, BAD = "\x01", "\x02", "\x03", "\x04"
SECRET = "/secret/path"


class Manifest(fakes.FakeManifest):
    def table(self) -> list[dict[str, Any]]:
        return [{"program": "backbone[64]", "why": "fake", "compile_s": 0.5, "run_ms": 2.0}]


class FaultyRunner(fakes.FakeRunner):
    """A step with a token of DIES ends the process, one of RAISES fails, one of HANGS takes 3 s,
    and a row whose last token is BAD has no finite logits."""

    step_seconds = 0.002

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.manifest = Manifest()
        marks = DIES + RAISES + HANGS + BAD
        self._dies, self._raises, self._hangs, self._bad = tokenizer.encode(marks)

    def dispatch(self, batch: Batch) -> StepResult:
        time.sleep(self.step_seconds)
        tokens = batch.inputs.tokens.tolist()
        if self._dies in tokens:
            os._exit(9)
        if self._raises in tokens:
            raise RuntimeError(f"{SECRET} is not there")
        if self._hangs in tokens:
            time.sleep(3.0)
        result = super().dispatch(batch)
        if batch.samples is not None:
            for row, index in enumerate(batch.samples.token_index[: len(result.bad)].tolist()):
                if index < len(tokens) and tokens[index] == self._bad:
                    result.bad[row] = True
        return result


if __name__ == "__main__":
    if len(sys.argv) > 2:
        FaultyRunner.step_seconds = float(sys.argv[1])
    fakes.FakeRunner = FaultyRunner
    sys.exit(engine_process.run(socket.socket(fileno=int(sys.argv[-1])), fakes.assemble))
