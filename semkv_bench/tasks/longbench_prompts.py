"""Prompt templates for LongBench: the benchmark's own, fetched and checked, or wording of this project."""

import hashlib
import logging
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.files import cache_dir, parse_json, write_atomically

__all__ = ["FOLLOW_UPS", "OFFICIAL_SHA256", "OFFICIAL_URL", "OWN", "PromptSet", "fill", "load_prompts"]

_log = logging.getLogger(__name__)

OFFICIAL_URL = (
    "https://raw.githubusercontent.com/THUDM/LongBench/2e00731f8d0bff23dc4325161044d0ed8af94c1e"
    "/LongBench/config/dataset2prompt.json"
)
OFFICIAL_SHA256 = "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30"
_FILE = "dataset2prompt.json"
_TIMEOUT_S = 15

_PASSAGES = (
    "Several passages are printed below, and then a question about them.\n\n{context}\n\n"
    "Using these passages, reply to the question with the answer alone, in as few words as it takes.\n\n"
    "Question: {input}\nShort answer:"
)
OWN: Mapping[str, str] = {
    "narrativeqa": (
        "What comes next is a story, from a book or from the script of a film.\n\n{context}\n\n"
        "That was the story. Reply to this question about it in a few words, and leave out the reasons.\n\n"
        "Question: {input}\nShort answer:"
    ),
    "qasper": (
        "This is the text of a research paper.\n\n{context}\n\n"
        "Reply to the question about the paper in a few words or one sentence, and leave out the reasons. "
        'Say "yes" or "no" where that is asked, and "unanswerable" where the paper does not tell.\n\n'
        "Question: {input}\nShort answer:"
    ),
    "multifieldqa_en": (
        "Here is a document.\n\n{context}\n\nReply to the question about this document with a short answer "
        "and nothing more.\n\nQuestion: {input}\nShort answer:"
    ),
    "multifieldqa_zh": (
        "下面是一份文档。\n\n{context}\n\n文档到此结束。请根据文档内容，用中文简要回答问题，不必解释。\n\n"
        "提问：{input}\n简答："
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": (
        "下面是若干篇网上的资料。\n\n{context}\n\n资料到此结束。请参考这些资料，用中文回答用户的提问。\n\n"
        "提问：{input}\n答："
    ),
    "gov_report": (
        "A government office published this report.\n\n{context}\n\n"
        "Sum up the whole report in about one page.\n\nThe report in one page:"
    ),
    "qmsum": (
        "These are the minutes of a meeting, word for word.\n\n{context}\n\n"
        "Using what was said in the meeting, respond to the request below in a few sentences.\n\n"
        "Request: {input}\nResponse:"
    ),
    "multi_news": (
        "These articles report on one event.\n\n{context}\n\n"
        "Sum up what all the articles say together in about one page.\n\nThe articles in one page:"
    ),
    "vcsum": "这是一次会议的发言实录。\n\n{context}\n\n实录到此结束。请用一段话概括会议讲了什么。\n\n概括：",
    "trec": "Each question below is followed by its type. Name that of the last one.\n\n{context}\n{input}",
    "triviaqa": (
        "Each passage below comes with a question and a short answer. Answer the last question in the same "
        "way.\n\n{context}\n\n{input}"
    ),
    "samsum": (
        "Each dialogue below is followed by a summary of a sentence or two. Write the summary of the last "
        "one.\n\n{context}\n\n{input}"
    ),
    "lsht": "下面每条新闻之后都注明了它的类别。请写出最后一条新闻的类别。\n\n{context}\n{input}",
    "passage_count": (
        "Some of the numbered paragraphs below are copies of others. Find out how many different ones "
        "remain when every copy is taken away.\n\n{context}\n\n"
        "Write the number of different paragraphs as a numeral and nothing else.\n\n"
        "Number of different paragraphs:"
    ),
    "passage_retrieval_en": (
        "Below are numbered paragraphs, and after them a summary of one of these.\n\n{context}\n\n"
        "The summary:\n\n{input}\n\n"
        'Which paragraph does it sum up? Reply in the form "Paragraph N", N being its number.\n\nReply:'
    ),
    "passage_retrieval_zh": (
        "下面是编了号的段落，之后是其中某一段的概要。\n\n{context}\n\n概要如下：\n\n{input}\n\n"
        "这份概要写的是哪一段？只需按“段落N”的形式作答，N为该段的编号。\n\n答："
    ),
    "lcc": (
        "This source file stops in the middle. Write the one line that follows.\n{context}"
        "The line that follows:\n"
    ),
    "repobench-p": (
        "These are pieces of one project; the last source file stops in the middle. Write the one line that "
        "follows.\n{context}{input}The line that follows:\n"
    ),
}

