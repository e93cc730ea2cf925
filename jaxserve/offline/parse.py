"""From a line of the input to something that the engine can be given."""

from collections.abc import Callable
from typing import NamedTuple

from jaxserve.config import EngineConfig
from jaxserve.offline import tasks
from jaxserve.offline.jsonl import Line, Place, parse_object
from jaxserve.openai_api.bodies import Task
from jaxserve.openai_api.encode import Encoder
from jaxserve.openai_api.errors import RequestError
from jaxserve.request import SamplingParams
from jaxserve.text.tokenizer import Tokenizer


class Ready(NamedTuple):
    """A line that can be given to the engine."""

    place: Place
    custom_id: str
    task: Task
    prompt: list[int]  # token ids


class Failed(NamedTuple):
    """A line that cannot."""

    place: Place
    custom_id: str | None
    error: RequestError


class Parser:
    """Checks a line and tokenises its prompt.  Knows neither files nor the engine, so it can run
    in any thread or process."""

    def __init__(self, defaults: SamplingParams, encode: Callable[[Task], list[int]]) -> None:
        """`encode` gives the token ids of a task; its ValueError or RequestError fails that line
        alone."""
        self._defaults = defaults
        self._encode = encode

    def __call__(self, line: Line) -> Ready | Failed:
        try:
            value = parse_object(line)
        except RequestError as error:
            return Failed(line.place, tasks.salvaged_id(line.data), error)
        name = None
        try:
            name = tasks.custom_id(value, line.number)
            task = tasks.parse_task(value, self._defaults)
            return Ready(line.place, name, task, self._encode(task))
        except RequestError as error:
            return Failed(line.place, name, error)
        except ValueError as error:
            return Failed(line.place, name, RequestError("invalid_request", str(error)))


def encoder(tokenizer: Tokenizer, config: EngineConfig, *, any_model: bool) -> Encoder:
    """`any_model`: lines may ask for another model; they get this one."""
    names = None if any_model else [config.model.name]
    return Encoder(tokenizer, config.model.name, names, config.model.max_len)
