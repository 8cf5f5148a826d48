import dataclasses
import math

import numpy as np
import pytest

from semkv_bench.errors import UsageError
from semkv_bench.regress.comparison import JudgeOptions, compare, require_comparable
from semkv_bench.regress.snapshot import Snapshot, read_baseline, through_json, write_baseline

BITS = {"full": 16.0, "affine-L8": 3.0, "affine-L4": 2.0, "affine-L2": 1.0}
OPTIONS = JudgeOptions()


def _snapshot(
    examples=range(20), levels=(1.0, 1.0, 0.5, 0.0), kl=(0.0, 0.01, 0.2, 3.0), **changes
) -> Snapshot:
    """Example i gets the score 1 where i/20 lies below the setting's level; KL varies from example to example."""
    examples = list(examples)
    spread = np.exp(np.sin(np.array(examples, dtype=float)))[:, None]
    score = np.array([[float((i * 0.618) % 1 < level) for level in levels] for i in examples])
    ones = np.ones_like(score)
    kinds = ["full", "uniform", "uniform", "uniform"]
    settings = {
        name: {
            "kind": kind,
            "quantizer": None if kind == "full" else "affine",
            "code_bits": bits,
            "packed_bits": bits,
            "effective_bits": bits,
            "verdict": "equivalent",
        }
        for (name, bits), kind in zip(BITS.items(), kinds, strict=True)
    }
    made = Snapshot(
        identity={"model": "m", "protocol": "prefill", "grid": list(BITS)},
        shape={"layers": 2, "quantized_layers": [0, 1], "kv_heads": 1, "head_dim": 16, "max_positions": None},
        layers={"total": 2, "quantized": 2},
        sample={"seeds": [0], "per_task": 20, "planned": len(examples), "seeded": False},
        environment={"torch": "2"},
        settings=settings,
        cliff={"status": "located", "lower_bits": 1.0, "upper_bits": 2.0},
        operating_point=None,
        units=[("needle", f"e{i:03d}", 0, 0) for i in examples],
        prompts=[f"hash{i}" for i in examples],
        measures={
            "score": score,
            "kl": spread * np.array(kl),
            "new_tokens": 8 * ones,
            "runaway": 0 * ones,
            "quantized_reads": 18 * ones * (np.array(kinds) != "full"),
        },
        checks={"codes": {"L4": "abc"}},
    )
    return through_json(dataclasses.replace(made, **changes))


def _moved(comparison) -> set[tuple[str, str]]:
    return {(shift.witness, shift.setting) for shift in comparison.shifts if shift.moved}


def test_a_snapshot_survives_its_file(tmp_path):
    write_baseline(_snapshot(), tmp_path / "deep" / "baseline.json")
    again = read_baseline(tmp_path / "deep" / "baseline.json")
    outcome = compare(again, _snapshot(), OPTIONS)
    assert outcome.alike and outcome.exit_code == 0 and not outcome.notes
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["baseline.json"]


def test_rounding_of_another_machine_is_no_move():
    old = _snapshot()
    noise = 1 + 0.01 * np.sin(np.arange(80)).reshape(20, 4)
    new = through_json(dataclasses.replace(old, measures={**old.measures, "kl": old.measures["kl"] * noise}))
    outcome = compare(old, new, OPTIONS)
    assert outcome.exit_code == 0 and not outcome.alike and outcome.examples == 20


@pytest.mark.parametrize("factor", [1.3, 1 / 1.3])
def test_kl_of_one_setting_moves_either_way(factor):
    outcome = compare(_snapshot(), _snapshot(kl=(0.0, 0.01, 0.2 * factor, 3.0)), OPTIONS)
    assert outcome.exit_code == 1 and ("kl", "affine-L4") in _moved(outcome)
    assert ("kl", "affine-L8") not in _moved(outcome) and not {w for w, _ in _moved(outcome)} - {"kl"}
    (shift,) = (s for s in outcome.shifts if (s.witness, s.setting) == ("kl", "affine-L4"))
    assert shift.change == pytest.approx(factor, rel=1e-3)
    assert any(("worse" if factor > 1 else "better") in finding.what for finding in outcome.findings)


def test_a_change_of_kl_within_the_tolerance_is_none():
    new = _snapshot(kl=(0.0, 0.0104, 0.208, 3.12))
    assert compare(_snapshot(), new, OPTIONS).exit_code == 0
    assert compare(_snapshot(), new, JudgeOptions(kl_tolerance=0.03)).exit_code == 1


