"""Importance of tokens: model-internal scores, one metric a file, collected during one prefill."""

from typing import TYPE_CHECKING

from semkv_bench.lazy import on_demand

if TYPE_CHECKING:
    from semkv_bench.importance.attention_received import AttentionReceived
    from semkv_bench.importance.attention_window import AttentionWindow
    from semkv_bench.importance.base import Metric, Needs
    from semkv_bench.importance.cake import Cake
    from semkv_bench.importance.choice import choices, metric
    from semkv_bench.importance.expected_attention import ExpectedAttention
    from semkv_bench.importance.fastgen import FastGen
    from semkv_bench.importance.h2o import H2O, H2OMean
    from semkv_bench.importance.hidden_drift import HiddenDrift
    from semkv_bench.importance.hidden_max import HiddenMax
    from semkv_bench.importance.hidden_norm import HiddenNorm
    from semkv_bench.importance.key_norm import KeyNorm
    from semkv_bench.importance.keydiff import KeyDiff
    from semkv_bench.importance.knorm import Knorm
    from semkv_bench.importance.kvzip import KVzip
    from semkv_bench.importance.lagkv import LagKV
    from semkv_bench.importance.leverage import Leverage
    from semkv_bench.importance.logit_entropy import LogitEntropy
    from semkv_bench.importance.prompt import Observer, observe
    from semkv_bench.importance.r_kv import RKV
    from semkv_bench.importance.random_draw import Random
    from semkv_bench.importance.random_head import RandomHead
    from semkv_bench.importance.recency import Recency
    from semkv_bench.importance.snapkv import SnapKV
    from semkv_bench.importance.streaming import Streaming
    from semkv_bench.importance.surprisal import Surprisal
    from semkv_bench.importance.tova import Tova
    from semkv_bench.importance.value_norm import ValueNorm
    from semkv_bench.importance.vote import shared
    from semkv_bench.importance.window_shift import WindowEntropy, WindowVariance

__all__ = [
    "H2O",
    "RKV",
    "AttentionReceived",
    "AttentionWindow",
    "Cake",
    "ExpectedAttention",
    "FastGen",
    "H2OMean",
    "HiddenDrift",
    "HiddenMax",
    "HiddenNorm",
    "KVzip",
    "KeyDiff",
    "KeyNorm",
    "Knorm",
    "LagKV",
    "Leverage",
    "LogitEntropy",
    "Metric",
    "Needs",
    "Observer",
    "Random",
    "RandomHead",
    "Recency",
    "SnapKV",
    "Streaming",
    "Surprisal",
    "Tova",
    "ValueNorm",
    "WindowEntropy",
    "WindowVariance",
    "choices",
    "metric",
    "observe",
    "shared",
]

__getattr__ = on_demand(__name__)
