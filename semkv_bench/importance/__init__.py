"""Importance of tokens: model-internal scores, one metric a file, collected during one prefill."""

from semkv_bench.importance.attention_received import AttentionReceived
from semkv_bench.importance.attention_window import AttentionWindow
from semkv_bench.importance.base import Metric, Needs
from semkv_bench.importance.choice import choices, metric
from semkv_bench.importance.hidden_drift import HiddenDrift
from semkv_bench.importance.hidden_norm import HiddenNorm
from semkv_bench.importance.key_norm import KeyNorm
from semkv_bench.importance.logit_entropy import LogitEntropy
from semkv_bench.importance.observer import Observer, observe
from semkv_bench.importance.random import Random
from semkv_bench.importance.ranks import shared
from semkv_bench.importance.recency import Recency
from semkv_bench.importance.surprisal import Surprisal
from semkv_bench.importance.value_norm import ValueNorm

__all__ = [
    "AttentionReceived",
    "AttentionWindow",
    "HiddenDrift",
    "HiddenNorm",
    "KeyNorm",
    "LogitEntropy",
    "Metric",
    "Needs",
    "Observer",
    "Random",
    "Recency",
    "Surprisal",
    "ValueNorm",
    "choices",
    "metric",
    "observe",
    "shared",
]
