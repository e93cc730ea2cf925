"""Tokenizers from folders and GGUF files."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers, processors

from jaxserve.text.gguf_metadata import read_metadata
from jaxserve.text.tokenizer import load_tokenizer
from tests.unit import text_families as families
from tests.unit.text_families import family, write_folder, write_gguf

LAW = settings(derandomize=True, deadline=None, max_examples=60)
TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(
        st.sampled_from([*" \n\t09'aZ.é你😀", "  ", "\r\n", " the", "12", "e\u0301"]), max_size=40
    ).map("".join),
)
LOSSLESS = ["byte_level", "sentencepiece", "gemma"]


@pytest.mark.parametrize("name", LOSSLESS)
@LAW
@given(text=TEXTS)
def test_decoding_gives_the_text_back(name, text):
    if name != "byte_level":
        text = text.replace("▁", "_")  # SentencePiece cannot tell it from a space
    tokenizer = family(name)
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@pytest.mark.parametrize("name", [*families.FAMILIES])
@LAW
@given(text=TEXTS)
def test_encoding_and_decoding_agree_with_the_library(name, text):
    backend = family(name)._backend
    tokenizer = family(name)
    ids = tokenizer.encode(text)
    assert (
        tokenizer.encode(text, add_special=False)
        == backend.encode(text, add_special_tokens=False).ids
    )
    if name == "unigram":
        text = text.lstrip()  # the library's Metaspace drops all leading spaces of a text
        ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.decode(ids, skip_special=False) == (
        backend.decode(ids, skip_special_tokens=False)
    )


@LAW
@given(ids=st.lists(st.integers(-3, 700), max_size=30))
def test_byte_level_decoding_agrees_with_the_library_on_any_ids(ids):
    tokenizer = family("byte_level")
    known = [token for token in ids if 0 <= token < tokenizer.vocab_size]
    assert tokenizer.decode(ids) == tokenizer._backend.decode(known)


def test_vocab_size_is_the_highest_id_plus_one(tmp_path):
    backend = families.byte_level()
    size = backend.get_vocab_size()
    spec = json.loads(backend.to_str())
    del spec["model"]["vocab"]["Z"]  # a hole
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert load_tokenizer(tmp_path).vocab_size == size


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


def _llama3_like():
    pattern = families.tokenizers.Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return families.byte_level(pre_tokenizers.Split(pattern, "isolated"), ignore_merges=True)


KINDS = {
    "gpt-2": families.byte_level,
    "default": families.byte_level,
    "smollm": lambda: families.byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "qwen2": _qwen2_like,
    "llama-bpe": _llama3_like,
}


@pytest.mark.parametrize("kind", [*KINDS])
def test_a_byte_level_gguf_encodes_as_the_tokenizer_it_was_made_of(tmp_path, kind):
    backend = KINDS[kind]()
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", backend, "gpt2", pre=kind))

    @LAW
    @given(text=TEXTS)
    def law(text):
        expected = backend.encode(text).ids
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == backend.decode(expected)

    law()


def test_each_kind_of_byte_level_gguf_cuts_words_in_its_own_way(tmp_path):
    text = "It'S  1234\n\n5 x\u0301e\u0301"
    cuts = set()
    for kind in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
        path = write_gguf(tmp_path / f"{kind}.gguf", families.byte_level(), "gpt2", pre=kind)
        backend = load_tokenizer(path)._backend
        text_seen = backend.normalizer.normalize_str(text) if backend.normalizer else text
        words = backend.pre_tokenizer.pre_tokenize_str(text_seen)
        cuts.add(tuple(word for word, _ in words))
    assert len(cuts) == 4


@pytest.mark.parametrize(("kind", "whole"), [("llama-bpe", True), ("gpt-2", False)])
def test_only_llama3_takes_a_word_that_is_a_token_whatever_the_merges_say(tmp_path, kind, whole):
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
    with pytest.raises(ValueError, match="pre is 'tekken'.*known: .*smollm"):
        load_tokenizer(write_gguf(tmp_path / "a.gguf", backend, "gpt2", pre="tekken"))
    with pytest.raises(ValueError, match="model is 'rwkv'"):
        load_tokenizer(write_gguf(tmp_path / "b.gguf", backend, "rwkv"))
    with pytest.raises(ValueError, match="bos_token_id is 9999"):
        load_tokenizer(write_gguf(tmp_path / "c.gguf", backend, "gpt2", bos_token_id=9999))


def test_damaged_files_are_refused_with_their_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", families.byte_level(), "gpt2")
    whole = path.read_bytes()
    for size in (0, 3, 7, 20, 100, 1000, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="m.gguf"):
            load_tokenizer(path)
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no tokenizer.json"):
        load_tokenizer(tmp_path)
    for text in ("{", "[]", '{"model": 3}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
            load_tokenizer(tmp_path)


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
    assert read_metadata(path) == expected


def test_a_decoder_whose_steps_are_not_known_is_refused(tmp_path):
    backend = families.byte_level()
    backend.decoder = families.decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        load_tokenizer(write_folder(tmp_path, backend))


def test_b74_eos_ids_are_the_union_of_all_sources(tmp_path):
    backend = families.byte_level()
    config = {"eos_token_id": 7, "text_config": {"eos_token_id": [8]}}
    folder = write_folder(
        tmp_path / "all",
        backend,
        config=config,
        generation_config={"eos_token_id": [2, 5], "temperature": 0.6},
        tokenizer_config={"eos_token": {"content": "<|endoftext|>"}},
    )
    assert load_tokenizer(folder).eos_ids == {0, 2, 5, 7, 8}
    assert load_tokenizer(write_folder(tmp_path / "none", backend)).eos_ids == frozenset()
    map_only = write_folder(
        tmp_path / "map", backend, special_tokens_map={"eos_token": "<|im_end|>"}
    )
    assert load_tokenizer(map_only).eos_ids == {2}
    path = write_gguf(
        tmp_path / "m.gguf", backend, "gpt2", eos_token_id=2, eot_token_id=5, eom_token_id=6
    )
    assert load_tokenizer(path).eos_ids == {2, 5, 6}
    bad = write_folder(tmp_path / "bad", backend, config={"eos_token_id": "2"})
    with pytest.raises(ValueError, match="eos_token_id is '2'"):
        load_tokenizer(bad)


def test_b75_bos_is_never_doubled(tmp_path):
    tokenizer = family("sentencepiece")
    plain = tokenizer.encode("Hello", add_special=False)
    assert tokenizer.encode("Hello") == [1, *plain]
    assert tokenizer.encode("<s>Hello") == tokenizer.encode("<s>Hello", add_special=False)
    assert tokenizer.encode("<s>Hello").count(1) == 1
    assert tokenizer.encode("") == [1]


@pytest.mark.parametrize(
    ("settings_", "start", "end"),
    [
        ({}, [1], []),
        ({"add_bos_token": True}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
    ],
)
def test_a_folder_says_what_goes_around_a_text(tmp_path, settings_, start, end):
    backend = families.sentencepiece()
    settings_ = {"bos_token": "<s>", "eos_token": "</s>", **settings_}
    tokenizer = load_tokenizer(write_folder(tmp_path, backend, tokenizer_config=settings_))
    plain = tokenizer.encode("Hello", add_special=False)
    assert tokenizer.encode("Hello") == [*start, *plain, *end]


@pytest.mark.parametrize(
    ("values", "start", "end"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [1], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ({"pre": "llama-bpe"}, [1], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
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


def test_truncation_and_padding_of_a_file_do_not_touch_prompts(tmp_path):
    backend = families.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=200)
    tokenizer = load_tokenizer(write_folder(tmp_path, backend))
    text = "Hello world, hello worlds"
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.parametrize("name", [*families.FAMILIES])
def test_saving_and_loading_give_an_equal_tokenizer(tmp_path, name):
    folder = write_folder(
        tmp_path / "first",
        families.FAMILIES[name](),
        tokenizer_config={
            "chat_template": families.CHATML,
            "bos_token": "<s>",
            "eos_token": "</s>",
        },
        generation_config={"eos_token_id": [5, 6]},
    )
    first = load_tokenizer(folder)
    (tmp_path / "second").mkdir()
    first.save(tmp_path / "second")
    second = load_tokenizer(tmp_path / "second")
    _assert_equal(first, second)


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
    _assert_equal(first, second)
    reference = families.tokenizers.Tokenizer.from_file(str(tmp_path / "second/tokenizer.json"))
    assert reference.encode("Hello 12").ids == first.encode("Hello 12")


def _assert_equal(first, second):
    for name in ("vocab_size", "eos_ids", "chat_template", "named_tokens", "special_ids"):
        assert getattr(first, name) == getattr(second, name), name
    for text in ["", "Hello world", "a <s>b</s> 12\n\n3", "<|im_end|> x", "你好 😀"]:
        for parse in (True, False):
            ids = first.encode(text, parse_special=parse)
            assert ids == second.encode(text, parse_special=parse)
            assert first.decode(ids) == second.decode(ids)


def test_chat_templates_are_found_in_every_place(tmp_path):
    backend = families.byte_level()
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "C"}]
    folder = write_folder(tmp_path, backend, tokenizer_config={"chat_template": named})
    assert load_tokenizer(folder).chat_template == "C"
    write_folder(folder, backend, chat_template={"chat_template": "B"})
    assert load_tokenizer(folder).chat_template == "B"
    (folder / "chat_template.jinja").write_text("A")
    assert load_tokenizer(folder).chat_template == "A"
    assert load_tokenizer(write_folder(tmp_path / "x", backend)).chat_template is None


@pytest.mark.parametrize("text", ["\ud83d", "é\ude00x", "a\udfff"])
def test_b77_a_lone_surrogate_is_refused_and_named(text):
    with pytest.raises(ValueError, match=r"lone surrogate U\+D[8-F]"):
        family("byte_level").encode(text)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("text", ["\0", "a\0b", "\ufeffx", "\r\n", "e" + "\u0301" * 5000, "\uffff"])
def test_b77_odd_unicode_is_a_text_like_any_other(name, text):
    tokenizer = family(name)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["Hello  world .", "if x :\n        y  =  1 ;", " a , b ' s n't"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_b73_spaces_are_never_cleaned_up(name, text):
    tokenizer = family(name)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", [*families.FAMILIES])
@LAW
@given(parts=st.lists(st.sampled_from(["<s>", "</s>", "<|im_end|>", "<unk>", "a", " ", "\n", "<"])))
def test_b76_literal_text_never_gives_a_special_token(name, parts):
    tokenizer = family(name)
    text = "".join(parts)
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    unknown = tokenizer.special_ids.get("<unk>")  # what Unigram has no piece for
    assert not (set(ids) & set(tokenizer.special_ids.values())) - {unknown}
    if name in LOSSLESS:
        assert tokenizer.decode(ids) == text


def test_post_processors_that_add_both_ends_are_followed(tmp_path):
    backend = families.byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    tokenizer = load_tokenizer(write_folder(tmp_path, backend))
    assert tokenizer.encode("Hello") == backend.encode("Hello").ids
    assert tokenizer.encode("") == [1, 2]


def test_the_import_of_the_host_half_needs_no_jax():
    import subprocess
    import sys

    code = "import sys, jaxserve.text.chat, jaxserve.text.stream; sys.exit('jax' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
    )
