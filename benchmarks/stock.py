"""What the benchmarks compare against, stock transformers one setting at a time, and what they time by."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import DynamicCache

from semkv_bench.engine import decode, engine
from semkv_bench.engine.engine import Request
from semkv_bench.models.load import LoadedModel
from semkv_bench.settings.setting import Setting

# With full, 12 and 60 settings; half of each lie above the cliff of the small model.
LEVELS = {
    12: [64, 32, 16, 12, 8, 7, 6, 5, 4, 3, 2],
    60: [*range(2, 33), *range(34, 64, 2), *range(64, 128, 8), 160, 192, 208, 224, 256],
}
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
STAGES = {
    "prefill": (engine, "prefill"),
    "coding": (decode, "fill"),
    "forced": (decode, "_ask"),
    "decoding": (decode, "_decode"),
}


class Watch:
    """Seconds by every clock since it was made."""

    def __init__(self) -> None:
        self.began = {name: clock() for name, clock in CLOCKS.items()}

    def seconds(self) -> dict[str, float]:
        """By name of the clock."""
        return {name: clock() - self.began[name] for name, clock in CLOCKS.items()}


def staged(run: Callable[[], Any], seconds: dict[str, float], clock: Callable[[], float]) -> Any:
    """The result of ``run``, with the seconds of every stage added to ``seconds``."""

    def timed(stage: str, function: Callable) -> Callable:
        """``function``, its seconds counted as ``stage``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[stage] = seconds.get(stage, 0.0) + clock() - start

        return call

    patches = [
        mock.patch.object(module, name, timed(stage, getattr(module, name)))
        for stage, (module, name) in STAGES.items()
    ]
    for patch in patches:
        patch.start()
    try:
        return run()
    finally:
        mock.patch.stopall()


@torch.inference_mode()
def stock_generate(
    loaded: LoadedModel, request: Request, setting: Setting, logits: bool = False
) -> tuple[list[int], tuple[Tensor, ...]]:
    """One prefill into a ``DynamicCache``, its keys and values quantized in place, and one ``generate``.

    Returns the new tokens without the stop token and, where asked for, the logits of every step [1, vocabulary].
    """
    model, ids = loaded.model, torch.tensor([list(request.input_ids)], device=loaded.device)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1, **{loaded.cache_keyword: cache})
    if setting.keys is not None:
        levels = torch.tensor([[setting.keys.allocation.count]])
        for layer in cache.layers:
            coder = setting.keys.quantizer.coder(layer.keys.shape[-1])
            layer.keys = coder.quantize_dequantize(layer.keys[0], levels)
            layer.values = coder.quantize_dequantize(layer.values[0], levels)
    out = model.generate(
        ids,
        # Without it, generate would take the chat template's end marks for padding.
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(request.stop_ids),
        return_dict_in_generate=True,
        output_logits=logits,
        **{loaded.cache_keyword: cache},
    )
    tokens = out.sequences[0, ids.shape[1] :].tolist()
    return (tokens[:-1] if tokens[-1] in request.stop_ids else tokens), (out.logits or ())
