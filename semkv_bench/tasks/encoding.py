"""Text to the token ids that a model is fed: chat template, truncation, one BOS, later turns."""

import datetime
import logging
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from semkv_bench.errors import UsageError

__all__ = ["Encoded", "encode_follow_up", "encode_prompt", "encode_target", "end_of_turn"]

# Some chat templates print today's date; the same prompt must not differ from day to day.
_TEMPLATE_DATE = datetime.date(2024, 7, 26)
_TODAY_CALL = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
# What opens an answer without thinking, and what templates leave out when they print the answer again.
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")
_SKIPPED = re.compile(r"\s+|<think>\s*</think>")
# Variables by which templates switch thinking off, and how a thought begins and ends.
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_THOUGHTS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "[THINK]": "[/THINK]",
}
_WITHOUT_TEMPLATE = "task.chat=false leaves the template out"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoded:
    """Token ids of a whole prompt, the text they spell, and whether the middle was cut out.

    ``said``: the texts of user and assistant in turn, the last one the begun answer.
    """

    input_ids: tuple[int, ...]
    text: str
    truncated: bool
    said: tuple[str, ...] = ()


def encode_prompt(
    tokenizer: Any, prompt: str, *, chat: bool = True, answer_prefix: str = "", max_tokens: int | None = None
) -> Encoded:
    """Encode ``prompt`` as one user message, or plainly for ``chat=False`` and tokenizers without a template.

    ``answer_prefix`` begins the answer for the model. A prompt that would make the whole longer than
    ``max_tokens`` loses its middle: the first and the last half of the limit stay, cut at tokens of the
    plain prompt before the template is applied, as LongBench does it. A BOS is there exactly once if the
    tokenizer adds one, whatever the template writes. Raises UsageError where the template alone fills
    ``max_tokens``.
    """
    if max_tokens is None:
        return _encode_whole(tokenizer, prompt, chat, answer_prefix)
    plain = _ids(tokenizer, prompt)
    frame = len(_encode_whole(tokenizer, "", chat, answer_prefix).input_ids)
    # The BOS stands among the plain prompt's tokens and again in the frame around them.
    limit = max_tokens - frame + _bos_count(tokenizer)
    while limit >= 2:
        truncated = len(plain) > limit
        text = _without_middle(tokenizer, plain, limit) if truncated else prompt
        whole = _encode_whole(tokenizer, text, chat, answer_prefix)
        excess = len(whole.input_ids) - max_tokens
        if excess <= 0:
            return replace(whole, truncated=truncated)
        # Decoding and encoding again can add tokens at the cut, where it split a character.
        limit = min(limit, len(plain)) - max(excess, 2)
    raise UsageError(
        f"max_prompt_tokens={max_tokens} leaves no room for a prompt: the template around it takes {frame} "
        f"tokens; give more than {frame + 2}"
    )


def encode_target(tokenizer: Any, prompt: Encoded, answer: str, *, spaced: bool) -> tuple[int, ...]:
    """Token ids of ``answer`` where it follows ``prompt``.

    ``spaced``: the language separates words by spaces, so that one comes first unless the prompt ends in one
    or in a special token.
    """
    return tuple(_following(tokenizer, prompt, _gap(tokenizer, prompt, spaced) + answer))


def encode_follow_up(
    tokenizer: Any,
    prompt: Encoded,
    answer: str,
    question: str,
    *,
    spaced: bool,
    chat: bool = True,
    answer_prefix: str = "",
) -> tuple[Encoded, tuple[int, ...]]:
    """The conversation in which ``answer`` followed ``prompt`` and ``question`` is asked next.

    Returns all of it, ready for a further turn, and the token ids that are fed after the tokens of the
    answer: what the chat template puts between an answer's text and the next begun answer. Without a chat
    template an empty line comes before the question and a line break before the begun answer. ``spaced`` as
    in ``encode_target``.

    The tokens of earlier turns are in the cache by then and stay as they were fed, with their white space
    and with the empty thinking block that some templates do not print again. Raises UsageError where the
    template changes anything else of what was said before.
    """
    answer = _gap(tokenizer, prompt, spaced) + answer
    fed = replace(
        prompt,
        text=prompt.text + answer,
        input_ids=prompt.input_ids + tuple(_following(tokenizer, prompt, answer)),
    )
    said = (*prompt.said[:-1], prompt.said[-1] + answer, question, answer_prefix)
    if chat and getattr(tokenizer, "chat_template", None):
        between = _after(_render(tokenizer, said[:-1]), fed.text)
    else:
        between = f"\n\n{question}\n"
    ids = tuple(_following(tokenizer, fed, between + answer_prefix))
    whole = replace(fed, text=fed.text + between + answer_prefix, input_ids=fed.input_ids + ids, said=said)
    return whole, ids


