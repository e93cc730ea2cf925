"""Token ids of a task, for the model that is served."""

from collections.abc import Iterable

from jaxserve.openai_api.bodies import Task, short_name
from jaxserve.openai_api.errors import RequestError, shorten
from jaxserve.text.chat import render_chat
from jaxserve.text.tokenizer import Tokenizer


class Encoder:
    """`names`: what requests may call the model; None: anything.  Prompts longer than `max_len`
    tokens are refused; 0: no such limit."""

    def __init__(
        self, tokenizer: Tokenizer, model: str, names: Iterable[str] | None, max_len: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._names = None if names is None else {"default", *map(short_name, names)}
        self._max_len = max_len

    def __call__(self, task: Task) -> list[int]:
        """Raises RequestError for another model and for a prompt longer than the model takes,
        ValueError for messages that the model's template refuses."""
        if task.model is not None and self._names is not None:
            if short_name(task.model) not in self._names:
                message = f"{self._model} is served here, not {shorten(task.model)}"
                raise RequestError("model_not_found", message, "model")
        if task.messages is not None:
            ids = render_chat(self._tokenizer, task.messages)
        elif task.text is not None:
            ids = self._tokenizer.encode(task.text)
        else:
            ids = task.token_ids or []
        if self._max_len and len(ids) > self._max_len:
            message = f"the prompt has {len(ids)} tokens; model.max_len is {self._max_len}"
            raise RequestError("prompt_too_long", message)
        return ids
