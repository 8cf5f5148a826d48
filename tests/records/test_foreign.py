"""Foreign score files: the formats, what is filled in, and one clear line for every bad input."""

import json
import math
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.records.foreign import read_records
from semkv_bench.records.normalize import normalize

COLUMNS = ("task", "example_id", "setting", "code_bits", "score")
ROWS = [
    ("qa", "007", "full", 16, 1.0),
    ("qa", "8", "full", 16, 0.5),
    ("qa", "007", "L4", 2, 0.25),
    ("qa", "8", "L4", 2, 0.0),
]


def frame(rows=ROWS, **extra) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=COLUMNS).assign(**extra)


def write(folder, table: pd.DataFrame, suffix: str):
    path = folder / f"scores{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_dict("records")))
    elif suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_parquet(path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_formats_give_the_same_records(tmp_path, suffix):
    records = read_records(write(tmp_path, frame(), suffix))
    assert len(records) == 4
    assert records["example_id"].tolist() == ["007", "007", "8", "8"]
    assert records["setting"].tolist() == ["L4", "full", "L4", "full"]
    assert records["score"].tolist() == [0.25, 1.0, 0.0, 0.5]
    assert records["kind"].tolist() == ["uniform", "full"] * 2
    assert records["code_bits"].tolist() == [2.0, 16.0] * 2
    assert set(records["seed"]) == set(records["turn"]) == {0}
    assert records["effective_bits"].isna().tolist() == [True, False] * 2
    for name in ("model", "protocol", "quantizer", "kl", "runaway"):
        assert records[name].isna().all()
    pd.testing.assert_frame_equal(records, normalize(records))


def test_examples_may_share_a_cluster_and_stand_alone_else(tmp_path):
    path = write(tmp_path, frame(cluster=["d1", "d1", "d1", "d1"]), ".csv")
    assert set(read_records(path)["cluster"]) == {"d1"}
    path = write(tmp_path, frame(cluster=[None, 5, None, 5.0]), ".jsonl")
    assert read_records(path)["cluster"].tolist() == ["007", "007", "5", "5"]
    assert normalize(frame())["cluster"].tolist() == ["007", "007", "8", "8"]
    path = write(tmp_path, frame(cluster=["d1", "d1", "d2", "d1"]), ".csv")
    with pytest.raises(
        UsageError, match=r"scores\.csv, line 2: example 007 of task qa is in more than one cluster"
    ):
        read_records(path)


def test_ids_are_text_whatever_their_type(tmp_path):
    lines = [
        {"task": 1, "example_id": identity, "setting": setting, "code_bits": 4, "score": True}
        for identity in (7, 7.0 + 1, "x")
        for setting in ("full", "L16")
    ]
    for line in lines:
        if line["setting"] == "full":
            del line["code_bits"]
    path = tmp_path / "scores.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    records = read_records(path)
    assert sorted(set(records["example_id"])) == ["7", "8", "x"]
    assert set(records["task"]) == {"1"}
    assert set(records.loc[records.setting == "full", "code_bits"]) == {16.0}
    assert set(records["score"]) == {1.0}


def test_given_columns_are_kept(tmp_path):
    table = frame(
        seed=["1", "1", "1", "1"],
        kind=["full", "full", "mixed", "mixed"],
        runaway=["false", "False", "1", "true"],
        kl=["", "", "0.5", "0.25"],
        prediction=["a,b", "line\nbreak", "null", ""],
        effective_bits=["", "", "2.25", "2.25"],
    )
    records = read_records(write(tmp_path, table, ".csv"))
    low = records[records.setting == "L4"]
    assert set(records["seed"]) == {1}
    assert set(low["kind"]) == {"mixed"}
    assert low["runaway"].tolist() == [1.0, 1.0]
    assert low["kl"].tolist() == [0.5, 0.25]
    assert low["effective_bits"].tolist() == [2.25, 2.25]
    assert "line\nbreak" in set(records["prediction"])


def test_one_model_is_chosen(tmp_path):
    both = pd.concat([frame(model="llama"), frame(model="qwen")])
    path = write(tmp_path, both, ".csv")
    with pytest.raises(UsageError, match=r"2 models \(llama, qwen\).*never pooled.*model=llama"):
        read_records(path)
    assert set(read_records(path, model="qwen")["model"]) == {"qwen"}
    with pytest.raises(UsageError, match="no rows of model mistral; it holds llama, qwen"):
        read_records(path, model="mistral")
    with pytest.raises(UsageError, match="has no column model"):
        read_records(write(tmp_path, frame(), ".jsonl"), model="qwen")


def test_line_of_a_filtered_file_is_that_of_the_file(tmp_path):
    both = pd.concat([frame(model="llama"), frame(model="qwen")], ignore_index=True)
    both.loc[6, "score"] = 7.0
    with pytest.raises(UsageError, match=r"line 8: score 7 \(setting L4\) is outside 0\.\.1"):
        read_records(write(tmp_path, both, ".csv"), model="qwen")


def bad(change) -> pd.DataFrame:
    table = frame().astype(object)
    change(table)
    return table


def put(row, column, value):
    return lambda table: table.__setitem__(column, table[column].where(table.index != row, value))


BAD = {
    "score is no number": (put(2, "score", "good"), r"4: score 'good' is not a number"),
    "score missing": (put(3, "score", ""), r"5: score is missing or NaN"),
    "score NaN": (put(3, "score", "NaN"), r"5: score is missing or NaN"),
    "score infinite": (put(3, "score", "inf"), r"5: score 'inf' is not finite"),
    "score negative": (put(2, "score", -0.1), r"4: score -0\.1 \(setting L4\) is outside 0\.\.1$"),
    "percent": (put(0, "score", 87.5), r"2: score 87\.5 .*0\.\.100, divide it by 100"),
    "bits no number": (put(2, "code_bits", "two"), r"4: code_bits 'two' is not a number"),
    "bits differ": (put(2, "code_bits", 2.5), r"setting L4 has different code_bits \(2 and 2\.5\)"),
    "bits missing": (put(2, "code_bits", ""), r"setting L4 lacks code_bits in 1 row"),
    "bits negative": (
        lambda t: t.__setitem__("code_bits", t["code_bits"].replace(2, -2)),
        r"setting L4 has code_bits -2",
    ),
    "bits of no number format": (
        lambda t: t.__setitem__("code_bits", 99),
        r"setting L4 has code_bits 99; bits per value are above 0 and at most 32",
    ),
    "bits above full's": (
        lambda t: t.__setitem__("code_bits", [1.5, 1.5, 2, 2]),
        r"setting L4 has code_bits 2, more than the 1\.5 of full",
    ),
    "stored in fewer bits than packed": (
        lambda t: (
            t.insert(5, "packed_bits", ["", "", 2, 2]),
            t.insert(6, "effective_bits", ["", "", 1.5, 1.5]),
        ),
        r"setting L4 has effective_bits 1\.5 below its packed_bits 2",
    ),
    "stored in fewer bits than coded": (
        lambda t: t.insert(5, "effective_bits", ["", "", 1.5, 1.5]),
        r"setting L4 has effective_bits 1\.5 below its code_bits 2",
    ),
    "negative divergence": (
        lambda t: t.insert(5, "kl", [0, 0, 0.1, -3]),
        r"5: kl -3 \(setting L4\) is negative",
    ),
    "agreement": (
        lambda t: t.insert(5, "top1_agreement", [1, 1, 0.5, 7]),
        r"5: top1_agreement 7 \(setting L4\) is outside 0\.\.1; top1_agreement looks like 0\.\.100",
    ),
    "negative turn": (lambda t: t.insert(5, "turn", [0, 0, -1, 0]), r"4: turn -1 is negative"),
    "seed beyond 64 bits": (
        lambda t: t.insert(5, "seed", ["1", "1", "99999999999999999999", "1"]),
        r"4: seed '99999999999999999999' is not a whole number of at most 64 bits",
    ),
    "seed of endless digits": (
        lambda t: t.insert(5, "seed", ["1", "1", "1e999999999", "1"]),
        r"4: seed '1e9+' is not",
    ),
    "no id": (put(1, "example_id", ""), r"3: example_id is empty"),
    "duplicate": (put(3, "example_id", "007"), r"line 5 repeats line 4: task qa, example 007, seed 0, .* L4"),
    "seed": (lambda t: t.insert(5, "seed", [0, 0, 0.5, 0]), r"4: seed '0\.5' is not a whole number"),
    "kind": (
        lambda t: t.insert(5, "kind", ["full", "full", "odd", "odd"]),
        r"4: kind 'odd' is none of full, uniform",
    ),
    "kind of full": (lambda t: t.insert(5, "kind", "uniform"), r"2: the setting full has kind 'uniform'"),
    "runaway": (
        lambda t: t.insert(5, "runaway", ["", "", "maybe", ""]),
        r"4: runaway 'maybe' is neither true nor false",
    ),
    "protocols": (
        lambda t: t.insert(5, "protocol", ["a", "a", "a", "b"]),
        r"holds 2 protocols \(a, b\), which are never pooled",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_rows_are_named(tmp_path, name):
    change, message = BAD[name]
    path = write(tmp_path, bad(change), ".csv")
    with pytest.raises(UsageError, match=message) as caught:
        read_records(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_paired(tmp_path):
    renamed = frame().replace({"setting": {"full": "fp16"}})
    with pytest.raises(UsageError, match=r"no rows of the setting full.*it holds L4, fp16"):
        read_records(write(tmp_path, renamed, ".csv"))
    with pytest.raises(UsageError, match="only the setting full"):
        read_records(write(tmp_path, frame(ROWS[:2]), ".csv"))
    apart = [*ROWS, ("qa", "9", "L8", 3, 1.0)]
    with pytest.raises(UsageError, match="setting L8 shares no example with full"):
        read_records(write(tmp_path, frame(apart), ".csv"))


def test_same_names_under_two_quantizers(tmp_path):
    both = pd.concat([frame(quantizer="affine"), frame(ROWS[2:], quantizer="turboquant")])
    with pytest.raises(UsageError, match=r"different quantizers, which need .* setting names of their own"):
        read_records(write(tmp_path, both, ".csv"))


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("before", ["", "\n", "  \n\n", "\ufeff"])
def test_separated_values_are_read_by_what_separates_the_columns(tmp_path, delimiter, before):
    path = tmp_path / "scores.csv"
    path.write_text(
        before + frame(prediction="a,b;c").to_csv(index=False, sep=delimiter) + delimiter * 5 + "\n"
    )
    records = read_records(path)
    assert len(records) == 4 and set(records["prediction"]) == {"a,b;c"}


def test_lines_are_counted_with_a_blank_first_one(tmp_path):
    path = tmp_path / "scores.tsv"
    path.write_text("\n" + bad(put(2, "score", 1.5)).to_csv(index=False, sep="\t"))
    with pytest.raises(UsageError, match=r"line 5: score 1\.5"):
        read_records(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.rename(columns={"task": "Task"}), "column Task must be called task, in lower case"),
        (
            lambda t: t.rename(columns={"example_id": "Example ID"}),
            "column Example ID must be called example_id",
        ),
        (lambda t: t.assign(Seed=1), "column Seed must be called seed"),
        (lambda t: t.assign(KL=0.1), "column KL must be called kl"),
        (
            lambda t: t.replace("full", "Full"),
            "the setting Full, the reference, must be called full, in lower case",
        ),
        (
            lambda t: t.replace("full", "FULL").assign(code_bits=[None, None, 2, 2]),
            "the setting FULL, the reference, must be called full",
        ),
        (lambda t: t.assign(score="0,5"), r"score '0,5' is not a number; write it with a decimal point"),
    ],
)
def test_other_spellings_are_told_what_to_change(tmp_path, change, message):
    with pytest.raises(UsageError, match=message) as caught:
        read_records(write(tmp_path, change(frame()), ".csv"))
    assert "\n" not in str(caught.value)


def test_a_column_of_ones_own_may_differ_in_case_from_a_known_one():
    assert len(normalize(frame(seed=0, Seed="x", Remark="y"))) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("scores.txt", b"x", r"use \.jsonl, \.csv or \.parquet"),
        ("scores.csv", b"", "holds no records"),
        ("scores.csv", b"task,example_id,setting,code_bits,score\n", "holds no records"),
        (
            "scores.csv",
            b"task,example_id,score\nqa,1,1\n",
            "no column setting, code_bits; .* found task, example_id",
        ),
        (
            "scores.csv",
            b"task,example_id,setting,code_bits,score\nqa,1,full,16\n",
            "line 2: 4 fields where the header has 5",
        ),
        ("scores.csv", b"task,task\n", "column task occurs more than once"),
        ("scores.csv", b"task\n\xff\xfe\n", "is not UTF-8 text"),
        ("scores.jsonl", b"", "holds no records"),
        ("scores.jsonl", b"\n\n", "holds no records"),
        ("scores.jsonl", b'{"task": "qa"}\n{"task": \n', "line 2: broken JSON"),
        ("scores.jsonl", b"[1, 2]\n", r"line 1: expected a JSON object, got \[1, 2\]"),
        ("scores.parquet", b"", "holds no records"),
        ("scores.parquet", b"PAR1 no", "not a readable Parquet file"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_records(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(MissingError, match=r"none\.csv does not exist") as caught:
        read_records(tmp_path / "none.csv")
    assert caught.value.exit_code == 3
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        read_records(tmp_path / "folder.csv")


def test_json_lines_are_counted_with_the_blank_ones(tmp_path):
    path = tmp_path / "scores.jsonl"
    good = json.dumps(dict(zip(COLUMNS, ROWS[0], strict=True)))
    path.write_text(f"{good}\n\n{good.replace('1.0', 'NaN')}\n")
    with pytest.raises(UsageError, match="line 3: score is missing or NaN"):
        read_records(path)


def test_mixed_allocations_may_vary_by_whole_tokens():
    table = frame(kind=["full", "full", "mixed", "mixed"])
    table["code_bits"] = [16, 16, 2.388, 2.392]
    bits = normalize(table).query("setting == 'L4'")["code_bits"]
    assert bits.tolist() == pytest.approx([2.39, 2.39])
    table["code_bits"] = [16, 16, 2.0, 2.4]
    with pytest.raises(UsageError, match="different code_bits"):
        normalize(table)


def test_names_tell_kinds_that_are_not_given():
    """Else a mix would count as a point of the grid, and move the cliff."""
    names = ["full", "affine-L16", "affine-L16/5@0.25:key_norm", "prune@0.5:random", "odd@2:random"]
    kinds = ["full", "uniform", "mixed", "prune", "uniform"]
    bits = [16.0, 4.0, 2.7, np.nan, 3.0]
    rows = [
        {"task": "qa", "example_id": i, "setting": name, "code_bits": b, "score": 1.0}
        for i in range(2)
        for name, b in zip(names, bits, strict=True)
    ]
    found = normalize(pd.DataFrame(rows)).drop_duplicates("setting").set_index("setting")["kind"]
    assert [found[name] for name in names] == kinds


def test_pruned_settings_need_no_code_bits():
    table = frame(kind=["full", "full", "prune", "prune"])
    table["code_bits"] = [16, 16, np.nan, np.nan]
    assert normalize(table).query("setting == 'L4'")["code_bits"].isna().all()


def test_bits_written_with_few_digits_stay_as_written():
    table = frame()
    table["code_bits"] = [16, 16, 2.32, 2.32]
    assert normalize(table)["code_bits"].max() == 16
    assert not math.isclose(normalize(table)["code_bits"].min(), math.log2(5), abs_tol=1e-3)


def test_bits_rounded_to_one_decimal_are_no_contradiction():
    table = frame(packed_bits=[16, 16, 2.3, 2.3], effective_bits=[16, 16, 2.6, 2.6], kl=[0, 0, -1e-7, 0.1])
    table["code_bits"] = [16, 16, 2.322, 2.322]
    assert normalize(table)["packed_bits"].min() == 2.3


def test_a_pruned_setting_stores_less_than_the_codes_it_keeps():
    table = frame(kind=["full", "full", "prune", "prune"], effective_bits=[16, 16, 4, 4])
    table["code_bits"] = 16
    assert normalize(table)["effective_bits"].min() == 4


def test_full_stores_what_it_codes_where_it_does_not_say():
    table = frame(effective_bits=[np.nan, np.nan, 2.5, 2.5])
    table["code_bits"] = [32, 32, 2, 2]
    full = normalize(table).query("setting == 'full'")
    assert set(full["packed_bits"]) == set(full["effective_bits"]) == {32.0}


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_large_seeds_stay_apart(tmp_path, suffix):
    seeds = (2**53, 2**53 + 1, 2**63 - 1, -(2**63))
    table = pd.concat([frame(seed=seed) for seed in seeds])
    assert set(read_records(write(tmp_path, table, suffix))["seed"]) == set(seeds)


def test_a_float_is_no_seed_where_it_cannot_tell_neighbours_apart():
    with pytest.raises(
        UsageError, match=r"row 1: seed .* is not a whole number of at most 64 bits \(53 where"
    ):
        normalize(frame(seed=2.0**53 + 2))
    assert set(normalize(frame(seed=[1.0, 1.0, np.nan, 1.0]))["seed"]) == {0, 1}


@pytest.mark.parametrize("value", ['"\\ud800"', "1" * 5001])
def test_json_that_python_cannot_hold_is_named_by_line(tmp_path, value):
    path = tmp_path / "scores.jsonl"
    path.write_text(f'{{"task": "qa", "example_id": 1, "setting": {value}, "code_bits": 2, "score": 1}}\n')
    with pytest.raises(UsageError, match="line 1: broken JSON"):
        read_records(path)


def test_exact_decimals_of_a_parquet_file_are_numbers(tmp_path):
    rows = [
        {
            "task": "qa",
            "example_id": i,
            "seed": Decimal(0),
            "setting": name,
            "code_bits": bits,
            "score": Decimal("0.25"),
        }
        for i in range(2)
        for name, bits in (("full", Decimal("16.0")), ("int4", Decimal("4.0")))
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "scores.parquet")
    frame = read_records(tmp_path / "scores.parquet")
    assert (
        (frame["score"] == 0.25).all()
        and set(frame["code_bits"]) == {16.0, 4.0}
        and (frame["seed"] == 0).all()
    )
