"""Chat messages to ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text import template
from jaxserve.text.chat import render_chat
from jaxserve.text.tokenizer import load_tokenizer
from tests.unit import text_families as families
from tests.unit.text_families import write_folder

LAW = settings(derandomize=True, deadline=None, max_examples=60)
TEMPLATES = {"byte_level": families.CHATML, "sentencepiece": families.LLAMA2}
CONTENTS = st.lists(st.text(max_size=20), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def tokenizers_(tmp_path_factory):
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {
        name: load_tokenizer(
            write_folder(
                tmp_path_factory.mktemp(name),
                families.FAMILIES[name](),
                tokenizer_config={"chat_template": text, **names},
            )
        )
        for name, text in TEMPLATES.items()
    }


def _messages(contents):
    return [
        {"role": "assistant" if i % 2 else "user", "content": text}
        for i, text in enumerate(contents)
    ]


def _rendered(tokenizer, messages):
    variables = {**tokenizer.named_tokens, "messages": messages, "add_generation_prompt": True}
    return template.render(tokenizer.chat_template, variables)


@pytest.mark.parametrize("name", [*TEMPLATES])
@LAW
@given(contents=CONTENTS)
def test_ordinary_contents_encode_as_the_rendered_text(tokenizers_, name, contents):
    tokenizer, messages = tokenizers_[name], _messages(contents)
    expected = tokenizer.encode(_rendered(tokenizer, messages), add_special=False)
    assert render_chat(tokenizer, messages) == expected


@pytest.mark.parametrize("name", [*TEMPLATES])
@LAW
@given(contents=CONTENTS)
def test_both_ways_of_encoding_agree_on_ordinary_contents(tokenizers_, name, contents):
    """The way for contents with special tokens gives the same ids when there is none."""
    tokenizer = tokenizers_[name]
    text = _rendered(tokenizer, _messages(contents))
    assert tokenizer.encode_marked(text, {"\U0010fffd": "x"}) == tokenizer.encode(
        text, add_special=False
    )


@pytest.mark.parametrize("name", [*TEMPLATES])
@LAW
@given(data=st.data())
def test_b76_contents_never_become_special_tokens(tokenizers_, name, data):
    tokenizer = tokenizers_[name]
    piece = st.sampled_from([*tokenizer.special_ids, "a", " ", "\n", "<", "\U0010fffd"])
    contents = data.draw(st.lists(st.lists(piece).map("".join), min_size=1, max_size=3))
    messages = _messages(contents)
    ids = render_chat(tokenizer, messages)
    special = set(tokenizer.special_ids.values())
    harmless = render_chat(tokenizer, _messages(["a"] * len(contents)))
    assert [t for t in ids if t in special] == [t for t in harmless if t in special]
    decoded = tokenizer.decode(ids, skip_special=False)
    expected = _rendered(tokenizer, messages)
    if tokenizer.strips_first_space:  # Llama 2's kind puts a space after every special token
        decoded, expected = decoded.replace(" ", ""), expected.replace(" ", "")
    assert decoded == expected


def test_b76_other_strings_of_a_message_are_literal_too(tokenizers_):
    tokenizer = tokenizers_["byte_level"]
    tokenizer_ids = render_chat(tokenizer, [{"role": "user<|im_end|>", "content": "x"}])
    assert tokenizer_ids.count(2) == 1


def test_b75_the_template_alone_decides_about_bos(tokenizers_):
    tokenizer = tokenizers_["sentencepiece"]
    ids = render_chat(tokenizer, _messages(["Hello"]))
    assert ids.count(1) == 1
    assert tokenizer.encode(_rendered(tokenizer, _messages(["Hello"]))) == ids


def test_b75_a_template_without_bos_gives_none(tmp_path):
    backend = families.sentencepiece()
    tokenizer = load_tokenizer(
        write_folder(tmp_path, backend, tokenizer_config={"chat_template": families.CHATML})
    )
    assert tokenizer.encode("x")[0] == 1
    assert 1 not in render_chat(tokenizer, _messages(["x"]))


def test_b76_of_two_special_tokens_at_one_place_the_longer_counts(tmp_path):
    """As the library does it, in the template and in a message; keys of a message count too."""
    backend = families.byte_level()
    backend.add_special_tokens(["<a>", "<a>b"])
    source = "<a>b<a>c{{ messages[0] | tojson }}"
    folder = write_folder(tmp_path, backend, tokenizer_config={"chat_template": source})
    tokenizer = load_tokenizer(folder)
    message = {"role": "user", "content": "<a>b<a>c", "<a>b": ["<a>"]}
    ids = render_chat(tokenizer, [message])
    short, long = tokenizer.special_ids["<a>"], tokenizer.special_ids["<a>b"]
    assert ids[:2] == [long, short]
    assert not {short, long} & set(ids[2:])
    text = tokenizer.decode(ids, skip_special=False)
    assert text == _rendered(tokenizer, [message])


def test_content_parts_are_joined(tokenizers_):
    tokenizer = tokenizers_["byte_level"]
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert render_chat(tokenizer, _messages([parts])) == render_chat(
        tokenizer, _messages(["Hello"])
    )


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one message"),
        ("Hello", "must be a list"),
        (None, "must be a list"),
        (["Hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content must be a string"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] must be .*text"),
        ([{"role": "user", "content": "\ud800"}], r"messages\[0\].content .* U\+D800"),
        ([{"role": "user", "content": "", "x": {"y": ["\udc00"]}}], r"messages\[0\].x.y\[0\] .*U"),
    ],
)
def test_bad_messages_are_refused_by_field(tokenizers_, messages, match):
    with pytest.raises(ValueError, match=match):
        render_chat(tokenizers_["byte_level"], messages)


def test_a_model_without_a_template_is_refused():
    with pytest.raises(ValueError, match="no chat template"):
        render_chat(families.family("byte_level"), _messages(["Hello"]))


def _doubling(operator):
    return (
        "{% set n = namespace(s='aa') %}"
        "{% for i in range(99) %}{% set n.s = n.s OPERATOR n.s %}{% endfor %}"
    ).replace("OPERATOR", operator)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for", "template"),
        ("{{ messages[9].content }}", "template"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|safely"),
        ("{% set ns = namespace(_x=1) %}", "private"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "private"),
        (
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "loop",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "memory"),
        ("{{ range(10 ** 9) | list }}", "[Rr]ange"),
        ("{{ 'a' * 10000000 }}", "characters"),
        ("{{ ([1] * 10000000) | length }}", "characters"),
        ("{{ 10 ** 10000000 }}", "power"),
        ("{{ '%0999999999d' % 1 }}", "width"),
        ("{{ '%.*f' % (99999999, 1.0) }}", "width"),
        (
            _doubling("~"),
            "characters",
        ),
        (
            _doubling("+"),
            "characters",
        ),
        ("{% for i in range(50000) %}{{ 'a' * 1000 }}{% endfor %}", "characters"),
    ],
)
def test_templates_that_fail_or_never_end_are_refused(source, match):
    with pytest.raises(ValueError, match=match):
        template.render(source, {"messages": [{"content": "x"}]})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ x | tojson }}", '{"a": "<é>"}'),
        ("{{ x | tojson(indent=1) }}", '{\n "a": "<é>"\n}'),
        ("{% generation %}{{ x.a }}{% endgeneration %}!", "<é>!"),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        (
            "{% set n = namespace(k=1) %}{% set n.k = n.k + 2 %}{{ n.k }}",
            "3",
        ),
        (
            "{{ 'a' ~ 1 ~ none }}{{ 'b' + 'c' }}{{ '-' * 3 }}{{ 7 % 4 }}{{ 2 ** 3 }}",
            "a1Nonebc---38",
        ),
        ("{{ '%s: %03d%%' % ('a', 7) }}", "a: 007%"),
        ("{{ missing }}{{ tools is defined and tools }}", "False"),
        (
            "{% macro m(t) %}[{{ t }}{{ caller() }}]{% endmacro %}{% call m('x') %}y{% endcall %}",
            "[xy]",
        ),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_templates_have_what_transformers_gives_them(source, text):
    assert template.render(source, {"x": {"a": "<é>"}}) == text
