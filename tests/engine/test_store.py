"""Rows that hold codes of the prompt: the same answers as rows of values, in less memory."""

import pytest
import torch

from semkv_bench.engine import engine as running
from semkv_bench.engine.batching import Sizes, _fewest, batches, code_bytes, unpacked_setting
from semkv_bench.engine.decode import Decoding, fill
from semkv_bench.engine.engine import Engine
from semkv_bench.engine.options import EngineOptions
from semkv_bench.engine.outcome import Request, Turn
from semkv_bench.engine.packed_rows import PackedRows
from semkv_bench.engine.transformers import TransformersBackend
from semkv_bench.errors import UsageError
from semkv_bench.protocols import Prefill, Through
from semkv_bench.protocols.rule import PREFILL, CodingRule
from semkv_bench.quantizers import Affine, TurboQuant
from semkv_bench.quantizers.keep import Keep
from semkv_bench.settings.allocation import Prune, TwoLevel
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL, Coded, Setting

GRID = uniform_settings(Affine(), Affine(), [16, 3])
_MIX = Coded(Affine(group_size=8), TwoLevel(6, 3, 0.25, "key_norm", "layer"))
SETTINGS = [
    FULL,
    *GRID,
    *uniform_settings(TurboQuant(), Affine(keep=Keep(sinks=2, recent=5)), [4]),
    Setting("keys", "uniform", "affine", keys=_MIX),
    Setting("mix", "mixed", "affine", keys=_MIX, values=_MIX),
    Setting("pruned", "prune", prune=Prune(0.5, "key_norm")),
]


def _request(length=40, seed=0, **changes) -> Request:
    ids = torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    given = {"input_ids": ids, "reference_ids": [5, 6, 7], "max_new_tokens": 6, "stop_ids": frozenset({2})}
    return Request(**{**given, **changes})


def _told(answered):
    """What must be equal; of what is measured, what is equal up to rounding: vectors that are turned come back so."""
    same = [
        [
            (o.tokens, o.reads, o.coded_share, o.stored, o.context, o.top1_agreement, o.kl is None)
            for o in turn
        ]
        for turn in answered.turns
    ]
    return same, [value for turn in answered.turns for o in turn for value in (o.kl or 0, o.nll or 0)]


@pytest.mark.parametrize(
    ("rule", "turns"), [(PREFILL, 1), (CodingRule("both", 4), 2), (CodingRule("generated", 4), 1)]
)
def test_rows_of_codes_answer_as_rows_of_values(tiny, rule, turns):
    settings = SETTINGS if len(tiny.shape.quantized_layers) == tiny.shape.layers else SETTINGS[:-1]
    later = (Turn([7, 8, 9], [5, 6], 5, frozenset({2})),) * (turns - 1)
    engines = [Engine(tiny, EngineOptions(store=store)) for store in ("rows", "packed")]
    for length in (40, 23) if rule is PREFILL else (40,):
        request = _request(length, length, follow_ups=later)
        plain, packed = (engine.answer(request, settings, rule) for engine in engines)
        (same, measured), (expected, near) = _told(packed), _told(plain)
        assert same == expected and measured == pytest.approx(near, rel=1e-3, abs=1e-6)
        assert isinstance(engines[1].rows, PackedRows) and engines[1].stores == {"packed"}


def test_what_rows_hold_is_what_is_planned(tiny_llama):
    engine, length, room = Engine(tiny_llama), 301, 20
    prefilled = engine.prefill(_request(length).input_ids)
    for settings in ([FULL, *GRID], SETTINGS[:4]):
        rows = PackedRows(tiny_llama.model.config)
        fill(tiny_llama, prefilled, settings, rows, room)
        held = sum(layer.code_nbytes for layer in rows.attending.values())
        planned = sum(code_bytes(setting, tiny_llama.shape, PREFILL, length) for setting in settings)
        # Besides, where blocks of 64 tokens begin.
        assert planned <= held <= planned * 1.03
        buffers = sum(layer.keys.nbytes + layer.values.nbytes for layer in rows.attending.values())
        assert buffers == len(settings) * tiny_llama.shape.values(256) * 4


