"""From a line of the input to something that the engine can be given."""

from collections.abc import Callable
from typing import NamedTuple

from jaxserve.config import EngineConfig
from jaxserve.offline import tasks
from jaxserve.offline.jsonl import Line, LineError, Place, parse_object, shorten
from jaxserve.offline.tasks import Task
from jaxserve.request import SamplingParams
from jaxserve.text.chat import render_chat
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
    error: LineError


class Parser:
    """Checks a line and tokenises its prompt.  Knows neither files nor the engine, so it can run
    in any thread or process."""

    def __init__(self, defaults: SamplingParams, encode: Callable[[Task], list[int]]) -> None:
        """`encode` gives the token ids of a task; its ValueError or LineError fails that line
        alone."""
        self._defaults = defaults
        self._encode = encode

    def __call__(self, line: Line) -> Ready | Failed:
        name = None
        try:
            value = parse_object(line)
            name = tasks.custom_id(value, line.number)
            task = tasks.parse_task(value, self._defaults)
            return Ready(line.place, name, task, self._encode(task))
        except LineError as error:
            return Failed(line.place, name, error)
        except ValueError as error:
            return Failed(line.place, name, LineError("invalid_request", str(error)))


class Encoder:
    """Token ids of a task, for the model that is served."""

    def __init__(self, tokenizer: Tokenizer, config: EngineConfig, *, any_model: bool) -> None:
        """`any_model`: lines may ask for another model; they get this one."""
        self._tokenizer = tokenizer
        self._model = config.model
        self._names = {"default", tasks.short_name(config.model.name)}
        self._any_model = any_model

    def __call__(self, task: Task) -> list[int]:
        """Raises LineError for another model and for a prompt longer than the model takes."""
        if task.model is not None and not self._any_model:
            if tasks.short_name(task.model) not in self._names:
                message = f"this job runs {self._model.name}, not {shorten(task.model)}"
                raise LineError("unknown_model", message)
        if task.messages is not None:
            ids = render_chat(self._tokenizer, task.messages)
        elif task.text is not None:
            ids = self._tokenizer.encode(task.text)
        else:
            ids = task.token_ids or []
        if len(ids) > self._model.max_len:
            message = f"the prompt has {len(ids)} tokens; model.max_len is {self._model.max_len}"
            raise LineError("prompt_too_long", message)
        return ids
