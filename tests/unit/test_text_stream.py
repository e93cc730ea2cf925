"""Stop strings over token borders (B69)."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.text.stream import TextStream
from tests.unit import text_families as families
from tests.unit.text_families import family

LAW = settings(derandomize=True, deadline=None, max_examples=200)
ALPHABET = [*"ab \n", "é", "😀"]
WORDS = st.lists(st.sampled_from(ALPHABET), max_size=40).map("".join)
STOPS = st.lists(
    st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=6).map("".join), max_size=4
)


def _cut(text, stops):
    """The definition: at each character, is a stop string complete?"""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def _run(tokenizer, ids, stops, size=1, prompt=()):
    stream = TextStream(tokenizer, prompt, stops)
    deltas = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    deltas.append(stream.flush())
    assert "".join(deltas) == stream.text
    return stream, deltas


@pytest.mark.parametrize("name", [*families.FAMILIES])
@LAW
@given(text=WORDS, stops=STOPS, size=st.integers(1, 9))
@example(text="ababab", stops=["abab"], size=1)
@example(text="aab", stops=["ab", "aab", "b"], size=1)
@example(text="aaab", stops=["aab"], size=2)
@example(text="x😀é", stops=["😀é"], size=1)
def test_b69_the_text_ends_exactly_before_the_first_complete_stop_string(name, text, stops, size):
    tokenizer = family(name)
    ids = tokenizer.encode(text)
    expected, stop = _cut(tokenizer.decode(ids), stops)
    stream, _ = _run(tokenizer, ids, stops, size)
    assert (stream.text, stream.stopped) == (expected, stop)


@LAW
@given(text=WORDS, stops=STOPS)
def test_b69_nothing_that_may_begin_a_stop_string_is_given_out(text, stops):
    """And everything else is given out at once."""
    tokenizer = family("byte_level")
    stream = TextStream(tokenizer, (), stops)
    ids = tokenizer.encode(text)
    for count, token in enumerate(ids, start=1):
        stream.push([token])
        known = b"".join(map(tokenizer.piece, ids[:count])).decode("utf-8", "ignore")
        cut, stop = _cut(known, stops)
        if stop is None:
            starts = {string[:size] for string in stops for size in range(1, len(string))}
            held = max((len(start) for start in starts if known.endswith(start)), default=0)
            cut = known[: len(known) - held]
        assert stream.text == cut


@LAW
@given(text=WORDS, stops=STOPS)
def test_b69_the_number_of_tokens_used_is_the_smallest_that_completes_the_match(text, stops):
    tokenizer = family("byte_level")
    ids = tokenizer.encode(text)
    whole, _ = _run(tokenizer, ids, stops, size=len(ids) or 1)
    if whole.stopped is None:
        assert whole.num_tokens_used == len(ids)
    else:
        used = whole.num_tokens_used
        assert _run(tokenizer, ids[:used], stops)[0].stopped == whole.stopped
        assert _run(tokenizer, ids[: used - 1], stops)[0].stopped is None


def test_b69_a_stop_string_may_be_the_whole_answer():
    tokenizer = family("byte_level")
    stream, deltas = _run(tokenizer, tokenizer.encode("Hello world"), ["Hello world"])
    assert (stream.text, stream.stopped, "".join(deltas)) == ("", "Hello world", "")


def test_b69_the_prompt_is_no_part_of_a_match():
    tokenizer = family("byte_level")
    prompt, output = tokenizer.encode("Hello wor"), tokenizer.encode("ld. Hello world")
    stream, _ = _run(tokenizer, output, ["world"], prompt=prompt)
    assert stream.text == "ld. Hello "


def test_b69_a_beginning_that_comes_to_nothing_is_given_out_at_the_end():
    tokenizer = family("byte_level")
    stream, deltas = _run(tokenizer, tokenizer.encode("Hello wor"), ["world"])
    assert (stream.text, stream.stopped) == ("Hello wor", None)
    assert deltas[-1] == "wor"


@LAW
@given(text=WORDS, stops=STOPS, min_tokens=st.integers(0, 30), size=st.integers(1, 9))
@example(text="abababab", stops=["abab"], min_tokens=5, size=1)
@example(text="ab", stops=["b"], min_tokens=2, size=1)
def test_stop_strings_complete_within_min_tokens_do_not_end_the_text(text, stops, min_tokens, size):
    """The first end is one that a token after `min_tokens` completes, wherever it began."""
    tokenizer = family("byte_level")
    ids = tokenizer.encode(text)
    early = b"".join(map(tokenizer.piece, ids[:min_tokens])).decode("utf-8", "ignore")
    expected = text, None
    for end in range(len(early) + 1, len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(complete, key=len)
            expected = text[: end - len(stop)], stop
            break
    stream = TextStream(tokenizer, (), stops, min_tokens=min_tokens)
    for start in range(0, len(ids), size):
        stream.push(ids[start : start + size])
    stream.flush()
    assert (stream.text, stream.stopped) == expected


def test_b69_tokens_after_the_end_are_ignored():
    tokenizer = family("byte_level")
    stream = TextStream(tokenizer, (), ("world",))
    stream.push(tokenizer.encode("Hello world"))
    used = stream.num_tokens_used
    assert stream.push(tokenizer.encode(" more")) == stream.flush() == ""
    assert (stream.text, stream.num_tokens_used) == ("Hello ", used)


@pytest.mark.parametrize(("stop", "match"), [("", r"stop\[1\] is empty"), ("\ud800", "surrogate")])
def test_b69_b77_stop_strings_that_cannot_match_are_refused(stop, match):
    with pytest.raises(ValueError, match=match):
        TextStream(family("byte_level"), (), ("x", stop))


def test_b69_each_character_is_looked_at_a_bounded_number_of_times():
    """The worst text for a search that begins again."""
    tokenizer = family("byte_level")
    stop = "a" * 200 + "b"
    stream = TextStream(tokenizer, (), (stop,))
    looks = _count_looks(stream)
    for _ in range(2000):
        stream.push(tokenizer.encode("a" * 20))
    assert looks[0] <= 4 * 2000 * 20
    assert stream.push(tokenizer.encode("b")) == ""
    assert stream.stopped == stop
    assert len(stream.text) == 2000 * 20 - 200


def _count_looks(stream):
    (matcher,) = stream._matchers
    looks = [0]

    class Counted(str):
        def __getitem__(self, item):
            looks[0] += 1
            return str.__getitem__(self, item)

    matcher.pattern = Counted(matcher.pattern)
    return looks
