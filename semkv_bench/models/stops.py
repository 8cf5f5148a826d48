"""Which tokens end an answer, as the model's several files say it."""

from typing import Any

from semkv_bench.tasks.encoding import end_of_turn

__all__ = ["end_tokens"]


def end_tokens(model: Any, tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """Ids of end tokens by what names them: generation_config, config, the tokenizer, and the chat template.

    model: anything with ``generation_config`` and ``config``. Of the template it is the token that it writes behind
    an assistant's answer.
    """
    config = model.config
    text = config.get_text_config(decoder=True)
    return {
        "generation_config": _ids(getattr(model.generation_config, "eos_token_id", None)),
        "config": _ids(getattr(text, "eos_token_id", None)) or _ids(getattr(config, "eos_token_id", None)),
        "tokenizer": _ids(getattr(tokenizer, "eos_token_id", None)),
        "chat template": _ids(end_of_turn(tokenizer)),
    }


def _ids(value: Any) -> tuple[int, ...]:
    listed = value if isinstance(value, list | tuple) else [value]
    return tuple(sorted(int(each) for each in listed if each is not None))