def _after(rendered: str, fed: str) -> str:
    """What follows ``fed`` in ``rendered``, which begins with it save for white space and empty thoughts."""
    end = 0
    for character in "".join(_EMPTY_THOUGHT.sub("", fed).split()):
        while end < len(rendered) and (skipped := _SKIPPED.match(rendered, end)):
            end = skipped.end()
        if end == len(rendered) or rendered[end] != character:
            raise UsageError(
                "this model's chat template changes earlier turns when a later one is added, so their cache "
                f"cannot be kept; choose another model, or {_WITHOUT_TEMPLATE}"
            )
        end += 1
    trailing = fed[len(fed.rstrip()) :]
    return rendered[end:].removeprefix(trailing)


def _gap(tokenizer: Any, prompt: Encoded, spaced: bool) -> str:
    """What separates an answer from ``prompt``: nothing, or a space."""
    if not spaced or not prompt.text or prompt.text[-1].isspace():
        return ""
    return "" if prompt.input_ids[-1] in set(tokenizer.all_special_ids) else " "


def _following(tokenizer: Any, prompt: Encoded, text: str) -> list[int]:
    """Token ids of ``text`` after ``prompt``, whose own tokens stay."""
    whole = _ids(tokenizer, prompt.text + text)
    n = len(prompt.input_ids)
    return whole[n:] if whole[:n] == list(prompt.input_ids) else _raw_ids(tokenizer, text)


def _encode_whole(tokenizer: Any, prompt: str, chat: bool, answer_prefix: str) -> Encoded:
    text = prompt
    if chat and getattr(tokenizer, "chat_template", None):
        text = _render(tokenizer, (prompt,))
    text += answer_prefix
    return Encoded(tuple(_ids(tokenizer, text)), text, False, (prompt, answer_prefix))


def _render(tokenizer: Any, said: tuple[str, ...], *, open_answer: bool = True) -> str:
    """The chat template's text of what user and assistant said in turn, up to where the assistant goes on.

    open_answer: end with what opens the assistant's next answer. Raises UsageError where the template fails, or leaves
    out what the user said.
    """
    failure: Exception | None = None
    for as_content in (str, _as_parts):
        roles = ({"role": ("user", "assistant")[i % 2], "content": as_content(t)} for i, t in enumerate(said))
        try:
            text = tokenizer.apply_chat_template(
                list(roles),
                tokenize=False,
                add_generation_prompt=open_answer,
                chat_template=_undated(tokenizer.get_chat_template()),
                # A thinking block would use up a short answer's limit.
                **dict.fromkeys(_THINKING_SWITCHES, False),
            )
        except Exception as error:  # whatever the template's code raises
            failure = failure or error
            continue
        if all(question.strip() in text for question in said[::2]):
            _warn_of_open_thought(text, open_answer)
            return text
    name = getattr(tokenizer, "name_or_path", "") or "this model"
    if failure is not None:
        reason = (str(failure).strip() or type(failure).__name__).splitlines()[0].rstrip(".")
        raise UsageError(f"the chat template of {name} fails ({reason}); {_WITHOUT_TEMPLATE}") from failure
    raise UsageError(f"the chat template of {name} leaves out what it is given; {_WITHOUT_TEMPLATE}")


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@lru_cache(maxsize=1)
def _say_once(message: str) -> None:
    _log.warning("%s", message)


def _warn_of_open_thought(text: str, open_answer: bool) -> None:
    opened = [tag for tag, end in _THOUGHTS.items() if text.rfind(tag) > text.rfind(end)]
    if open_answer and opened and text.rstrip().endswith(opened[0]):
        _say_once(
            f"the chat template opens every answer with a thought ({opened[0]}) and has no switch for it, so short "
            f"answers may be all thought; {_WITHOUT_TEMPLATE}"
        )


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template writes behind an assistant's answer; None where there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        text = _render(tokenizer, ("question", "answer"), open_answer=False)
    except UsageError:
        return None
    ids = _raw_ids(tokenizer, text[text.rfind("answer") + len("answer") :].lstrip())
    marks = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    return ids[0] if "answer" in text and ids and ids[0] in marks else None


def _without_middle(tokenizer: Any, ids: list[int], limit: int) -> str:
    half = limit // 2
    return "".join(
        tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for part in (ids[:half], ids[-half:])
    )


def _undated(template: str) -> str:
    return _TODAY_CALL.sub(lambda call: repr(_TEMPLATE_DATE.strftime(call.group(2))), template)


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of ``text`` with one leading BOS where the tokenizer adds one, and nothing else added."""
    ids = _raw_ids(tokenizer, text)
    if _bos_count(tokenizer):
        bos = tokenizer.bos_token_id
        while ids and ids[0] == bos:
            ids = ids[1:]
        ids = [bos, *ids]
    return ids


def _raw_ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _bos_count(tokenizer: Any) -> int:
    """1 if the tokenizer itself puts its BOS before plain text, else 0."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return 0
    return int(tokenizer("a", verbose=False)["input_ids"][:1] == [bos])
