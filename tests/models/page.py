"""The page of models, written from the lists that the matrix test runs: ``python tests/models/page.py``."""

import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from test_matrix import REFUSED, SWEPT, named_config  # noqa: E402
from transformers import __version__  # noqa: E402

from semkv_bench.errors import UsageError  # noqa: E402
from semkv_bench.models.architecture import check_architecture, supported_attention  # noqa: E402
from semkv_bench.models.layers import CacheLayer, cache_layers  # noqa: E402
from semkv_bench.models.shape import ModelShape  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD = """# Models

Any causal language model of transformers may be tried; this page lists the architectures that are tested, and is
written from the test itself (`python tests/models/page.py`, transformers {version}). Of each, a random model
of four layers goes through `plan`; its storage is compared with the bytes of transformers' own cache; its
rows in prefill, generation and conversation with a plain loop
over `DynamicCache`, token by token; and `SemKVCache` in `generate` with the same loop.

What is coded is told by the cache that transformers makes for a layer, not by names: keys and values of every token are
coded. A sliding window or chunk is kept in 16 bits as it is, and counted as what it holds; one that no context of the
model outgrows counts as full attention. Recurrent and convolution states are kept per row as they are. A conversation
over such states, or over positions that are added to attention as biases or cannot be given, is decoded one row at a
time, since its rows become of different lengths.

What later calls need is tried out on the loaded model: positions are given to one that does not count on from its
cache (Bamba), and a prompt is not read in parts (`engine.prefill_chunk`) by one that begins with empty recurrent states
in every call of several tokens (Jamba, Zamba), or by one whose rotary embedding hangs on how much was read
(`rope_type=dynamic`, `longrope`).

## Swept

| architecture | layers of the tested model | attention |
|---|---|---|
"""
_MIDDLE = """
Attention: what is loaded unless `model.attention` was given, `sdpa` where the class has it.

## Refused

`plan` says so in one line, before weights are loaded.

| architecture | what is said |
|---|---|
"""
_TAIL = """
## Forms of checkpoints

- A hub name, a folder, or a GGUF file. A folder that holds a LoRA adapter is named as one: merge it first.
- Of a GGUF file the tokenizer is held against the file's own tokens, scores and types: known texts must come back, be
  cut as the scores say, and the file's tokens be reached. One that transformers reads otherwise is refused;
  `engine=llamacpp` tokenizes by itself.
- Quantized weights (GPTQ, AWQ, bitsandbytes, compressed-tensors): loaded by transformers where their packages are
  installed; `semkv-bench doctor` says which are, and loading one that is not names the command.
  Only the refusal is tested here, not the numbers of such weights.
- `model.kwargs={trust_remote_code: true}` and other arguments of `from_pretrained`. A class that comes with its
  checkpoint is not looked into beforehand.
- A chat template is given plain text, then content parts; one that leaves out what it is given, or fails, is refused
  (`task.chat=false` leaves it out). Answers end at every end token that generation configuration, configuration,
  tokenizer or template names.
"""


def page() -> str:
    """The whole page."""
    swept = "".join(f"| {_row(name)} |\n" for name in sorted(SWEPT))
    refused = "".join(f"| {name} | {_refusal(name)} |\n" for name in sorted(REFUSED))
    return _HEAD.format(version=__version__) + swept + _MIDDLE + refused + _TAIL


def _row(name: str) -> str:
    config = named_config(name)
    counts = Counter(map(_kept, cache_layers(config)))
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{name} | {kinds} | {supported_attention(config, None)}"


def _kept(layer: CacheLayer) -> str:
    if layer.stores_all:
        return "coded, with states beside" if layer.states else "coded"
    if layer.window is not None:
        return f"{layer.kind.replace('_', ' ')} in 16 bits"
    return f"{layer.kind.replace('_', ' ')} states" if layer.states else "without a cache"


def _refusal(name: str) -> str:
    try:
        config = named_config(name)
        check_architecture(config, name)
        ModelShape.of(config)
    except UsageError as error:
        return str(error)
    return f"a mismatch of its {REFUSED[name]}, seen when prompts are written"


if __name__ == "__main__":
    PAGE.write_text(page())
