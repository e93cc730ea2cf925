"""The tokenizer of the default model: laws of test_text_detokenizer on a real vocabulary, and ids
that transformers 5.24 gives for its tokenizer.json."""

import random

import pytest

from jaxserve import sources
from jaxserve.text.chat import render_chat
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import load_tokenizer

KNOWN = {
    "Hello world": [19556, 905],
    "It's 2026, and 12345\n\n1. They'll wait...  ok": [
        1589,
        506,
        216,
        34,
        32,
        34,
        38,
        28,
        284,
        216,
        33,
        34,
        35,
        36,
        37,
        1116,
        33,
        30,
        1069,
        3060,
        5847,
        2026,
        216,
        10907,
    ],
    "def f(x):\n    return  x ** 2\t# é": [
        1604,
        275,
        24,
        104,
        727,
        472,
        1003,
        216,
        1792,
        1903,
        216,
        34,
        197,
        19,
        26411,
    ],
    "你好，世界 😀 👩‍👩‍👧": [
        18645,
        250,
        48392,
        138,
        12831,
        7906,
        240,
        178,
        239,
        230,
        40303,
        218,
        15107,
        235,
        119,
        321,
        231,
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        117,
    ],
    "<|im_start|>user\nHi<|im_end|>": [1, 4093, 198, 26843, 2],
    "": [],
    " \n \n\n x": [3717, 38028, 1792],
}
CHAT = [
    1,
    9690,
    198,
    2683,
    359,
    253,
    5356,
    5646,
    11173,
    3365,
    3511,
    308,
    34519,
    28,
    7018,
    411,
    407,
    19712,
    8182,
    2,
    198,
    1,
    4093,
    198,
    19556,
    2,
    198,
    1,
    520,
    9531,
    198,
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(sources.resolve(sources.DEFAULT))


@pytest.mark.parametrize("text", [*KNOWN])
def test_known_texts_have_the_ids_that_transformers_gives(tokenizer, text):
    assert tokenizer.encode(text) == KNOWN[text]
    assert tokenizer.decode(KNOWN[text], skip_special=False) == text


def test_a_known_chat_has_the_ids_that_transformers_gives(tokenizer):
    assert render_chat(tokenizer, [{"role": "user", "content": "Hello"}]) == CHAT


def test_facts_of_the_file(tokenizer):
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == {2}
    assert tokenizer.named_tokens["bos_token"] == "<|im_start|>"
    assert len(tokenizer.special_ids) == 17


def test_b71_t16_deltas_join_to_the_decoding(tokenizer):
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(60))]
        detokenizer = Detokenizer(tokenizer)
        deltas = [detokenizer.push((token,)) for token in ids]
        assert "".join(deltas) + detokenizer.flush() == tokenizer.decode(ids)


def test_b71_every_character_of_the_assigned_planes_comes_back(tokenizer):
    """The vocabulary has no token for 21 of the 256 bytes: those of six control characters, of the
    planes 4 to 11, which are empty, and those that UTF-8 never has."""
    draw = random.Random(1)
    codes = [*range(0x20, 0xD800), *range(0xE000, 0x40000)]
    for _ in range(300):
        text = "".join(map(chr, draw.choices(codes, k=draw.randrange(40))))
        ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer)
        assert "".join(detokenizer.push((token,)) for token in ids) == text
        assert detokenizer.flush() == ""