def test_the_cliff_moves_up_and_down():
    # Halfway down: upper end 3 less the area 1.75 or 0.75 + ... under what is retained at 1, 2 and 3 bits.
    old, new = _snapshot(), _snapshot(levels=(1.0, 0.2, 0.0, 0.0))
    outcome = compare(old, new, OPTIONS)
    (cliff,) = (shift for shift in outcome.shifts if shift.witness == "cliff")
    assert cliff.old == pytest.approx(3 - (0.75 + 0.25)) and cliff.moved
    kept = float(new.measures["score"][:, 1].mean())
    assert cliff.new == pytest.approx(3 - kept / 2)
    assert any(f.witness == "cliff" and "worse" in f.what for f in outcome.findings)
    better = compare(new, old, OPTIONS)
    assert better.exit_code == 1
    assert any(f.witness == "cliff" and "better" in f.what for f in better.findings)


def test_a_reference_that_fails_is_a_move():
    outcome = compare(_snapshot(), _snapshot(levels=(0.1, 0.1, 0.1, 0.0)), OPTIONS)
    assert ("score", "full") in _moved(outcome)


def test_only_the_examples_of_both_are_compared():
    worse = (0.0, 0.1, 2.0, 30.0)
    other = compare(_snapshot(range(40)), _snapshot(range(100, 140), kl=worse), OPTIONS)
    assert other.exit_code == 3 and other.examples == 0 and not other.alike
    assert "0 of the baseline's examples, 12 needed; run the baseline's seeds" in " ".join(other.notes)
    part = compare(_snapshot(range(40)), _snapshot(range(20, 60), kl=worse), OPTIONS)
    assert part.examples == 20 and ("kl", "all settings") in _moved(part)
    assert "20 examples of the run are not the baseline's and were left out" in part.notes


def test_a_part_of_the_examples_is_enough():
    outcome = compare(_snapshot(range(40)), _snapshot(range(10, 30)), OPTIONS)
    assert outcome.examples == 20 and outcome.alike and outcome.exit_code == 0


def test_changed_prompts_are_told():
    new = _snapshot(prompts=[f"other{i}" for i in range(20)])
    outcome = compare(_snapshot(), new, OPTIONS)
    assert outcome.exit_code == 3 and "20 prompts are other ones" in outcome.notes[0]


def test_an_unfinished_run_is_told():
    part = _snapshot(range(15))
    outcome = compare(_snapshot(), dataclasses.replace(part, sample={**part.sample, "planned": 20}), OPTIONS)
    assert outcome.exit_code == 0 and "the run is unfinished: 15 of 20 examples" in outcome.notes


def test_few_examples_are_not_judged_but_exact_witnesses_count():
    few = _snapshot(range(8))
    outcome = compare(_snapshot(), few, OPTIONS)
    assert outcome.exit_code == 3 and not outcome.shifts
    broken = dataclasses.replace(few, checks={"codes": {"L4": "xyz"}})
    assert compare(_snapshot(), broken, OPTIONS).exit_code == 1


def test_exact_witnesses():
    old = _snapshot()
    halved = {**old.measures, "quantized_reads": old.measures["quantized_reads"] / 2}
    settings = {**old.settings, "affine-L4": {**old.settings["affine-L4"], "effective_bits": 2.5}}
    for changes, witness, told in (
        ({"checks": {"codes": {"L4": "xyz"}}}, "codes", "1 of 1 checks differ: L4"),
        ({"settings": settings}, "storage", "affine-L4: effective bits 2.0000 -> 2.5000"),
        ({"layers": {"total": 2, "quantized": 1}}, "layers", "2 of 2 layers quantized -> 1 of 2"),
        ({"measures": halved}, "reads", "affine-L8: 0.500 of the reads"),
    ):
        outcome = compare(old, dataclasses.replace(old, **changes), OPTIONS)
        assert outcome.exit_code == 1 and {f.witness for f in outcome.findings} == {witness}
        assert told in outcome.findings[0].what and outcome.findings[0].certainty == "exact"


def test_without_kl_the_scores_are_judged():
    nothing = np.full((20, 4), math.nan)
    old = _snapshot()
    old = dataclasses.replace(old, measures={**old.measures, "kl": nothing})
    worse = _snapshot(levels=(1.0, 0.1, 0.0, 0.0))
    worse = dataclasses.replace(worse, measures={**worse.measures, "kl": nothing})
    outcome = compare(old, worse, OPTIONS)
    assert {shift.witness for shift in outcome.shifts} == {"score", "cliff"} and outcome.moved


