"""Chat templates of every kind: what was put in must come out, or one line says so."""

import logging

import pytest
from byte_tokenizers import CHATML_TEMPLATE, byte_tokenizer

from semkv_bench.errors import UsageError
from semkv_bench.tasks import Synthetic, encoding
from semkv_bench.tasks.encoding import encode_prompt, end_of_turn

PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
RAISING = "{{ raise_exception('only tools may speak') }}"
BROKEN = "{% for m in messages %}{{ m['content'] }}"
THINKING = CHATML_TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
SWITCHED = CHATML_TEMPLATE + (
    "{% if add_generation_prompt and SWITCH is not defined or add_generation_prompt and SWITCH %}<think>\n{% endif %}"
)


def with_template(template):
    return byte_tokenizer(["<|im_start|>", "<|im_end|>"], template, adds_bos=False)


def examples(template, **options):
    return Synthetic(subset=["niah_noise"], length=600, **options).examples(with_template(template), [0], 1)


def test_a_template_of_content_parts_is_given_parts():
    tokenizer = with_template(PARTS)
    text = tokenizer.decode(encode_prompt(tokenizer, "What is it?", answer_prefix="It").input_ids)
    assert text == "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\nIt"
    (example,) = examples(PARTS)
    assert 500 < len(example.input_ids) <= 600


@pytest.mark.parametrize(
    ("template", "said"),
    [(FORGETFUL, "leaves out what it is given"), (RAISING, "only tools may speak"), (BROKEN, "fails")],
)
def test_a_template_that_cannot_be_used_is_one_line_that_names_the_way_out(template, said):
    with pytest.raises(UsageError, match=said) as raised:
        examples(template)
    assert "task.chat=false" in str(raised.value) and "\n" not in str(raised.value)
    (example,) = examples(template, chat=False)
    assert 500 < len(example.input_ids) <= 600


def test_a_document_that_is_left_out_is_refused_where_prompts_are_cut():
    with pytest.raises(UsageError, match="leaves out"):
        encode_prompt(with_template(FORGETFUL), "a document " * 80, max_tokens=200)


def test_a_haystack_that_does_not_grow_is_refused():
    from semkv_bench.tasks.encoding import Encoded
    from semkv_bench.tasks.needles import bury

    with pytest.raises(UsageError, match="do not grow"):
        bury("mine", ["needle"], [0.5], lambda: "word", lambda text: Encoded((1, 2, 3), text, False), 50)


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_thinking_is_switched_off_where_there_is_a_switch(switch, caplog):
    tokenizer = with_template(SWITCHED.replace("SWITCH", switch))
    with caplog.at_level(logging.WARNING):
        assert encode_prompt(tokenizer, f"Why {switch}?").text.endswith("assistant\n")
    assert not caplog.records


def test_a_thought_that_no_switch_closes_is_said_once(caplog):
    encoding._say_once.cache_clear()
    tokenizer = with_template(THINKING)
    with caplog.at_level(logging.WARNING):
        for question in ("Why?", "How?"):
            assert encode_prompt(tokenizer, question).text.endswith("<think>\n")
    (said,) = caplog.messages
    assert "<think>" in said and "task.chat=false" in said


@pytest.mark.parametrize(
    ("template", "token"),
    [(CHATML_TEMPLATE, "<|im_end|>"), (PARTS, "<|im_end|>"), (None, None), (RAISING, None)],
)
def test_what_ends_an_assistants_turn(template, token):
    tokenizer = with_template(template)
    assert end_of_turn(tokenizer) == (None if token is None else tokenizer.convert_tokens_to_ids(token))


def test_a_template_that_ends_turns_with_plain_text_has_no_end_token():
    plain = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    assert end_of_turn(with_template(plain)) is None
