"""The logit family: surprisal and entropy of the next-token distribution, from one pass over the head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semkv_bench.errors import UsageError
from semkv_bench.importance.base import Metric, Needs, SourceRecorder
from semkv_bench.importance.hooks import watch_output
from semkv_bench.lazy import torch
from semkv_bench.models.load import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["Head", "LogitMetric", "next_token_statistics"]

# Hidden states wait until so many are there: the head's weights are read once for all of them, and
# the blocks are the same however the prompt was cut into forward calls.
_WAITING_TOKENS = 2048
_TILE_TOKENS = 256
_TILE_WORDS = 4096


@dataclass(frozen=True)
class Head:
    """The map from a final hidden state to logits.

    weight [vocabulary, hidden]; bias [vocabulary] or None; logits = softcap(scale * (weight @ hidden + bias)).
    dtype: type of the matrix product; everything after it is float32.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    dtype: torch.dtype

    @classmethod
    def of(cls, loaded: LoadedModel, dtype: torch.dtype | None = None) -> Head:
        """The head of a model.

        Without ``dtype`` float32 weights are multiplied in bfloat16 on a processor that has instructions
        for it (three to four times faster), all others in their own type.

        Raises:
            UsageError: the head is no plain linear layer.
        """
        head = loaded.model.get_output_embeddings()
        if not (isinstance(head, torch.nn.Linear) and _is_plain(head.weight)):
            weight = getattr(head, "weight", None)
            kind = type(head).__name__
            kind += "" if weight is None else f" with weights of {weight.dtype} in a {type(weight).__name__}"
            raise UsageError(
                f"surprisal and logit_entropy need a plain linear head; {loaded.label} has {kind}: "
                "leave the head out of the model's quantization, or choose other metrics"
            )
        if head.weight.device.type == "meta":
            raise UsageError(
                "surprisal and logit_entropy need the head's weights in memory; model.device_map offloads them"
            )
        config = loaded.model.config.get_text_config(decoder=True)
        # Cohere multiplies, Granite divides, Gemma caps.
        scale = (getattr(config, "logit_scale", None) or 1.0) / (
            getattr(config, "logits_scaling", None) or 1.0
        )
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(head.weight, head.bias, scale, softcap, dtype or _product_type(head.weight))

    def finish(self, raw: Tensor, shift: Tensor) -> Tensor:
        """Logits from raw products less ``shift``; up to a constant per row, which the softmax does not see."""
        if self.softcap is None:
            return raw.mul_(self.scale) if self.scale != 1 else raw
        return raw.add_(shift).mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)