def _read_anew(old: Snapshot) -> Snapshot:
    verdict = {**old.settings["affine-L4"], "verdict": "inconclusive"}
    return dataclasses.replace(
        old,
        cliff={"status": "undetermined", "lower_bits": None, "upper_bits": None},
        settings={**old.settings, "affine-L4": verdict},
    )


def test_a_cliff_that_the_statistics_move_is_a_move():
    old = _snapshot()
    outcome = compare(old, _read_anew(old), OPTIONS)
    assert outcome.exit_code == 1
    assert [(found.witness, found.what, found.certainty) for found in outcome.findings] == [
        ("analysis", "every score is alike, yet cliff (1.0, 2.0] -> not determined", "exact"),
        ("analysis", "every score is alike, yet affine-L4 was equivalent, is inconclusive", "exact"),
    ]


def test_what_reads_differently_by_chance_is_a_note():
    old = _snapshot()
    scores = old.measures["score"].copy()
    scores[0, 1] = 1 - scores[0, 1]
    new = dataclasses.replace(_read_anew(old), measures={**old.measures, "score": scores})
    outcome = compare(old, new, OPTIONS)
    assert outcome.exit_code == 0
    assert "cliff (1.0, 2.0] -> not determined: not beyond chance" in outcome.notes
    assert "affine-L4 was equivalent, is inconclusive: not beyond chance" in outcome.notes


def test_another_model_is_not_compared():
    with pytest.raises(UsageError, match=r"differs from the baseline in model \(model: m there, n here\)"):
        compare(_snapshot(), _snapshot(identity={**_snapshot().identity, "model": "n"}), OPTIONS)


LONG = "x" * 90


@pytest.mark.parametrize(
    ("there", "here", "told"),
    [
        ({"a": 1, "length": 300}, {"a": 1, "length": 650}, "task.length: 300 there, 650 here"),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, "task.a.b.c: 1 there, 2 here"),
        ({"a": 1}, {"b": 2}, "task.a: 1 there, nothing here; task.b: nothing there, 2 here"),
        ({"a": 1}, None, "task: {'a': 1} there, None here"),
        ([*range(50), 60], [*range(50), 70], "task: [60] there, [70] here"),
        ([1, 2], [2, 1], "task: [1, 2] there, [2, 1] here"),
        (f"{LONG}a", f"{LONG}b", f"task: ...{'x' * 20}a there, ...{'x' * 20}b here"),
        (
            dict.fromkeys("abcdef", 1),
            dict.fromkeys("abcdef", 2),
            "; task.d: 1 there, 2 here; and 2 more",
        ),
    ],
)
def test_of_what_differs_the_differing_part_is_shown(there, here, told):
    old = _snapshot(identity={"model": "m", "task": there})
    with pytest.raises(UsageError) as raised:
        require_comparable(old, {"model": "m", "task": here}, "this run")
    assert f"{told});" in str(raised.value)


AFFINE = {"_target_": "semkv_bench.quantizers.Affine", "group_size": None}
SPELLED = {"keep": {"sinks": 0, "recent": 0, "block": 1}, "layers": {"skip_first": 0, "skip_last": 0}}


@pytest.mark.parametrize(
    "here",
    [{**AFFINE, **SPELLED}, {"_target_": AFFINE["_target_"]}, {**AFFINE, "keep": {"recent": 0}}],
    ids=["spelled out", "left out", "in part"],
)
def test_an_option_left_out_is_the_default(here):
    for old, new in ((AFFINE, here), (here, AFFINE), ([AFFINE], [here])):
        require_comparable(_snapshot(identity={"quantizer": old}), {"quantizer": new}, "this run")


@pytest.mark.parametrize(
    ("here", "told"),
    [
        ({**AFFINE, "keep": {"sinks": 4, "recent": 0}}, "quantizer.keep.sinks: 0 there, 4 here"),
        ({**AFFINE, "layers": {"levels": {0: 256}}}, "quantizer.layers.levels: None there, {'0': 256} here"),
        ({**AFFINE, "group_size": 8}, "quantizer.group_size: None there, 8 here"),
        ({**AFFINE, "unknown": 0}, "quantizer.unknown: nothing there, 0 here"),
        ({**AFFINE, "_target_": "nowhere.Affine"}, "there, nowhere.Affine here"),
        (None, "None here"),
    ],
)
def test_an_option_that_is_not_the_default_counts(here, told):
    with pytest.raises(UsageError) as raised:
        require_comparable(_snapshot(identity={"quantizer": AFFINE}), {"quantizer": here}, "this run")
    assert told in str(raised.value)
