"""A tokenizer that asks llama.cpp, with what the tasks need of transformers' interface."""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from typing import Any

from semkv_bench.errors import UsageError

__all__ = ["LlamaTokenizer"]

_MARK = "semkv"


class LlamaTokenizer:
    """The tokenizer and chat template of a GGUF file, as its server applies them.

    serving: the context of a server of that file; it is entered at the first question and left by ``close``, or when
    nobody holds the tokenizer any more.
    """

    def __init__(self, serving: AbstractContextManager[Any]):
        self._stack = ExitStack()
        self._serving = serving
        self._leave = weakref.finalize(self, self._stack.close)

    def close(self) -> None:
        """Stop the server; what was asked before stays answered."""
        self._leave()

    @cached_property
    def _client(self) -> Any:
        return self._stack.enter_context(self._serving).dialect.client

    @cached_property
    def _props(self) -> dict[str, Any]:
        return self._client.get("/props") or {}

    def __call__(
        self, text: str, add_special_tokens: bool = True, verbose: bool = False
    ) -> dict[str, list[int]]:
        """``{"input_ids": ...}`` of ``text``, special tokens in it known as such."""
        body = {"content": text, "add_special": add_special_tokens, "parse_special": True}
        return {"input_ids": list(self._client.post("/tokenize", body)["tokens"])}

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """The text of ``ids``."""
        kept = [token for token in ids if not (skip_special_tokens and token in self.all_special_ids)]
        return self._client.post("/detokenize", {"tokens": list(kept)})["content"] if kept else ""

    @cached_property
    def bos_token_id(self) -> int | None:
        """The token that the model's texts begin with, None where it has none."""
        return self._of_text(self._props.get("bos_token"))

    @cached_property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._of_text(self._props.get("eos_token"))

    @cached_property
    def all_special_ids(self) -> list[int]:
        """Ids of the tokens that begin and end texts."""
        return [token for token in (self.bos_token_id, self.eos_token_id) if token is not None]

    @property
    def chat_template(self) -> str | None:
        """The template in the file; the server applies it."""
        return self._props.get("chat_template") or None

    def get_chat_template(self) -> str:
        """See ``chat_template``."""
        return self.chat_template or ""

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **kwargs: Any) -> str:
        """The text of a conversation, up to where the assistant goes on; UsageError where the template refuses it."""
        answer = self._client.post("/apply-template", {"messages": list(messages)})
        text = answer.get("prompt")
        if not isinstance(text, str):
            raise UsageError("the server does not apply the model's chat template; use task.chat=false")
        return text

    def _of_text(self, text: Any) -> int | None:
        if not text:
            return None
        ids = self(str(text), add_special_tokens=False)["input_ids"]
        return ids[0] if len(ids) == 1 else None
