"""Tokenizers from the metadata of GGUF files."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from jaxserve.text.tokenizer import load_tokenizer
from model_zoo.gguf_header import read_gguf
from tests.unit import text_families as families
from tests.unit.text_families import LAW, TEXTS, assert_equal, family, write_gguf


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
@LAW
@given(text=TEXTS)
def test_a_sentencepiece_gguf_encodes_as_the_tokenizer_it_was_made_of(
    tmp_path_factory, scores, prefix, text
):
    tokenizer = _gguf(tmp_path_factory, f"spm{scores}{prefix}", scores=scores, prefix=prefix)
    reference = family("sentencepiece" if prefix else "gemma")
    if text:
        assert tokenizer.encode(text) == reference.encode(text)
    ids = reference.encode(text)
    assert tokenizer.decode(ids) == reference.decode(ids)


_GGUF = {}


def _gguf(factory, name, *, scores, prefix):
    if name not in _GGUF:
        backend = family("sentencepiece" if prefix else "gemma")._backend
        _GGUF[name] = load_tokenizer(
            write_gguf(
                factory.mktemp(name) / "model.gguf",
                backend,
                "llama",
                scores=scores,
                add_space_prefix=prefix,
                bos_token_id=1,
                eos_token_id=2,
            )
        )
    return _GGUF[name]


def _qwen2_like():
    pattern = families.tokenizers.Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend = families.byte_level(pre_tokenizers.Split(pattern, "isolated"), ignore_merges=False)
    backend.normalizer = normalizers.NFC()
    return backend


def _split(pattern: str, ignore_merges: bool = False):
    split = pre_tokenizers.Split(families.tokenizers.Regex(pattern), "isolated")
    return families.byte_level(split, ignore_merges=ignore_merges)


# As in the tokenizer.json of Llama 3, OLMo 2 and Phi-4 (cl100k), Phi-4 mini and Mistral Nemo.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KINDS = {
    "gpt-2": families.byte_level,
    "default": families.byte_level,
    "smollm": lambda: families.byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "qwen2": _qwen2_like,
    "llama-bpe": lambda: _split(CL100K, ignore_merges=True),
    "dbrx": lambda: _split(CL100K),
    "gpt-4o": lambda: _split(GPT4O),
    "tekken": lambda: _split(TEKKEN, ignore_merges=True),
}


def words(backend, text):
    """What is encoded word by word; few words are whole tokens of a small vocabulary."""
    text = backend.normalizer.normalize_str(text) if backend.normalizer else text
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("kind", [*KINDS])
def test_a_byte_level_gguf_encodes_as_the_tokenizer_it_was_made_of(tmp_path, kind):
    backend = KINDS[kind]()
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", backend, "gpt2", pre=kind))

    @LAW
    @given(text=TEXTS)
    @example(text="camelCase XMLHttp it'S IT's 12345 a/b ./\n/ //\r\n \u01c5a")
    def law(text):
        expected = backend.encode(text).ids
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == backend.decode(expected)
        assert words(tokenizer._backend, text) == words(backend, text)

    law()


def test_each_kind_of_byte_level_gguf_cuts_words_in_its_own_way(tmp_path):
    text = "It'S  1234\n\n5 x\u0301e\u0301 camelCase"
    cuts = set()
    kinds = ("gpt-2", "smollm", "qwen2", "llama-bpe", "gpt-4o", "tekken")
    for kind in kinds:
        path = write_gguf(tmp_path / f"{kind}.gguf", families.byte_level(), "gpt2", pre=kind)
        cuts.add(tuple(words(load_tokenizer(path)._backend, text)))
    assert len(cuts) == len(kinds)


@pytest.mark.parametrize(
    ("kind", "whole"),
    [("llama-bpe", True), ("tekken", True), ("gpt-2", False), ("dbrx", False), ("gpt-4o", False)],
)
def test_only_some_take_a_word_that_is_a_token_whatever_the_merges_say(tmp_path, kind, whole):
    spec = json.loads(families.byte_level().to_str())
    token = spec["model"]["vocab"]["zqx"] = len(spec["model"]["vocab"])
    backend = families.tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", backend, "gpt2", pre=kind))
    assert (tokenizer.encode("zqx") == [token]) == whole


def test_user_defined_tokens_of_a_gguf_are_found_and_have_text(tmp_path):
    spec = json.loads(families.byte_level().to_str())
    token = spec["model"]["vocab"]["<think>"] = len(spec["model"]["vocab"])
    mark = {**spec["added_tokens"][0], "id": token, "content": "<think>", "special": False}
    spec["added_tokens"].append(mark)
    backend = families.tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", backend, "gpt2"))
    ids = tokenizer.encode("a<think>b<|im_end|>")
    assert ids == backend.encode("a<think>b<|im_end|>").ids
    assert token in ids
    assert tokenizer.decode(ids) == "a<think>b"


def test_b65_padding_of_a_gguf_vocabulary_is_no_vocabulary(tmp_path):
    backend = families.byte_level()
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", backend, "gpt2", padding=7))
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.decode([tokenizer.vocab_size]) == ""


def test_unknown_kinds_of_gguf_are_refused_with_their_name(tmp_path):
    backend = families.byte_level()
    with pytest.raises(ValueError, match="pre is 'command-r'.*known: .*smollm"):
        load_tokenizer(write_gguf(tmp_path / "a.gguf", backend, "gpt2", pre="command-r"))
    with pytest.raises(ValueError, match="model is 'rwkv'"):
        load_tokenizer(write_gguf(tmp_path / "b.gguf", backend, "rwkv"))
    with pytest.raises(ValueError, match="bos_token_id is 9999"):
        load_tokenizer(write_gguf(tmp_path / "c.gguf", backend, "gpt2", bos_token_id=9999))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(data=st.data())
def test_any_damage_to_gguf_metadata_is_refused_or_harmless(tmp_path_factory, data):
    """Whatever the bytes say, the only exception is a ValueError that names the file."""
    path, whole = _intact_gguf(tmp_path_factory)
    at = data.draw(st.integers(4, 400) | st.integers(4, len(whole) - 1))
    new = data.draw(st.binary(min_size=1, max_size=9) | st.just(b"\xff" * 8) | st.just(bytes(8)))
    path.write_bytes(whole[:at] + new + whole[at + len(new) :])
    try:
        load_tokenizer(path).encode("Hello world")
    except ValueError as error:
        assert "m.gguf" in str(error)


def _intact_gguf(factory):
    if "intact" not in _GGUF:
        path = factory.mktemp("intact") / "m.gguf"
        backend = families.byte_level(size=300)
        write_gguf(path, backend, "gpt2", bos_token_id=1, add_bos_token=True)
        _GGUF["intact"] = path, path.read_bytes()
    return _GGUF["intact"]


def test_the_metadata_reader_agrees_with_the_gguf_package(tmp_path):
    path = tmp_path / "m.gguf"
    writer = families.gguf.GGUFWriter(path, "llama")
    for name, value in {
        "uint8": 255, "int8": -3, "uint16": 65535, "int16": -9, "uint32": 2**32 - 1,
        "int32": -(2**31), "float32": 0.5, "uint64": 2**64 - 1, "int64": -(2**63),
        "float64": 1e300, "bool": True, "string": "é😀",
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(f"x.{name}", value)
    for i, array in enumerate([[1, 2], [0.5, -1.5], ["a", "", "é"], [True, False]]):
        writer.add_array(f"x.array{i}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = families.gguf.GGUFReader(path).fields
    expected = {k: f.contents() for k, f in fields.items() if not k.startswith("GGUF.")}
    assert read_gguf(path).metadata == expected


@pytest.mark.parametrize(
    ("values", "start", "end"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [1], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ({"pre": "llama-bpe"}, [1], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"pre": "tekken"}, [1], []),
        ({"pre": "dbrx"}, [], []),
    ],
)
def test_a_gguf_says_what_goes_around_a_text(tmp_path, values, start, end):
    backend = families.byte_level()
    path = write_gguf(
        tmp_path / "m.gguf", backend, "gpt2", bos_token_id=1, eos_token_id=2, **values
    )
    tokenizer = load_tokenizer(path)
    plain = tokenizer.encode("Hello", add_special=False)
    assert tokenizer.encode("Hello") == [*start, *plain, *end]


@pytest.mark.parametrize("kind", ["smollm", "llama-bpe", "qwen2"])
def test_a_saved_gguf_tokenizer_loads_as_an_equal_folder(tmp_path, kind):
    path = write_gguf(
        tmp_path / "m.gguf",
        KINDS[kind](),
        "gpt2",
        pre=kind,
        bos_token_id=1,
        eos_token_id=2,
        eot_token_id=0,
        add_bos_token=True,
        chat_template=families.CHATML,
    )
    first = load_tokenizer(path)
    (tmp_path / "second").mkdir()
    first.save(tmp_path / "second")
    second = load_tokenizer(tmp_path / "second")
    assert_equal(first, second)
    reference = families.tokenizers.Tokenizer.from_file(str(tmp_path / "second/tokenizer.json"))
    assert reference.encode("Hello 12").ids == first.encode("Hello 12")
