"""A tokenizer from the metadata of a GGUF file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxserve.text.parts import TokenizerParts
from model_zoo import gguf_header

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

# The patterns are those of the models' own tokenizer.json.  GPT-2's is built into ByteLevel; the
# others differ from it in how many digits go together and in what may stand before a word.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _cased(digits: str, short: str = "") -> str:
    """Words end where a lower-case letter is followed by an upper-case one; `short` forms stay
    with the word before."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}[{upper}]*[{lower}]+{short}|{lead}[{upper}]+[{lower}]*{short}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


class _Split(NamedTuple):
    """How a text is cut into words before byte-pair encoding."""

    pattern: str = ""  # "": GPT-2's
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # when the file does not say


_SPLITS = {
    "default": _Split(),
    "gpt-2": _Split(),
    "smollm": _Split(single_digits=True),
    "starcoder": _Split(single_digits=True),
    "refact": _Split(single_digits=True),
    "llama-bpe": _Split(_LLAMA3, whole_words=True, add_bos=True),
    "qwen2": _Split(_QWEN2, nfc=True),
    "dbrx": _Split(_LLAMA3),  # the words of cl100k: Phi-4, OLMo 2
    "gpt-4o": _Split(_cased(r"\p{N}{1,3}", _SHORT)),  # Phi-4 mini
    "tekken": _Split(_cased(r"\p{N}"), whole_words=True, add_bos=True),  # Mistral Nemo, Small
}

_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class _Words(NamedTuple):
    """The vocabulary of a file."""

    tokens: list[str]  # by id
    kinds: list[int]  # by id
    ids: dict[str, int]


def read_gguf(path: Path) -> TokenizerParts:
    """Raises ValueError when the file is damaged, or has no tokenizer or one of a kind that is not
    known here."""
    metadata = gguf_header.read_gguf(path).metadata
    values = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    source = str(path)
    model = values.get("model")
    words = _read_words(values, source)
    if model == "gpt2":
        name = str(values.get("pre", "default"))
        if name not in _SPLITS:
            raise ValueError(
                f"{source}: tokenizer.ggml.pre is '{name}', which is not known here "
                f"(known: {', '.join(sorted(_SPLITS))}); use the model's folder with tokenizer.json"
            )
        split = _SPLITS[name]
        backend, add_bos = _byte_level(words, _merges(values, words, source), split), split.add_bos
    elif model == "llama":
        prefix = bool(values.get("add_space_prefix", True))
        backend, add_bos = _sentencepiece(words, values, prefix, source), True
    else:
        raise ValueError(
            f"{source}: tokenizer.ggml.model is {model!r}, which is not known here "
            f"(known: gpt2, llama); use the model's folder with tokenizer.json"
        )
    _add_tokens(backend, words)
    special = {name: _token_id(values, key, words, source) for name, key in _NAMES.items()}
    eos = [_token_id(values, key, words, source) for key in _EOS_KEYS]
    template = metadata.get("tokenizer.chat_template")
    return TokenizerParts(
        source=source,
        backend=backend,
        named={name: words.tokens[token] for name, token in special.items() if token is not None},
        eos_ids=frozenset(token for token in eos if token is not None),
        prefix=_edge(values.get("add_bos_token", add_bos), special["bos_token"]),
        suffix=_edge(values.get("add_eos_token", False), special["eos_token"]),
        chat_template=template if isinstance(template, str) else None,
    )


def _edge(wanted: Any, token: int | None) -> tuple[int, ...]:
    return (token,) if wanted and token is not None else ()


def _token_id(values: Mapping[str, Any], key: str, words: _Words, source: str) -> int | None:
    token = values.get(key)
    if token is None:
        return None
    if not isinstance(token, int) or not 0 <= token < len(words.tokens):
        raise ValueError(
            f"{source}: tokenizer.ggml.{key} is {token!r}, but the vocabulary has ids "
            f"0 to {len(words.tokens) - 1}"
        )
    return token


def _column[T](values: Mapping[str, Any], key: str, kind: type[T], source: str) -> list[T]:
    column = values.get(key)
    if not isinstance(column, list) or not all(isinstance(value, kind) for value in column):
        raise ValueError(
            f"{source} has no tokenizer.ggml.{key}, or not of {kind.__name__} values; "
            f"use a GGUF file of a text model, or convert the model again"
        )
    return cast(list[T], column)


def _read_words(values: Mapping[str, Any], source: str) -> _Words:
    texts = _column(values, "tokens", str, source)
    types = _column(values, "token_type", int, source)
    if len(types) != len(texts):
        raise ValueError(
            f"{source}: tokenizer.ggml.token_type and tokenizer.ggml.tokens differ in length"
        )
    size = len(texts)
    # Converters pad the vocabulary to the rows of the embedding.
    while size and types[size - 1] == _UNUSED:
        size -= 1
    if not size:
        raise ValueError(f"{source}: tokenizer.ggml.tokens is empty; convert the model again")
    ids = {text: token for token, text in enumerate(texts[:size])}
    return _Words(texts[:size], types[:size], ids)


def _merges(values: Mapping[str, Any], words: _Words, source: str) -> list[tuple[str, str]]:
    parts = [merge.partition(" ") for merge in _column(values, "merges", str, source)]
    pairs = [(left, right) for left, _, right in parts]
    ids = words.ids
    for left, right in pairs:
        if left not in ids or right not in ids or left + right not in ids:
            raise ValueError(
                f"{source}: the merge of {left!r} and {right!r} in tokenizer.ggml.merges needs "
                f"a token that is not in the vocabulary; convert the model again"
            )
    return pairs


def _byte_level(
    words: _Words, merges: Sequence[tuple[str, str]], split: _Split
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=words.ids, merges=[*merges], ignore_merges=split.whole_words)
    )
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern)
    if split.pattern:
        cut = pre_tokenizers.Split(tokenizers.Regex(split.pattern), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, level])
    elif split.single_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    else:
        backend.pre_tokenizer = level
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    words: _Words, values: Mapping[str, Any], prefix: bool, source: str
) -> tokenizers.Tokenizer:
    """Byte-pair encoding over characters, spaces written as U+2581, with bytes for what is not in
    the vocabulary."""
    if "merges" in values:
        merges = _merges(values, words, source)
    else:
        merges = _merges_by_score(words, values, source)
    unknown = next((text for text, kind in zip(*words[:2], strict=True) if kind == _UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=words.ids,
            merges=merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in words.kinds,
        )
    )
    space = normalizers.Replace(" ", "▁")
    lead = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*lead, space])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(
    words: _Words, values: Mapping[str, Any], source: str
) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours that make the piece of the highest score: every way to cut
    a piece in two pieces is a merge, ranked by the score of the whole."""
    scores = _column(values, "scores", float, source)
    if len(scores) < len(words.tokens):
        raise ValueError(f"{source}: tokenizer.ggml.scores is shorter than tokenizer.ggml.tokens")
    plain = {
        text: token
        for text, token in words.ids.items()
        if words.kinds[token] not in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for text, token in plain.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in plain and right in plain:
                ranked.append((-scores[token], plain[left], plain[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_tokens(backend: tokenizers.Tokenizer, words: _Words) -> None:
    """Control tokens are special; tokens that a user defined are found in a text before it is cut
    into words."""
    added = [
        tokenizers.AddedToken(text, normalized=False, special=kind != _USER_DEFINED)
        for text, kind in zip(*words[:2], strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)  # pyright: ignore[reportUnknownMemberType]  the stub has a bare list
