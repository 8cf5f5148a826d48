"""Following a prefill: installs what the metrics need, collects, removes it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.importance.base import Metric, Prompt, Recorder, Source, SourceRecorder
from semkv_bench.importance.choice import metric
from semkv_bench.lazy import torch
from semkv_bench.models.load import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor, nn


__all__ = ["Observer", "observe"]


def observe(
    loaded: LoadedModel,
    metrics: Sequence[str | Metric],
    *,
    tokens: int,
    seed: int = 0,
    logits_dtype: torch.dtype | None = None,
) -> Observer:
    """Context in which forward calls of ``loaded.decoder`` are scored; the cache they fill is not touched.

        with observe(loaded, ["key_norm", "surprisal"], tokens=len(ids)) as observer:
            ...  # one prompt from its first token on, in one or several forward calls
        scores = observer.scores()

    metrics: labels (``attention_window-64``) or metrics; tokens: how many of the prompt's first tokens are
    scored, i.e. go into the quantized cache; seed: of the random control; logits_dtype: type of
    the head's matrix product, chosen by the machine if None.

    Raises:
        UsageError: a metric is unknown, or the model cannot be observed for it.
    """
    named = dict((m.label, m) if isinstance(m, Metric) else (m, metric(m)) for m in metrics)
    if replays := [label for label, found in named.items() if found.replays]:
        raise ValueError(f"{', '.join(replays)}: scored after the prefill, not during it")
    if tokens < 1:
        raise UsageError(f"importance of {tokens} tokens: the prompt must have at least one before its last")
    # Tried out before anything listens: the trial is no part of the prompt.
    _ = loaded.later_calls
    return Observer(Prompt(loaded, tokens, seed, logits_dtype), named)


class Observer:
    """What ``observe`` returns. It may be entered again to follow the prompt's next forward calls."""

    def __init__(self, prompt: Prompt, metrics: dict[str, Metric]):
        self._prompt = prompt
        self._metrics = metrics
        families: dict[type[Recorder], list[str]] = {}
        for label, found in metrics.items():
            families.setdefault(found.recorder, []).append(label)
        self._recorders = {
            family(prompt, [metrics[label] for label in labels]): labels
            for family, labels in families.items()
        }
        self._installed = ExitStack()
        self._scores: dict[str, Tensor] | None = None

    def __enter__(self) -> Observer:
        with ExitStack() as stack:
            hook = self._prompt.loaded.decoder.register_forward_pre_hook(self._begin_call, with_kwargs=True)
            stack.callback(hook.remove)
            for source, recorders in self._by_source().items():
                stack.enter_context(source(self._prompt.loaded, _all_hear(recorders)))
            self._installed = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._installed.close()

    def scores(self) -> dict[str, Tensor]:
        """Scores by label, float32 on the CPU; larger is more important.

        [quantized layers, tokens] for hidden_norm, key_norm, value_norm and the attention metrics, [1, tokens]
        for hidden_drift, surprisal, logit_entropy, random and recency.

        Raises:
            SemkvError: a score is NaN or infinite.
        """
        if self._prompt.seen < self._prompt.tokens:
            raise ValueError(f"{self._prompt.tokens} tokens were announced, {self._prompt.seen} were seen")
        if self._scores is None:
            found: dict[str, Tensor] = {}
            for recorder, labels in self._recorders.items():
                found.update(zip(labels, recorder.scores(), strict=True))
            for label, scores in found.items():
                if not scores.isfinite().all():
                    raise SemkvError(f"importance metric {label} is NaN or infinite for some token")
            self._scores = {label: found[label].float().clone() for label in self._metrics}
        return self._scores

    def _by_source(self) -> dict[Source, list[SourceRecorder]]:
        sources: dict[Source, list[SourceRecorder]] = {}
        for recorder in self._recorders:
            if isinstance(recorder, SourceRecorder):
                sources.setdefault(recorder.source, []).append(recorder)
        return sources

    def _begin_call(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None:
            raise ValueError("an observed forward call must be given input_ids")
        cache = kwargs.get(self._prompt.loaded.cache_keyword)
        if cache is not None and cache.get_seq_length() != self._prompt.seen:
            raise ValueError(
                f"the cache holds {cache.get_seq_length()} tokens, but {self._prompt.seen} were observed: "
                "follow the prompt from its first token on, all in one cache"
            )
        self._prompt.feed(ids)


def _all_hear(recorders: Sequence[SourceRecorder]) -> Callable[..., None]:
    # One mode for all calls: tensors made in inference mode could not be added to outside of it.
    @torch.inference_mode()
    def hear(*event: Any) -> None:
        for recorder in recorders:
            recorder.hear(*event)

    return hear
