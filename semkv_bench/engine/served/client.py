"""Asking a server: retries, limits of time, and the two dialects that servers speak."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import requests

from semkv_bench.engine.served.completion import Asked, Completion
from semkv_bench.errors import SemkvError

__all__ = ["Client", "Dialect", "LlamaServer", "OpenAIServer", "ServerLost"]

_BUSY = (429, 502, 503, 504)
_LONGEST_WAIT = 10.0
# Seconds that a busy server is given, by attempt: 0.2, 0.4, 0.8, ...
_FIRST_WAIT = 0.2


class ServerLost(SemkvError):
    """The server does not answer any more."""


@dataclass(frozen=True)
class Client:
    """HTTP to one server.

    seconds: limit of one request; attempts: how often a request is tried that met a busy server or a dropped
    connection.
    """

    url: str
    seconds: float = 600.0
    attempts: int = 6
    headers: Mapping[str, str] | None = None

    def get(self, path: str) -> dict[str, Any] | None:
        """The JSON that answers one GET, with an empty object for other content; None where the answer is no 200."""
        try:
            with self._open() as http:
                answer = http.get(self.url + path, timeout=10.0)
        except requests.RequestException:
            return None
        if answer.status_code != 200:
            return None
        try:
            content = answer.json()
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def get_text(self, path: str) -> str:
        """The text that answers one GET; empty where nothing answers."""
        try:
            with self._open() as http:
                answer = http.get(self.url + path, timeout=10.0)
        except requests.RequestException:
            return ""
        return answer.text if answer.status_code == 200 else ""

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON that answers ``body``.

        Raises:
            ServerLost: nothing answers after all attempts.
            SemkvError: the server refuses the request, or answers what is no JSON.
        """
        trouble = "no attempt was made"
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt))
            try:
                with self._open() as http:
                    answer = http.post(self.url + path, json=body, timeout=(5.0, self.seconds))
            except requests.ReadTimeout as error:
                raise SemkvError(
                    f"{self.url}: no answer within {self.seconds:g} s (engine.request_seconds)"
                ) from error
            except requests.RequestException as error:
                trouble = type(error).__name__
                continue
            if answer.status_code in _BUSY:
                trouble = f"it is busy ({answer.status_code})"
                continue
            return self._content(answer, path)
        raise ServerLost(f"{self.url} does not answer after {self.attempts} attempts: {trouble}")

    def _content(self, answer: requests.Response, path: str) -> dict[str, Any]:
        if answer.status_code >= 400:
            said = " ".join(answer.text.split())[:200]
            raise SemkvError(f"{self.url}{path} refuses the request ({answer.status_code}): {said}")
        try:
            content = answer.json()
        except ValueError as error:
            raise SemkvError(f"{self.url}{path} does not answer in JSON: {answer.text[:80]!r}") from error
        if not isinstance(content, dict):
            raise SemkvError(
                f"{self.url}{path} answers {type(content).__name__} where an object was expected"
            )
        return content

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Within, JSON of another form than that of this kind of server is said in one line."""
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise SemkvError(
                f"{self.url} answers in another form than servers of this kind ({type(error).__name__}: {error}); is "
                "engine.preset that of the server?"
            ) from error

    def _open(self) -> requests.Session:
        session = requests.Session()
        # The machine's own proxies know no server on loopback.
        session.trust_env = False
        session.headers.update(self.headers or {})
        return session


class Dialect(ABC):
    """How one kind of server is asked; ``takes_ids``: by token ids, and not by text."""

    takes_ids: bool = True

    def __init__(self, client: Client):
        self.client = client

    def ready(self) -> bool:
        """Does the server take requests?"""
        return self.client.get("/health") is not None

    def complete(self, asked: Asked) -> Completion:
        """Answer one prompt, greedily; errors as of :meth:`Client.post`, SemkvError for an answer without a text."""
        with self.client.understood():
            answer = self._complete(asked)
            if not isinstance(answer.text, str):
                raise TypeError(f"the text is {answer.text!r}")
            return answer

    @abstractmethod
    def _complete(self, asked: Asked) -> Completion: ...

    def tokenize(self, text: str) -> list[int] | None:
        """Token ids of ``text`` as the server makes them, nothing added; None where it does not tell."""
        return None


class LlamaServer(Dialect):
    """llama.cpp's own interface, which takes and returns token ids."""

    def _complete(self, asked: Asked) -> Completion:
        if asked.min_new_tokens and asked.stop_ids:
            return self._held_open(asked)
        return self._once(asked, {})

    def tokenize(self, text: str) -> list[int]:
        """See ``Dialect``."""
        body = {"content": text, "add_special": False, "parse_special": True}
        with self.client.understood():
            return list(self.client.post("/tokenize", body)["tokens"])

    def _held_open(self, asked: Asked) -> Completion:
        """An answer that must not end at once: its first tokens with the stops ruled out, then the rest."""
        bias = {"logit_bias": [[token, False] for token in sorted(asked.stop_ids)], "ignore_eos": True}
        least = min(asked.min_new_tokens, asked.max_new_tokens)
        first = self._once(_limited(asked, asked.ids, least), bias)
        if least == asked.max_new_tokens:
            return first
        rest = self._once(
            _limited(asked, (*asked.ids, *first.tokens), asked.max_new_tokens - least, reuse=True), {}
        )
        return Completion(
            first.text + rest.text,
            first.tokens + rest.tokens,
            rest.ended,
            first.logprobs + rest.logprobs,
            first.prompt_tokens,
            first.cached_tokens,
            first.truncated or rest.truncated,
        )

    def _once(self, asked: Asked, more: Mapping[str, Any]) -> Completion:
        body = {
            "prompt": list(asked.ids),
            "n_predict": asked.max_new_tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "seed": 1,
            "return_tokens": True,
            "cache_prompt": asked.reuse,
            "n_probs": asked.top,
            **more,
        }
        content = self.client.post("/completion", body)
        tokens, stopped = _until_stop(content.get("tokens") or [], asked.stop_ids)
        timings = content.get("timings") or {}
        probabilities = content.get("completion_probabilities") or []
        return Completion(
            content.get("content", ""),
            tokens,
            stopped or content.get("stop_type") in ("eos", "word"),
            tuple(_numbered(entry) for entry in probabilities[: len(tokens) + 1]),
            content.get("tokens_evaluated"),
            timings.get("cache_n"),
            bool(content.get("truncated")),
        )


