"""What the routes of the server share."""

import dataclasses
import time

from jaxserve.scheduler.admission import QueueFull
from jaxserve.server import errors
from jaxserve.server.engine_client import EngineClient, State
from jaxserve.server.exchange import Exchange
from jaxserve.server.keys import Keys
from jaxserve.server.protocol import Parsed, unpack_ids
from jaxserve.server.text_client import TextClient
from jaxserve.text.tokenizer import Tokenizer

_WHY_NOT = {
    State.STARTING: "the engine is starting; try again later",
    State.STALLED: "the engine is stuck",
    State.DEAD: "the engine has died; the server must be restarted",
}
START_RETRY_SECONDS = 5


@dataclasses.dataclass
class Service:
    """One model behind HTTP."""

    engine: EngineClient
    text: TextClient
    tokenizer: Tokenizer
    names: list[str]  # of the model; the first one is in answers
    keys: Keys | None = None  # None: everybody
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @property
    def status(self) -> str:
        """draining, or a State."""
        return "draining" if self.draining else self.engine.state.value

    @property
    def is_ready(self) -> bool:
        ready = self.engine.state in (State.IDLE, State.BUSY) and self.text.is_ready
        return ready and not self.draining

    def check_door(self) -> None:
        """Raises ApiError (503) when no request can be taken now, whatever it asks for."""
        if self.draining:
            raise errors.unavailable("draining", "the server is shutting down")
        state = self.engine.state
        if state in _WHY_NOT:
            raise errors.unavailable("not_ready", _WHY_NOT[state], START_RETRY_SECONDS)
        try:
            self.engine.check_queue()
        except QueueFull as error:
            raise errors.unavailable("overloaded", str(error)) from error

    def submit(self, parsed: Parsed) -> Exchange:
        """Hands a request to the engine.  Raises ApiError: 400 when it can never run here, 503 when
        not now."""
        self.check_door()
        try:
            return self.engine.submit(
                [unpack_ids(prompt) for prompt in parsed.prompts],
                parsed.sampling,
                priority=parsed.priority,
                salt=parsed.salt,
                streams=parsed.stream,
            )
        except QueueFull as error:
            raise errors.unavailable("overloaded", str(error)) from error
        except ValueError as error:
            raise errors.invalid("invalid_request", str(error)) from error
