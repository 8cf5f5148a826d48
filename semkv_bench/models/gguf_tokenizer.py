"""Does transformers tokenize as a GGUF file says? Told by the file's own tokens, their scores and types."""

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from transformers.convert_slow_tokenizer import bytes_to_unicode

__all__ = ["misread"]

# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: types of values by number.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"
_TEXTS = (
    "The capital of France is Paris, isn't it? We visited 3 museums in 1989.",
    "Überraschung: naïve café owners paid 7,738,705 roubles (45%) for coffee.",
    "def total(values): return sum(value ** 2 for value in values) # squares",
)
_SAMPLE = 400
# Of the tokens of a tokenizer that is read as its file says; a few are made by no merge.
_COME_BACK = 0.9


def _metadata(path: Path) -> dict[str, Any]:
    """The keys and values at the beginning of a GGUF file, arrays as lists.

    Raises ValueError for what is no little-endian GGUF file of version 2 or later.
    """
    with path.open("rb") as file:
        magic, version, _, count = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF" or not 2 <= version < 2**16:
            raise ValueError(f"{path.name} is no GGUF file of a version that is read here")
        return {_string(file): _value(file, _scalar(file, "I")) for _ in range(count)}


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _scalar(file, _SCALARS[kind])
    kind, length = _scalar(file, "I"), _scalar(file, "Q")
    if kind in _SCALARS:
        layout = struct.Struct(f"<{length}{_SCALARS[kind]}")
        return list(layout.unpack(file.read(layout.size)))
    return [_value(file, kind) for _ in range(length)]


def _string(file: BinaryIO) -> str:
    return file.read(_scalar(file, "Q")).decode(errors="replace")


def _scalar(file: BinaryIO, layout: str) -> Any:
    (value,) = struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))
    return value


def misread(tokenizer: Any, path: Path) -> str | None:
    """What ``tokenizer`` does otherwise than the GGUF file in ``path`` says; None where nothing is seen.

    Known texts must come back, and by the scores of a SentencePiece vocabulary be cut as they are here; control tokens
    must stay whole; tokens of a byte-level vocabulary must come back from their own text. Raises ValueError for what is
    no such file.
    """
    said = _metadata(path)
    kind = said.get("tokenizer.ggml.model")
    tokens = said.get("tokenizer.ggml.tokens") or []
    types = said.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    for text in _TEXTS:
        ids = _ids(tokenizer, text)
        back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if back.strip() != text:
            return f"{text!r} comes back as {back.strip()[:80]!r}"
        if kind == "llama" and said.get("tokenizer.ggml.scores"):
            expected = _by_scores(text, tokens, types, said)
            if expected != ids:
                return f"by the file's scores {text[:20]!r}... has {len(expected)} tokens, here {len(ids)} others"
    for token in [token for token, each in zip(tokens, types, strict=False) if each == _CONTROL][:8]:
        if len(found := _ids(tokenizer, token)) != 1:
            return f"the control token {token!r} is cut into {len(found)}"
    if kind == "gpt2":
        share = _coming_back(tokenizer, tokens, types)
        if share < _COME_BACK:
            return f"only {share:.0%} of the file's tokens come back from their own text"
    return None


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _by_scores(text: str, tokens: Sequence[str], types: Sequence[int], said: Mapping[str, Any]) -> list[int]:
    """Token ids as SentencePiece makes them: the pair of neighbours whose union scores best is joined first."""
    ids = {token: number for number, token in enumerate(tokens)}
    scores = said["tokenizer.ggml.scores"]
    if said.get("tokenizer.ggml.add_space_prefix", True):
        text = " " + text
    whole = [token for token, each in zip(tokens, types, strict=False) if each == _USER_DEFINED and token]
    pattern = "|".join(re.escape(token) for token in sorted(whole, key=len, reverse=True))
    found: list[int] = []
    for part in re.split(f"({pattern})", text) if whole else [text]:
        if part in ids and types[ids[part]] == _USER_DEFINED:
            found.append(ids[part])
            continue
        pieces = list(part.replace(" ", _SPACE))
        while pairs := [
            (-scores[ids[joined]], place)
            for place in range(len(pieces) - 1)
            if (joined := pieces[place] + pieces[place + 1]) in ids
        ]:
            _, place = min(pairs)
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
        for piece in pieces:
            found += (
                [ids[piece]] if piece in ids else [ids.get(f"<0x{byte:02X}>", -1) for byte in piece.encode()]
            )
    return found


def _coming_back(tokenizer: Any, tokens: Sequence[str], types: Sequence[int]) -> float:
    """Of a sample of tokens of byte-level merges, the share that is the last one of its text on a line of its own."""
    spelled = {letter: byte for byte, letter in bytes_to_unicode().items()}
    texts = []
    normal = [
        i for i, each in enumerate(types[: len(tokens)]) if each == _NORMAL and set(tokens[i]) <= set(spelled)
    ]
    for number in normal[:: max(1, len(normal) // _SAMPLE)]:
        text = bytes(spelled[letter] for letter in tokens[number]).decode(errors="replace")
        if "\ufffd" not in text and text.strip():
            texts.append((number, text))
    back = [_ids(tokenizer, f"\n{text}")[-1:] == [number] for number, text in texts]
    return sum(back) / len(back) if back else 1.0
