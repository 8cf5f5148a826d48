"""Questions over documents for RULER's ``qa_1`` and ``qa_2``: SQuAD and HotpotQA, from their files or the hub."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.files import parse_json

__all__ = ["HOTPOTQA", "SQUAD", "Question", "open_questions"]

SQUAD, HOTPOTQA = "squad", "hotpotqa"
_HUB = {SQUAD: ("rajpurkar/squad_v2", None), HOTPOTQA: ("hotpotqa/hotpot_qa", "distractor")}


@dataclass(frozen=True)
class Question:
    """A question, the answers that are right, and the documents that belong to it."""

    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]


def open_questions(kind: str, path: Path | None) -> tuple[Question, ...]:
    """The questions of ``kind`` that have an answer, in their order.

    path: the data set's own file of its development split (``dev-v2.0.json``, ``hotpot_dev_distractor_v1.json``);
    None: the hub's.

    Raises:
        MissingError: the file is not there, or the hub cannot be reached.
        UsageError: the file is of another form.
    """
    if path is None:
        found = _from_hub(kind)
    else:
        if not path.is_file():
            raise MissingError(f"task.{kind}={path} does not exist")
        try:
            content = parse_json(path.read_bytes())
            found = tuple((_squad if kind == SQUAD else _hotpotqa)(content))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise UsageError(
                f"task.{kind}={path} is not of the form of that data set's own file: {type(error).__name__} {error}"
            ) from error
    if not found:
        raise UsageError(f"task.{kind}={path} holds no question with an answer")
    return found


def _squad(content: Mapping[str, Any]) -> Iterator[Question]:
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                if answers:
                    yield Question(asked["question"], answers, (paragraph["context"],))


def _hotpotqa(content: list[Mapping[str, Any]]) -> Iterator[Question]:
    for asked in content:
        if not isinstance(asked, Mapping):
            raise ValueError("a list of questions is expected")
        documents = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"])
        yield Question(asked["question"], (asked["answer"],), documents)


def _from_hub(kind: str) -> tuple[Question, ...]:
    from datasets import load_dataset

    name, part = _HUB[kind]
    try:
        rows = load_dataset(name, part, split="validation")
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MissingError(
            f"cannot load {name} from the hub and no copy is here ({first}); give the data set's own file: "
            f"task.{kind}=FILE"
        ) from error
    if kind == SQUAD:
        pairs = (
            (row["question"], tuple(dict.fromkeys(row["answers"]["text"])), (row["context"],)) for row in rows
        )
        return tuple(Question(*pair) for pair in pairs if pair[1])
    return tuple(
        Question(
            row["question"],
            (row["answer"],),
            tuple(
                f"{title}\n{''.join(sentences)}"
                for title, sentences in zip(row["context"]["title"], row["context"]["sentences"], strict=True)
            ),
        )
        for row in rows
    )
