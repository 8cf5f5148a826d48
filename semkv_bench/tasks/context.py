"""Where in a prompt the question begins."""

from typing import Any

from semkv_bench.errors import UsageError
from semkv_bench.tasks.base import Example

__all__ = ["context_tokens"]


def context_tokens(tokenizer: Any, example: Example) -> int:
    """How many tokens of the prompt come before the question, where it was last written.

    A token that holds the end of the context and the beginning of the question belongs to the question.

    Raises:
        UsageError: the task does not say what is asked, or the prompt does not hold it behind a context.
    """
    ids = list(example.input_ids)
    asked = example.question.strip()
    start = tokenizer.decode(ids, skip_special_tokens=False).rfind(asked) if asked else -1
    if start < 0:
        raise UsageError(
            f"{example.task} {example.example_id}: its prompt does not show where the question begins; "
            "use allocation.question=seen"
        )
    # The longest beginning that spells no more than the context; what tokens spell grows with their number.
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(tokenizer.decode(ids[:middle], skip_special_tokens=False)) <= start:
            low = middle
        else:
            high = middle - 1
    if not low:
        raise UsageError(
            f"{example.task} {example.example_id}: its prompt begins with the question, so that nothing is scored "
            "before it; use allocation.question=seen"
        )
    return low