def next_token_statistics(head: Head, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Surprisal of ``targets`` int64 [tokens] and entropy of the distributions at ``hidden`` [tokens, hidden].

    Both float32 [tokens], in nats. Logits exist only in tiles; no [tokens, vocabulary] tensor is held.

    The target's own logit is computed in float32, and all logits are taken relative to it before they
    are rounded to the product's type. So the rounding is finest where probability is, and a sure prediction
    does not drown in it.
    """
    with torch.inference_mode():
        return _tiled_statistics(head, hidden, targets)


def _tiled_statistics(head: Head, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    rows = targets.to(head.weight.device)
    hidden = hidden.to(head.weight.device)
    exact = _raw_logits_of(head, hidden, rows)
    shift = exact.to(head.dtype)
    own = (exact - shift.float())[:, None]
    shift = shift[:, None]
    narrow = hidden.to(head.dtype)
    log_sum = torch.full_like(exact, -torch.inf)
    mean = torch.zeros_like(exact)
    for word in range(0, len(head.weight), _TILE_WORDS):
        weight = head.weight[word : word + _TILE_WORDS].to(head.dtype).T
        bias = None if head.bias is None else head.bias[word : word + _TILE_WORDS].float()
        for token in range(0, len(rows), _TILE_TOKENS):
            part = slice(token, token + _TILE_TOKENS)
            raw = torch.addmm(-shift[part], narrow[part], weight).float()
            if bias is not None:
                raw += bias
            _put_exact(raw, rows[part, None] - word, own[part])
            _merge(log_sum[part], mean[part], head.finish(raw, shift[part].float()))
    return log_sum - head.finish(own.clone(), shift.float())[:, 0], log_sum - mean


class LogitRecorder(SourceRecorder):
    """Collects final hidden states and runs the head over them in blocks."""

    source = staticmethod(watch_output)

    def __init__(self, prompt, metrics):
        super().__init__(prompt, metrics)
        self._head = Head.of(prompt.loaded, prompt.logits_dtype)
        self._waiting: list[Tensor] = []
        self._surprisal: list[Tensor] = [torch.tensor([len(self._head.weight)]).log()]
        self._entropy: list[Tensor] = []
        self._done = 0

    def hear(self, hidden: Tensor) -> None:
        """Final hidden states [new, hidden] of one forward call."""
        if not self.prompt.fresh:
            return
        self._waiting.append(hidden[: self.prompt.fresh])
        # A token's surprisal is known only with its successor, so one hidden state always waits.
        if sum(map(len, self._waiting)) > _WAITING_TOKENS:
            waiting = torch.cat(self._waiting)
            ids = self.prompt.ids[self._done :]
            while len(waiting) > _WAITING_TOKENS:
                found = next_token_statistics(
                    self._head, waiting[:_WAITING_TOKENS], ids[1 : 1 + _WAITING_TOKENS]
                )
                self._keep(*found)
                waiting, ids = waiting[_WAITING_TOKENS:], ids[_WAITING_TOKENS:]
            # A copy, or the view would keep all of the call's hidden states alive.
            self._waiting = [waiting.clone()]

    def scores(self) -> list[Tensor]:
        """See ``Recorder``."""
        waiting = torch.cat(self._waiting)
        ids = self.prompt.ids[self._done :]
        # The last token has no successor; any word stands in for it, and only the entropy is used.
        surprisal, entropy = next_token_statistics(self._head, waiting, torch.cat([ids[1:], ids[:1]]))
        surprisal = torch.cat([*self._surprisal, surprisal[:-1].cpu()])
        entropy = torch.cat([*self._entropy, entropy.cpu()])
        return [metric.score(surprisal, entropy)[None] for metric in self.metrics]

    def _keep(self, surprisal: Tensor, entropy: Tensor) -> None:
        self._surprisal.append(surprisal.cpu())
        self._entropy.append(entropy.cpu())
        self._done += len(entropy)


class LogitMetric(Metric):
    """A score from the model's next-token distributions, the same in all layers: [1, tokens]."""

    recorder = LogitRecorder
    needs = Needs.OUTPUT

    @abstractmethod
    def score(self, surprisal: Tensor, entropy: Tensor) -> Tensor:
        """surprisal of each token and entropy of the distribution behind it, float32 [tokens] -> [tokens]."""


def _raw_logits_of(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    """Raw logit of each row's target, float32 [tokens]."""
    raw = torch.cat(
        [
            torch.linalg.vecdot(h.float(), head.weight[t].float())
            for h, t in zip(hidden.split(_TILE_TOKENS), targets.split(_TILE_TOKENS), strict=True)
        ]
    )
    return raw if head.bias is None else raw + head.bias[targets].float()


def _put_exact(raw: Tensor, column: Tensor, own: Tensor) -> None:
    """Write ``own`` [rows, 1] into ``raw`` [rows, words] at ``column`` [rows, 1], where that lies inside."""
    inside = (column >= 0) & (column < raw.shape[1])
    column = column.clamp(0, raw.shape[1] - 1)
    raw.scatter_(1, column, torch.where(inside, own, raw.gather(1, column)))


def _merge(log_sum: Tensor, mean: Tensor, logits: Tensor) -> None:
    """Add a tile of logits [rows, words] to the running log-sum-exp and softmax-weighted mean, both [rows]."""
    share = logits.softmax(-1)
    # The largest share is exp(largest logit - log-sum-exp): cheaper than a second exponential per logit.
    tile_log_sum = logits.amax(-1) - share.amax(-1).log()
    tile_mean = torch.linalg.vecdot(share, logits)
    total = torch.logaddexp(log_sum, tile_log_sum)
    mean.mul_((log_sum - total).exp_()).add_(tile_mean * (tile_log_sum - total).exp_())
    log_sum.copy_(total)


def _is_plain(weight: Tensor) -> bool:
    """Are these numbers as they stand, and not codes that a class of tensor or of layer of its own makes numbers of?"""
    own = type(weight) in (torch.Tensor, torch.nn.Parameter)
    return own and weight.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _product_type(weight: Tensor) -> torch.dtype:
    if weight.dtype is torch.float32 and weight.device.type == "cpu" and _has_bfloat16_instructions():
        return torch.bfloat16
    return weight.dtype


def _has_bfloat16_instructions() -> bool:
    checks: list[Callable[[], bool]] = [
        getattr(torch.cpu, name, bool) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    ]
    return torch.backends.mkldnn.is_available() and any(check() for check in checks)
