"""One teacher-forced pass in which attention sees coded keys and values: the protocol ``through``."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from semkv_bench.engine.coding import RowCoder
from semkv_bench.engine.feed import feed
from semkv_bench.engine.forced import Comparison
from semkv_bench.engine.outcome import Outcome, Request
from semkv_bench.engine.rows import RowCache
from semkv_bench.grid.cost import Stored
from semkv_bench.models.load import LoadedModel
from semkv_bench.models.rotary import rotary_of
from semkv_bench.protocols.rule import PREFILL
from semkv_bench.settings.setting import Setting

__all__ = ["read_through"]


@torch.inference_mode()
def read_through(
    loaded: LoadedModel,
    request: Request,
    settings: Sequence[Setting],
    rows: RowCache,
    references: dict[int, Tensor],
) -> list[list[Outcome]]:
    """Read question and reference answer under ``settings``, a row each: outcomes by setting, of the one turn.

    The answer's tokens are what KL, agreement and likelihood are of; nothing is generated. references:
    log-probabilities of ``full`` by turn, taken from the first setting where they are missing.
    """
    fed, forced = [*request.input_ids, *request.reference_ids[:-1]], list(request.reference_ids)
    rows.reserve(len(settings), len(fed))
    layers, rotary = loaded.shape.quantized_layers, partial(rotary_of, loaded)
    coding = RowCoder(rows, settings, PREFILL, layers, fed, request.seed, rotary)
    outcomes = [
        Outcome(setting, batch_rows=len(settings), context=len(request.input_ids)) for setting in settings
    ]
    with coding.on_arrival(len(fed)):
        logits = feed(loaded, coding, [fed] * len(settings), keep=len(forced))
    comparison = Comparison(references.get(0), outcomes, PREFILL, forced)
    comparison.add(logits, rows.rows)
    references[0] = comparison.finish()
    for number, (outcome, row) in enumerate(zip(outcomes, rows.rows, strict=True)):
        outcome.reads = row.reads
        coded = 0 if outcome.setting.kind == "full" else sum(row.coded) / 2
        outcome.coded_share = coded / len(fed)
        outcome.stored = Stored.of(loaded.shape.cache, *coding.stored(number))
    return [[outcome] for outcome in outcomes]
