"""Small tokenizers of every family, trained here, as folders and as GGUF files."""

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxserve.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The engine cuts prompts into chunks that snap to compiled shapes, and packs them.",
    "Hello world! Hello, worlds. It's 2026 and we've 12345 tokens; they'll wait.",
    "def step(self):\n    chunks = self.scheduler.schedule()\n\n    return chunks\n",
    "Übergröße, café, naïve; 你好世界，你好。한국어 텍스트 😀 👩‍👩‍👧",
    "one two  three   four    five\t\tsix \n seven\r\neight ...  nine .",
] * 4
LAW = settings(derandomize=True, deadline=None, max_examples=60)
TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(
        st.sampled_from([*" \n\t09'aZ.é你😀", "  ", "\r\n", " the", "12", "e\u0301"]), max_size=40
    ).map("".join),
)
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def byte_level(*before: Any, size: int = 600, **options: Any) -> tokenizers.Tokenizer:
    """GPT-2's kind; `before` are pre-tokenizers that run first."""
    backend = tokenizers.Tokenizer(models.BPE(**options))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not options)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece(prefix: bool = True) -> tokenizers.Tokenizer:
    """Llama 2's kind: spaces as U+2581, byte fallback; Gemma's without `prefix`."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    lead = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*lead, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *BYTES],
        limit_alphabet=60,
        max_token_length=12,
        show_progress=False,
    )
    backend.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    return _without_byte_marks(backend, ("<s>",))


def unigram() -> tokenizers.Tokenizer:
    """T5's kind: Metaspace on both sides, no byte fallback, so that unknown characters are lost."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _without_byte_marks(
    backend: tokenizers.Tokenizer, before: tuple[str, ...]
) -> tokenizers.Tokenizer:
    """Byte tokens are words of the vocabulary, not marks to be found in a text."""
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [
        entry for entry in spec["added_tokens"] if entry["content"] not in BYTES
    ]
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A"],
        special_tokens=[(text, backend.token_to_id(text)) for text in before],
    )
    return backend


FAMILIES: Mapping[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "gemma": functools.partial(sentencepiece, prefix=False),
    "unigram": unigram,
}


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    """`files`: name without .json -> its contents."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def write_gguf(path: Path, backend: tokenizers.Tokenizer, model: str, **values: Any) -> Path:
    """`values`: more keys of tokenizer.ggml; `scores=True` writes scores in place of merges,
    `padding=n` adds n unused tokens at the end."""
    spec = json.loads(backend.to_str())
    special = {entry["content"]: 3 if entry["special"] else 4 for entry in spec["added_tokens"]}
    padding = values.pop("padding", 0)
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
    kinds = [
        2 if text == "<unk>" else special.get(text) or (6 if text in BYTES else 1)
        for text in tokens
    ] + [5] * padding
    tokens += [f"[PAD{number}]" for number in range(padding)]
    merges = [" ".join(pair) for pair in spec["model"]["merges"]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if values.pop("scores", False):
        ranks = {merge.replace(" ", ""): rank for rank, merge in reversed([*enumerate(merges)])}
        writer.add_token_scores([float(-ranks.get(text, len(ranks))) for text in tokens])
    else:
        writer.add_token_merges(merges)
    template = values.pop("chat_template", None)
    if template:
        writer.add_chat_template(template)
    for key, value in values.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@functools.cache
def family(name: str) -> Tokenizer:
    """The tokenizer of a family, loaded as a user loads it."""
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(write_folder(Path(folder), FAMILIES[name]()))


def assert_equal(first: Tokenizer, second: Tokenizer) -> None:
    """Same facts, and same ids and text for texts of every kind."""
    for name in ("vocab_size", "eos_ids", "chat_template", "named_tokens", "special_ids"):
        assert getattr(first, name) == getattr(second, name), name
    for text in ["", "Hello world", "a <s>b</s> 12\n\n3", "<|im_end|> x", "你好 😀"]:
        for parse in (True, False):
            ids = first.encode(text, parse_special=parse)
            assert ids == second.encode(text, parse_special=parse)
            assert first.decode(ids) == second.decode(ids)
