import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv_bench.errors import UsageError
from semkv_bench.tasks.encoding import encode_follow_up, encode_prompt, encode_target


def _bytes(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_template_and_tokenizer_give_one_bos_together(bos_twice):
    assert bos_twice.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False).startswith("<s>")
    assert bos_twice("x")["input_ids"][0] == bos_twice.bos_token_id
    ids = encode_prompt(bos_twice, "Hi", answer_prefix="It").input_ids
    assert bos_twice.decode(ids) == "<s><user>Hi</user><reply>It"
    assert ids.count(bos_twice.bos_token_id) == 1


def test_plain_prompt_has_the_tokenizers_own_bos(bos_twice):
    assert bos_twice.decode(encode_prompt(bos_twice, "Hi", chat=False).input_ids) == "<s>Hi"


def test_no_bos_is_forced_on_a_tokenizer_that_adds_none(chatml):
    encoded = encode_prompt(chatml, "Hi", answer_prefix="It is")
    assert chatml.decode(encoded.input_ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nIt is"
    assert encoded.input_ids.count(chatml.bos_token_id) == 2
    assert chatml.decode(encode_prompt(chatml, "Hi", chat=False).input_ids) == "Hi"


def test_without_template_the_prompt_is_plain(plain):
    assert encode_prompt(plain, "Hi ", answer_prefix="there").input_ids == tuple(_bytes(plain, "Hi there"))


def test_template_sees_a_fixed_date(bos_plain):
    dated = "{{ strftime_now('%d %b %Y') }}{{ strftime_now(\"-%Y\") }}|{{ enable_thinking }}|{{ messages[0].content }}"
    bos_plain = type(bos_plain)(
        tokenizer_object=bos_plain.backend_tokenizer, bos_token="<s>", chat_template=dated
    )
    assert encode_prompt(bos_plain, "x").text == "26 Jul 2024-2024|False|x"


def test_truncation_keeps_the_first_and_last_half(plain):
    encoded = encode_prompt(plain, "0123456789abcdef", max_tokens=7)
    assert plain.decode(encoded.input_ids) == "012def"
    assert encoded.truncated
    whole = encode_prompt(plain, "0123456789abcdef", max_tokens=16)
    assert plain.decode(whole.input_ids) == "0123456789abcdef"
    assert not whole.truncated


def test_bos_counts_in_the_first_half(bos_plain):
    # Six tokens of <s>0123456789: the first three are <s>01, the last three 789.
    assert bos_plain.decode(encode_prompt(bos_plain, "0123456789", max_tokens=6).input_ids) == "<s>01789"


def test_cap_includes_template_and_begun_answer(bos_twice):
    encoded = encode_prompt(bos_twice, "0123456789abcdef", answer_prefix="It", max_tokens=14)
    # The frame <s><user></user><reply>It is 6 tokens; of the 14, 8 remain for the prompt, and its own BOS is
    # one of the 9 that are cut: four at each end, BOS among the first.
    assert bos_twice.decode(encoded.input_ids) == "<s><user>012cdef</user><reply>It"


@settings(deadline=None, max_examples=60)
@given(text=st.text(min_size=1, max_size=120), limit=st.integers(12, 60), chat=st.booleans())
def test_never_longer_than_the_cap(bos_twice, text, limit, chat):
    encoded = encode_prompt(bos_twice, text, chat=chat, max_tokens=limit)
    assert 0 < len(encoded.input_ids) <= limit
    assert encoded.input_ids[0] == bos_twice.bos_token_id
    if not encoded.truncated:
        assert encoded == encode_prompt(bos_twice, text, chat=chat)


def test_a_character_cut_in_two_does_not_break_the_cap(plain):
    text = "汉字" * 50
    for limit in range(8, 40):
        assert len(encode_prompt(plain, text, max_tokens=limit).input_ids) <= limit


def test_a_template_that_repeats_the_prompt_keeps_the_cap(bos_plain):
    twice = "{{ messages[0]['content'] }}|{{ messages[0]['content'] }}"
    tokenizer = type(bos_plain)(
        tokenizer_object=bos_plain.backend_tokenizer, bos_token="<s>", chat_template=twice
    )
    encoded = encode_prompt(tokenizer, "0123456789", max_tokens=16)
    # The whole takes 22 tokens, 6 too many: of the prompt's 11, BOS among them, 5 may stay, so 2 at each end.
    assert tokenizer.decode(encoded.input_ids) == "<s>089|089"
    assert encoded.truncated


def test_cap_below_the_template_is_refused(bos_twice):
    with pytest.raises(UsageError, match="max_prompt_tokens=4 leaves no room"):
        encode_prompt(bos_twice, "0123456789", max_tokens=4)


def test_target_follows_the_prompt(plain, chatml):
    begun = encode_prompt(plain, "It is")
    assert plain.decode(encode_target(plain, begun, "42", spaced=True)) == " 42"
    assert plain.decode(encode_target(plain, begun, "42", spaced=False)) == "42"
    line = encode_prompt(chatml, "Q")
    assert chatml.decode(encode_target(chatml, line, "42", spaced=True)) == "42"


def test_target_after_a_special_token_has_no_space(bos_twice):
    prompt = encode_prompt(bos_twice, "Q")
    assert bos_twice.decode(prompt.input_ids[-1:]) == "<reply>"
    assert bos_twice.decode(encode_target(bos_twice, prompt, "42", spaced=True)) == "42"


def _talk(tokenizer, **keys):
    """Two turns, answered "42" and "43": (first prompt, first answer, tokens between, whole)."""
    first = encode_prompt(tokenizer, "One?", answer_prefix="It is", **keys)
    answer = encode_target(tokenizer, first, "42", spaced=True)
    whole, ids = encode_follow_up(
        tokenizer, first, "42", "Two?", spaced=True, answer_prefix="Then it is", **keys
    )
    return first, answer, whole, ids


def test_later_turn_is_what_the_template_puts_between_two_answers(chatml):
    first, answer, whole, ids = _talk(chatml)
    assert chatml.decode(ids) == (
        "<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\nThen it is"
    )
    assert whole.input_ids == first.input_ids + answer + ids
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "It is 42"},
        {"role": "user", "content": "Two?"},
    ]
    rendered = chatml.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert whole.text == rendered + "Then it is"
    assert list(whole.input_ids) == _bytes(chatml, whole.text)