def test_the_store_is_chosen_by_what_one_row_takes(tiny_llama):
    turns, how = _request(2000).turns, Decoding(PREFILL, teacher_tokens=4)
    shape, settings = tiny_llama.shape, SETTINGS[:4]

    def chosen(rows: float, settings=settings, **options):
        """Where the memory holds so many rows besides weights and prompt."""
        row = shape.values(2048) * 4 + 2 * 4 * 4 * 97
        memory = int(rows * row) + 1000 + shape.values(1999) * 4
        sizes = Sizes(shape, 97, 4, 1000, memory, packs=options.pop("packs", True))
        return batches(EngineOptions(memory_fraction=1.0, **options), settings, sizes, turns, how)

    assert chosen(4).groups == ((0, 1, 2, 3),) and chosen(4).store == "rows"
    assert chosen(3.9).groups == ((0, 1, 2), (3,)) and chosen(4, max_rows=2).groups == ((0, 1), (2, 3))
    assert chosen(1).store == "rows" and chosen(0.99).store == "packed"
    assert chosen(0.99, store="rows").store == "rows" and chosen(9, store="packed").store == "packed"
    assert chosen(0.99, packs=False).store == "rows"
    # A layer is written out for every row at a time; all layers but one are codes.
    assert len(chosen(2.5, store="packed").groups) < len(chosen(2.5).groups)
    assert chosen(9, store="packed").nbytes < chosen(9).nbytes


def test_unlike_rows_fill_few_batches():
    assert _fewest([1, 6, 5, 4, 3], 10, 9) == ((0, 1, 4), (2, 3))
    assert _fewest([1, 6, 5, 4, 3], 10, 2) == ((0, 1), (2, 3), (4,))
    assert _fewest([99, 99], 10, 9) == ((0,), (1,))


def test_a_row_that_meets_the_end_of_memory_is_packed_then(tiny_llama, monkeypatch):
    whole, request = running.decode, _request(700)
    expected = Engine(tiny_llama).run(request, SETTINGS[:3])

    def scarce(loaded, prefilled, request, settings, how, rows, references):
        if not isinstance(rows, PackedRows):
            raise torch.OutOfMemoryError("no memory")
        return whole(loaded, prefilled, request, settings, how, rows, references)

    monkeypatch.setattr(running, "decode", scarce)
    got = Engine(tiny_llama).run(request, SETTINGS[:3])
    assert [o.tokens for o in got] == [o.tokens for o in expected]


class _Source:
    name = "m"

    def __init__(self, loaded):
        self.config = lambda: loaded.model.config
        self.shape = lambda: loaded.shape
        self.attention, self.check_packages = None, lambda: None


class _Simulated(Affine):
    def unpackable(self):
        return "it is simulated"


def test_what_cannot_be_packed_is_one_line(tiny_llama):
    engine = TransformersBackend(store="packed")
    engine.check(_Source(tiny_llama), SETTINGS, Prefill())
    simulated = uniform_settings(_Simulated(), _Simulated(), [4])
    with pytest.raises(
        UsageError, match=r"packed cannot hold affine-L4: it is simulated; leave it out, or use"
    ):
        engine.check(_Source(tiny_llama), [FULL, *simulated], Prefill())
    TransformersBackend().check(_Source(tiny_llama), [FULL, *simulated], Prefill())
    with pytest.raises(UsageError, match=r"protocol=through .* use engine.store=rows"):
        engine.check(_Source(tiny_llama), SETTINGS[:2], Through())
    TransformersBackend().check(_Source(tiny_llama), SETTINGS[:2], Through())
    assert unpacked_setting(SETTINGS[3]) is None
