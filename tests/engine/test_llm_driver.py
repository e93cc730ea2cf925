"""The driver with an engine that hands out several tokens at once, as speculation would."""

from collections.abc import Iterable
from typing import Any, cast

import pytest

from jaxserve.driver import Driver
from jaxserve.engine import Engine
from jaxserve.request import Output, Request, SamplingParams, TokenLogprobs
from tests.cli import fakes

TOKENIZER = fakes.byte_tokenizer()


class Script:
    """An engine that hands out the given pieces of one answer, one a step."""

    def __init__(self, pieces: Iterable[tuple[int, ...]], reason: str, stop_ids: set[int]) -> None:
        self.pieces, self.reason = list(pieces), reason
        self.stop_ids = frozenset(stop_ids)
        self.finished: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self.pieces) and not self.finished

    def add(
        self, prompt: list[int], sampling: SamplingParams, *, priority: int, salt: str
    ) -> list[Request]:
        self.request = Request(0, list(prompt), len(prompt), sampling, stop_ids=self.stop_ids)
        return [self.request]

    def step(self) -> list[Output]:
        tokens = self.pieces.pop(0)
        logprobs = tuple(TokenLogprobs(token, -1.0, 1, ()) for token in tokens)
        reason = None if self.pieces else self.reason
        return [Output(self.request, tokens, logprobs, None, reason)]

    def finish(self, request: Request, reason: str = "stop") -> None:
        self.finished.append(reason)


def answer(
    pieces: Iterable[tuple[int, ...]], sampling: SamplingParams, reason: str, stop_ids: set[int]
) -> tuple[Any, Script]:
    engine = Script(pieces, reason, stop_ids)
    driver = Driver(cast(Engine, engine), TOKENIZER)
    generation = driver.submit([1], sampling)
    while driver.num_running:
        driver.step()
    return generation.completion().outputs[0], engine


def cut(ids: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + size]) for i in range(0, len(ids), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "stop", "expected", "used"),
    [
        ("one two three", (" t",), "one", 5),
        ("one two three", ("three",), "one two ", 13),
        ("one two three", ("four",), "one two three", 13),
        ("one two thré", ("é",), "one two thr", 13),
        ("aab", ("ab", "b"), "a", 3),
    ],
)
def test_b69_no_token_after_a_stop_string_is_kept(
    size: int, text: str, stop: tuple[str, ...], expected: str, used: int
):
    ids = TOKENIZER.encode(text)
    sampling = SamplingParams(stop=stop, logprobs=0)
    sample, engine = answer(cut(ids, size), sampling, "length", set())
    assert sample.text == expected
    assert list(sample.token_ids) == ids[:used]
    assert [entry.token for entry in sample.logprobs] == ids[:used]
    assert sample.finish_reason == ("stop" if expected != text else "length")
    assert engine.finished == (["stop"] if engine.pieces else [])


@pytest.mark.parametrize(
    ("min_tokens", "expected", "used"),
    [(6, "one ", 7), (7, "one two ", 11), (11, "one two two", 11)],
)
def test_a_stop_string_complete_within_min_tokens_does_not_end_the_request(
    min_tokens: int, expected: str, used: int
):
    """A token a byte: the first "two" is complete with the 7th, the second with the 11th."""
    sampling = SamplingParams(stop=("two",), min_tokens=min_tokens)
    sample, _ = answer(cut(TOKENIZER.encode("one two two"), 1), sampling, "length", set())
    assert (sample.text, len(sample.token_ids)) == (expected, used)
    assert sample.finish_reason == ("length" if min_tokens == 11 else "stop")


@pytest.mark.parametrize("size", [1, 2, 100])
def test_the_id_that_ends_a_request_is_no_text_whatever_it_spells(size: int):
    ids = TOKENIZER.encode("one.")
    sample, _ = answer(cut(ids, size), SamplingParams(), "stop", {ids[-1]})
    assert (sample.text, list(sample.token_ids), sample.finish_reason) == ("one", ids, "stop")
    sample, _ = answer(cut(ids, size), SamplingParams(), "length", {ids[0]})
    assert (sample.text, sample.finish_reason) == ("one.", "length")


@pytest.mark.parametrize("size", [1, 2, 100])
def test_b71_an_answer_that_ends_inside_a_character(size: int):
    ids = TOKENIZER.encode("né")[:-1]
    sample, _ = answer(cut(ids, size), SamplingParams(), "length", set())
    assert sample.text == "n\N{REPLACEMENT CHARACTER}"


def test_an_engine_that_forgets_a_request_is_an_error_and_no_endless_loop():
    engine = Script([(1,)], "length", set())
    driver = Driver(cast(Engine, engine), TOKENIZER)
    driver.submit([1], SamplingParams())
    engine.pieces.clear()
    with pytest.raises(RuntimeError, match="no work"):
        driver.step()