_SHORT, _CHINESE = "Question: {input}\nShort answer:", "提问：{input}\n简答："
# A later question about the same text: what OWN says without the text and without what it is.
FOLLOW_UPS: Mapping[str, str] = {
    "narrativeqa": _SHORT,
    "qasper": _SHORT,
    "multifieldqa_en": _SHORT,
    "multifieldqa_zh": _CHINESE,
    "hotpotqa": _SHORT,
    "2wikimqa": _SHORT,
    "musique": _SHORT,
    "dureader": "提问：{input}\n答：",
    "qmsum": "Request: {input}\nResponse:",
    "passage_retrieval_en": (
        "The summary:\n\n{input}\n\n"
        'Which paragraph does it sum up? Reply in the form "Paragraph N", N being its number.\n\nReply:'
    ),
    "passage_retrieval_zh": (
        "概要如下：\n\n{input}\n\n这份概要写的是哪一段？只需按“段落N”的形式作答，N为该段的编号。\n\n答："
    ),
}


@dataclass(frozen=True)
class PromptSet:
    """Templates by task, and their source: ``official``, ``own``, or ``custom`` for an altered local file."""

    source: str
    templates: Mapping[str, str]


def fill(template: str, context: str, input: str) -> str:
    """Put ``context`` and ``input`` in their places; braces within them stay as they are."""
    values = {"context": context, "input": input}
    return re.sub(r"\{(context|input)\}", lambda match: values[match.group(1)], template)


def load_prompts(choice: str, path: str | Path | None, names: tuple[str, ...]) -> PromptSet:
    """Templates for ``names``; ``choice`` is ``auto``, ``official`` or ``own``.

    The benchmark's own come from ``path`` (its dataset2prompt.json or the folder of it), from the cache, or
    from the benchmark's repository at a fixed commit, in this order, the latter two only with the right
    SHA-256. ``auto`` falls back on ``own`` with a warning where none can be had; ``official`` raises
    MissingError.
    """
    if choice == "own":
        return PromptSet("own", OWN)
    if path is not None:
        return _read_local(Path(path).expanduser(), names)
    try:
        return PromptSet("official", _templates(_official_bytes(), OFFICIAL_URL, names))
    except _Unavailable as error:
        if choice == "official":
            raise MissingError(
                f"LongBench's own prompts cannot be had ({error}); save {OFFICIAL_URL} as {_FILE} and give "
                "task.prompts_path=FILE, or use prompts=own"
            ) from None
        _log.warning(
            "LongBench's own prompts cannot be had (%s): prompts of this project's wording are used, and "
            "scores are not comparable with published ones; task.prompts_path=FILE gives the benchmark's.",
            error,
        )
        return PromptSet("own", OWN)


class _Unavailable(Exception):
    """The official file is neither cached nor fetchable; the message says why."""


def _read_local(path: Path, names: tuple[str, ...]) -> PromptSet:
    file = path / _FILE if path.is_dir() else path
    try:
        data = file.read_bytes()
    except OSError:
        raise MissingError(f"task.prompts_path={path} is not there; give {_FILE} or its folder") from None
    templates = _templates(data, str(file), names)
    if _sha256(data) == OFFICIAL_SHA256:
        return PromptSet("official", templates)
    _log.warning("%s is not the published file; its prompts are used and recorded as custom.", file)
    return PromptSet("custom", templates)


def _templates(data: bytes, label: str, names: tuple[str, ...]) -> dict[str, str]:
    try:
        table = parse_json(data)
    except ValueError as error:
        raise UsageError(f"{label}: not valid JSON ({error})") from None
    if not isinstance(table, dict):
        raise UsageError(f"{label}: not a JSON object of task names and prompts")
    for name in names:
        if not isinstance(table.get(name), str) or "{context}" not in table[name]:
            raise UsageError(f"{label}: no prompt with {{context}} for {name}")
    return table


def _official_bytes() -> bytes:
    cached = cache_dir() / "longbench" / _FILE
    if cached.is_file():
        data = cached.read_bytes()
        if _sha256(data) == OFFICIAL_SHA256:
            return data
    data = _fetch()
    if _sha256(data) != OFFICIAL_SHA256:
        raise _Unavailable("what was fetched is not the published file")
    _store(cached, data)
    return data


def _fetch() -> bytes:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise _Unavailable("HF_HUB_OFFLINE is set")
    try:
        with urllib.request.urlopen(OFFICIAL_URL, timeout=_TIMEOUT_S) as response:
            return response.read()
    except (urllib.error.URLError, OSError) as error:
        raise _Unavailable(f"no network: {getattr(error, 'reason', error)}") from None


def _store(file: Path, data: bytes) -> None:
    """Write in one step, so that another process never reads half a file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, data)
    except OSError as error:
        _log.warning("LongBench's prompts could not be kept in %s (%s).", file, error)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