class OpenAIServer(Dialect):
    """``/v1/completions`` as vLLM, SGLang, TensorRT-LLM and others serve it.

    model: name under which the server knows the model; takes_ids: does it take and return token ids?
    """

    def __init__(self, client: Client, model: str, takes_ids: bool = True):
        super().__init__(client)
        self.model = model
        self.takes_ids = takes_ids

    def _complete(self, asked: Asked) -> Completion:
        body = {
            "model": self.model,
            "prompt": list(asked.ids) if self.takes_ids else asked.text,
            "max_tokens": asked.max_new_tokens,
            "temperature": 0,
            "seed": 1,
        }
        if self.takes_ids:
            body |= {"stop_token_ids": sorted(asked.stop_ids), "return_token_ids": True}
            if asked.min_new_tokens:
                body["min_tokens"] = asked.min_new_tokens
        if asked.top:
            body["logprobs"] = asked.top
        content = self._answered(body)
        choices = content.get("choices") or []
        if not choices:
            raise SemkvError(f"{self.client.url} answered without a choice")
        choice, usage = choices[0], content.get("usage") or {}
        ids = choice.get("token_ids")
        tokens, stopped = (None, False) if ids is None else _until_stop(ids, asked.stop_ids)
        details = usage.get("prompt_tokens_details") or {}
        return Completion(
            choice.get("text", ""),
            tokens,
            stopped or choice.get("finish_reason") == "stop",
            _top_logprobs(choice.get("logprobs")),
            usage.get("prompt_tokens"),
            details.get("cached_tokens"),
            bool(choice.get("truncated")),
        )

    def _answered(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self.client.post("/v1/completions", body)
        except ServerLost:
            raise
        except SemkvError as error:
            if self.takes_ids and "refuses the request" in str(error):
                raise SemkvError(f"{error}; if it takes no token ids, set engine.takes_ids=false") from error
            raise

    def tokenize(self, text: str) -> list[int] | None:
        """See ``Dialect``: vLLM's interface."""
        try:
            content = self.client.post(
                "/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False}
            )
        except ServerLost:
            raise
        except SemkvError:
            return None
        tokens = content.get("tokens")
        return list(tokens) if isinstance(tokens, list) else None


def _limited(asked: Asked, ids: tuple[int, ...], tokens: int, reuse: bool = False) -> Asked:
    return Asked(ids, asked.text, tokens, asked.stop_ids, 0, asked.top, reuse or asked.reuse)


def _until_stop(tokens: list[int], stops: frozenset[int]) -> tuple[tuple[int, ...], bool]:
    for place, token in enumerate(tokens):
        if token in stops:
            return tuple(tokens[:place]), True
    return tuple(tokens), False


def _numbered(entry: Mapping[str, Any]) -> dict[int, float]:
    return {top["id"]: _number(top["logprob"]) for top in entry.get("top_logprobs") or []}


def _top_logprobs(logprobs: Any) -> tuple[dict[str, float], ...]:
    listed = (logprobs or {}).get("top_logprobs") or []
    return tuple({token: _number(value) for token, value in (top or {}).items()} for top in listed)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
