"""Law T16: the join of the deltas is the decoding of all ids, for every tokenizer family."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.text.detokenizer import Detokenizer
from tests.unit import text_families as families
from tests.unit.text_families import family

LAW = settings(derandomize=True, deadline=None, max_examples=100)
NAMES = [*families.FAMILIES]
CUTS = st.lists(st.integers(1, 4), max_size=60)
TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from([*"  \n😀👩‍é你한"])),
    max_size=40,
)


def _stream(tokenizer, ids, cuts, prompt=()):
    detokenizer = Detokenizer(tokenizer, prompt)
    deltas, start = [], 0
    for size in [*cuts, len(ids)]:
        deltas.append(detokenizer.push(ids[start : start + size]))
        start += size
    return [*deltas, detokenizer.flush()]


@pytest.mark.parametrize("name", NAMES)
@LAW
@given(text=TEXTS, cuts=CUTS)
@example(text="👩‍👩‍👧 한국어 你好", cuts=[1] * 60)
def test_b71_t16_deltas_of_a_text_join_to_its_decoding(name, text, cuts):
    tokenizer = family(name)
    ids = tokenizer.encode(text)
    deltas = _stream(tokenizer, ids, cuts)
    assert "".join(deltas) == tokenizer.decode(ids)
    if name != "unigram" and "\ufffd" not in text:
        assert "\ufffd" not in "".join(deltas)


@pytest.mark.parametrize("name", NAMES)
@LAW
@given(seed=st.randoms(use_true_random=False), size=st.integers(0, 50), cuts=CUTS)
def test_b71_t16_deltas_of_random_ids_join_to_their_decoding(name, seed, size, cuts):
    tokenizer = family(name)
    ids = [seed.randrange(tokenizer.vocab_size + 2) for _ in range(size)]
    assert "".join(_stream(tokenizer, ids, cuts)) == tokenizer.decode(ids)


def _byte_ids(name, data):
    """Ids of single bytes, for families that have them."""
    tokenizer = family(name)
    by_piece = {tokenizer.piece(token): token for token in reversed(range(tokenizer.vocab_size))}
    return [by_piece[bytes([byte])] for byte in data]


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "gemma"])
@LAW
@given(data=st.binary(max_size=30), cuts=CUTS)
@example(data="😀é".encode(), cuts=[1] * 9)
@example(data=b"\xf0\x9f\x98a\xe4\xbd\xff\xc3", cuts=[1] * 9)
@example(data=b"\xed\xa0\x80\xf4\x90\x80\x80\xc0\x80", cuts=[1] * 9)
def test_b71_t16_random_bytes_are_replaced_exactly_where_they_are_invalid(name, data, cuts):
    expected = data.decode("utf-8", "replace")
    if name == "sentencepiece":
        expected = expected.removeprefix(" ")
    ids = _byte_ids(name, data)
    assert family(name).decode(ids) == expected
    assert "".join(_stream(family(name), ids, cuts)) == expected


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_b71_invalid_bytes_never_stall_the_stream(name):
    """However long the run, at most three bytes are held back."""
    detokenizer = Detokenizer(family(name))
    held = 0
    for count, token in enumerate(_byte_ids(name, b"\xf0\x9f" * 200 + b"\xff" * 200), start=1):
        held += len(detokenizer.push([token]))
        assert count - 3 <= held * 2 + 3 or held >= count - 3
    assert detokenizer.push(_byte_ids(name, b"\xff")) == "\ufffd"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_b71_a_truncated_character_is_one_replacement_at_the_end(name):
    ids = _byte_ids(name, "ab😀".encode()[:-1])
    detokenizer = Detokenizer(family(name))
    assert detokenizer.push(ids) == "ab"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", NAMES)
@LAW
@given(text=TEXTS, cut=st.integers(0, 60))
def test_b73_prompt_and_output_join_to_the_decoding_of_both(name, text, cut):
    """Wherever the sequence is cut: no space is lost, and a character that the prompt begins and
    the output ends belongs to the output."""
    tokenizer = family(name)
    ids = tokenizer.encode(text)
    prompt, output = ids[:cut], ids[cut:]
    before = b"".join(map(tokenizer.piece, prompt))
    if tokenizer.strips_first_space:
        before = before.removeprefix(b" ")
    deltas = _stream(tokenizer, output, [1] * len(output), prompt)
    assert before.decode("utf-8", "ignore") + "".join(deltas) == tokenizer.decode(ids)


def test_b73_a_word_after_a_prompt_keeps_its_space():
    tokenizer = family("sentencepiece")
    prompt, word = tokenizer.encode("Hello"), tokenizer.encode("world", add_special=False)
    assert Detokenizer(tokenizer, prompt).push(word) == " world"
    assert Detokenizer(tokenizer, [1]).push(word) == "world"
    assert Detokenizer(tokenizer).push(word) == "world"


@pytest.mark.parametrize("output", [b"abc", b"", b"\xff", b"\x98"])
def test_b71_what_the_prompt_left_open_is_not_blamed_on_the_output(output):
    tokenizer = family("byte_level")
    prompt = _byte_ids("byte_level", "é😀".encode()[:-2])
    ids = _byte_ids("byte_level", output)
    text = "".join(_stream(tokenizer, ids, [1] * len(ids), prompt))
    assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *ids])


def test_special_tokens_give_no_text_and_break_no_character():
    tokenizer = family("byte_level")
    first, *rest = _byte_ids("byte_level", "é".encode())
    assert "".join(_stream(tokenizer, [first, 2, *rest, 2], [1] * 4)) == "é"
    assert tokenizer.decode([first, 2, *rest, 2]) == "é"