def test_third_turn_goes_on_from_the_second(chatml):
    _, _, whole, _ = _talk(chatml)
    third, ids = encode_follow_up(chatml, whole, "43", "Three?", spaced=True, answer_prefix="Now it is")
    assert chatml.decode(third.input_ids).endswith(
        "Two?<|im_end|>\n<|im_start|>assistant\nThen it is 43<|im_end|>\n<|im_start|>user\nThree?<|im_end|>\n"
        "<|im_start|>assistant\nNow it is"
    )
    assert third.input_ids[-len(ids) :] == ids


def test_later_turn_without_template(plain, chatml):
    assert plain.decode(_talk(plain)[3]) == "\n\nTwo?\nThen it is"
    assert chatml.decode(_talk(chatml, chat=False)[3]) == "\n\nTwo?\nThen it is"


def test_one_bos_in_a_whole_conversation(bos_twice):
    _, _, whole, ids = _talk(bos_twice)
    assert bos_twice.decode(ids) == "</s><user>Two?</user><reply>Then it is"
    assert whole.input_ids.count(bos_twice.bos_token_id) == 1


def _with_template(tokenizer, template):
    return type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", chat_template=template
    )


def test_white_space_that_the_template_adds_or_trims_is_no_change(bos_plain):
    spaced = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}]"
        "{% else %} {{ m['content'] | trim }};{% endif %}{% endfor %}"
    )
    tokenizer = _with_template(bos_plain, spaced)
    assert tokenizer.decode(_talk(tokenizer)[3]) == ";[Two?]Then it is"
    first = encode_prompt(tokenizer, "One?")
    _, ids = encode_follow_up(tokenizer, first, "42 ", "Two?", spaced=True)
    assert tokenizer.decode(ids) == ";[Two?]"


THINKING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "<assistant>{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def test_an_empty_thought_that_is_not_printed_again_stays(bos_plain):
    tokenizer = _with_template(bos_plain, THINKING)
    first, _, whole, ids = _talk(tokenizer)
    assert first.text == "<user>One?\n<assistant><think>\n\n</think>\n\nIt is"
    assert tokenizer.decode(ids) == "\n<user>Two?\n<assistant><think>\n\n</think>\n\nThen it is"
    assert encode_follow_up(tokenizer, whole, "43", "Three?", spaced=True)[0].text.count("<think>") == 3


@pytest.mark.parametrize(
    ("template", "told"),
    [
        # Drops all but the last question.
        ("<{{ messages[-1]['content'] }}>", "leaves out what it is given"),
        # Marks the last message, so that the first question reads differently later.
        (
            "{% for m in messages %}<{{ m['content'] }}{% if loop.last %}, now answer{% endif %}>{% endfor %}",
            "changes earlier turns",
        ),
    ],
    ids=["drops", "rewrites"],
)
def test_a_template_that_rewrites_history_is_refused(bos_plain, template, told):
    with pytest.raises(UsageError, match=told) as raised:
        _talk(_with_template(bos_plain, template))
    assert "\n" not in str(raised.value)


@settings(deadline=None, max_examples=40)
@given(answer=st.text(max_size=20), question=st.text(min_size=1, max_size=20))
def test_whatever_is_said_the_tokens_join_up(chatml, answer, question):
    first = encode_prompt(chatml, "One?", answer_prefix="It is")
    whole, ids = encode_follow_up(chatml, first, answer, question, spaced=True)
    target = encode_target(chatml, first, answer, spaced=True)
    assert whole.input_ids == first.input_ids + target + ids
    assert list(whole.input_ids) == _bytes(chatml, whole.text)
