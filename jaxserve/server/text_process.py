"""The process that reads request bodies: JSON, checks, chat template, tokens.

`python -m jaxserve.server.text_process FD`.  A template is a program from somebody's folder and a
body is whatever somebody typed: what hangs or grows here is killed, and fails one request.
"""

import resource
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.openai_api import bodies, strict_json
from jaxserve.openai_api.bodies import convert
from jaxserve.openai_api.encode import Encoder
from jaxserve.openai_api.errors import RequestError
from jaxserve.request import SamplingParams
from jaxserve.server import protocol
from jaxserve.server.child import Pipe, live_as_long_as
from jaxserve.server.protocol import FromText, Load, Parse, ToText
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer, refuse_surrogates

MAX_MEMORY = 4 << 30  # bytes of address space beside what the start took
MAX_IDS = 1 << 20  # of one /detokenize


class Tokenize(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`/tokenize`: a text, or messages as the chat template writes them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class Detokenize(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class Reader:
    """Answers `Parse` messages."""

    def __init__(self, tokenizer: Tokenizer, load: Load) -> None:
        self._tokenizer = tokenizer
        self._encode = Encoder(tokenizer, load.names[0], load.names)
        self._defaults = {
            "chat": SamplingParams(max_tokens=load.chat_max_tokens),
            "text": SamplingParams(max_tokens=load.text_max_tokens),
        }

    def __call__(self, message: Parse) -> FromText:
        try:
            value = strict_json.parse_object(message.body, "body")
            if message.kind == "tokenize":
                return protocol.Answered(message.number, self._tokenize(value))
            if message.kind == "detokenize":
                return protocol.Answered(message.number, self._detokenize(value))
            return self._parsed(message, value)
        except RequestError as error:
            return protocol.Rejected(message.number, error.code, str(error), error.param)
        except (MemoryError, RecursionError):
            text = "the request needs too much memory"
            return protocol.Rejected(message.number, "invalid_request", text, None)
        except (ValueError, OverflowError) as error:
            return protocol.Rejected(message.number, "invalid_request", str(error), None)

    def _parsed(self, message: Parse, value: dict[str, Any]) -> protocol.Parsed:
        parse = bodies.parse_chat if message.kind == "chat" else bodies.parse_text
        call = parse(value, self._defaults[message.kind])
        first = call.tasks[0]
        return protocol.Parsed(
            number=message.number,
            prompts=[protocol.pack_ids(self._encode(task)) for task in call.tasks],
            sampling=first.sampling,
            priority=first.priority,
            salt=first.salt,
            stream=call.stream,
            include_usage=call.include_usage,
            return_token_ids=first.return_token_ids,
        )

    def _tokenize(self, value: dict[str, Any]) -> bytes:
        asked = convert(value, Tokenize, "")
        if (asked.prompt is None) == (asked.messages is None):
            message = "give exactly one of prompt, messages"
            raise RequestError("invalid_request", message, "prompt")
        if asked.prompt is not None:
            refuse_surrogates(asked.prompt, "prompt")
        ids = self._encode(
            bodies.Task(
                SamplingParams(), text=asked.prompt, messages=asked.messages, model=asked.model
            )
        )
        answer: dict[str, Any] = {"count": len(ids), "tokens": ids}
        if asked.return_token_strs:
            answer["token_strs"] = [self._tokenizer.decode([i], skip_special=False) for i in ids]
        return msgspec.json.encode(answer)

    def _detokenize(self, value: dict[str, Any]) -> bytes:
        asked = convert(value, Detokenize, "")
        if len(asked.tokens) > MAX_IDS:
            raise RequestError("invalid_request", f"tokens has more than {MAX_IDS} ids", "tokens")
        size = self._tokenizer.vocab_size
        for token in asked.tokens:
            if not 0 <= token < size:
                message = f"tokens has {token}; ids go from 0 to {size - 1}"
                raise RequestError("invalid_request", message, "tokens")
        text = self._tokenizer.decode(asked.tokens, skip_special=False)
        return msgspec.json.encode({"prompt": text})


def run(connection: socket.socket) -> int:
    live_as_long_as(connection)
    pipe: Pipe[ToText, FromText] = Pipe(connection, protocol.codec(ToText))
    reader: Reader | None = None
    try:
        while True:
            for message in pipe.receive(None):
                if isinstance(message, Load):
                    reader = Reader(load_tokenizer(Path(message.path)), message)
                    _limit_memory()
                    pipe.send_all(protocol.Loaded())
                elif reader is not None:
                    pipe.send_all(reader(message))
    except EOFError:
        return 0


def _limit_memory() -> None:
    """Where the system says how much is used."""
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY, used + MAX_MEMORY))


if __name__ == "__main__":
    sys.exit(run(socket.socket(fileno=int(sys.argv[1]))))
