"""Tokenizers from model folders, and what all tokenizers have in common."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from jaxserve.text.tokenizer import load_tokenizer
from tests.unit import text_families as families
from tests.unit.text_families import LAW, TEXTS, assert_equal, family, write_folder, write_gguf

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
    assert_equal(first, second)


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
