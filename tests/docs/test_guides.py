"""The guides: the files that they show are written as they stand, and a sweep is run with them."""

import json
import re
import shutil

import pytest
import torch
import yaml
from guides import ROOT, commands, shown_files, write_files
from transformers import AutoTokenizer

from semkv_bench.cli import main
from semkv_bench.config.own import joined
from semkv_bench.importance import choice
from semkv_bench.records.folder import read_run

pytestmark = pytest.mark.usefixtures("without_figures")

QUICK = [
    "subset=[niah_noise]",
    "per_task=2",
    "task.length=200",
    "max_new_tokens=3",
    "engine.noise_examples=0",
]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes the files of a guide to a folder of its own and goes there."""

    def write(guide):
        monkeypatch.chdir(tmp_path)
        write_files(ROOT / "docs" / guide, tmp_path)
        return tmp_path

    return write


def _sweep(folder, out, *more):
    return ["sweep", "--conf", "mine", "model=custom", f"model.path={folder}", f"out={out}", *more]


def _storage(capsys, guide):
    """What the guide's storage command prints."""
    (command,) = [c for c in commands(ROOT / "docs" / guide) if c[0] == "storage"]
    capsys.readouterr()
    assert main(command) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def symmetric(own):
    """The quantizer of the guide, built from its YAML file."""
    own("add-a-quantizer.md")
    from semkv_bench.config.compose import build, compose_config
    from semkv_bench.config.own import joined

    def make(*overrides):
        with joined(["mine"]):
            return build(compose_config("sweep", ["quantizer=symmetric", *overrides]).quantizer, "quantizer")

    return make


def test_the_quantizer_keeps_to_its_levels(symmetric):
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    levels = torch.tensor([2, 3, 5, 8, 16, 256, 4, 4, 7])
    coder = symmetric().coder(16)
    encoded = coder.encode(x, levels)
    assert (encoded.codes < levels[:, None]).all() and encoded.metadata.dtype == torch.float16
    step = encoded.metadata.float()
    nearest = x.abs().amax(-1, keepdim=True)
    error = (coder.decode(encoded, torch.float32) - x).abs()
    # Half a step, and what float16 rounds off a step over half the levels.
    assert (error <= step / 2 + nearest * 2**-10).all()
    both = torch.stack([levels, levels.flip(0)])
    out = torch.full((2, 2, 9, 20), 7.0)[..., :16]
    coder.quantize_dequantize(x, both, out)
    for got, row in zip(out, both, strict=True):
        assert torch.equal(got, coder.decode(coder.encode(x, row), x.dtype))
    assert torch.equal(
        coder.quantize_dequantize(x, torch.tensor([[5]]))[0], coder.decode(coder.encode(x, 5), x.dtype)
    )


def test_the_quantizer_by_hand_and_at_its_edges(symmetric):
    from semkv_bench.quantizers import NonFiniteError

    coder = symmetric().coder(4)
    x = torch.tensor([[[-4.0, -1.0, 1.1, 4.0]]])
    # Five levels over [-4, 4] are -4, -2, 0, 2, 4; the tie at -1 goes to the even code, 2.
    assert coder.encode(x, 5).codes.tolist() == [[[0, 2, 3, 4]]]
    assert coder.decode(coder.encode(x, 5), torch.float32).tolist() == [[[-4.0, 0.0, 2.0, 4.0]]]
    # Three levels over [-2, 2]; -1 lies between -2 (code 0) and 0 (code 1), and the even one wins again.
    clipped = symmetric("quantizer.clip=0.5").coder(4)
    assert clipped.decode(clipped.encode(x, 3), torch.float32).tolist() == [[[-2.0, -2.0, 2.0, 2.0]]]
    zero = torch.zeros(1, 1, 4, dtype=torch.float16)
    assert torch.equal(coder.quantize_dequantize(zero, torch.tensor([[2], [5]])), zero.expand(2, 1, 1, 4))
    with pytest.raises(NonFiniteError):
        coder.encode(torch.tensor([[[1.0, float("nan"), 0.0, 0.0]]]), 4)


def test_the_quantizer_in_a_sweep(own, local_folder, capsys):
    folder = own("add-a-quantizer.md")
    cost = _storage(capsys, "add-a-quantizer.md")
    told = (ROOT / "docs/add-a-quantizer.md").read_text()
    bits = (f"{cost[name]:.3f} {name[:-5]} bits" for name in ("code_bits", "packed_bits", "effective_bits"))
    assert all(stated in told for stated in bits) and f"compression of {cost['compression']:.2f}" in told
    assert cost["effective_bits"] == pytest.approx(7 / 3 + 16 / 128)
    assert f"{7 / 3 + 16 / 64:.3f} effective bits" in told
    sweep = _sweep(local_folder, "run", *QUICK, "quantizer=symmetric", "grid.levels=[16,5,2]")
    assert main(sweep) == 0
    frame, protocol = read_run(folder / "run")
    assert set(frame.setting) == {"full", "symmetric-L16", "symmetric-L5", "symmetric-L2"}
    mine = frame[frame.setting == "symmetric-L5"]
    assert set(mine.quantizer) == {"symmetric"} and (mine.quantized_reads > 0).all()
    assert mine.effective_bits.tolist() == pytest.approx([7 / 3 + 16 / 16] * len(mine))
    assert (
        0
        < frame[frame.setting == "symmetric-L16"].kl.mean()
        < frame[frame.setting == "symmetric-L2"].kl.mean()
    )
    assert list(protocol["own_code"]) == ["symmetric.Symmetric"]
    assert main(["cliff-report", "run=run"]) == 0


def test_records_of_two_versions_of_own_code_do_not_mix(own, local_folder, capsys):
    folder = own("add-a-quantizer.md")
    sweep = _sweep(local_folder, "run", *QUICK, "quantizer=symmetric", "grid.levels=[4]", "per_task=1")
    assert main(sweep) == 0 and main(sweep) == 0
    with (folder / "mine/symmetric.py").open("a") as file:
        file.write("# changed\n")
    assert main(sweep) == 2
    assert "another protocol" in capsys.readouterr().err


def test_the_metric_ranks_tokens_in_a_sweep(own, local_folder, capsys):
    folder = own("add-a-metric.md")
    cost = _storage(capsys, "add-a-metric.md")
    assert f"{cost['effective_bits']:.3f} effective bits" in (ROOT / "docs/add-a-metric.md").read_text()
    assert cost["effective_bits"] == pytest.approx(0.25 * 4 + 0.75 * 7 / 3 + 32 / 64)
    mixes = ["allocation=two_level", "allocation.high=16", "allocation.low=3", "grid.levels=[16,3]"]
    shares = ["allocation.metric=[key_span,recency]", "allocation.fraction=[0.0,0.5,1.0]"]
    assert main(_sweep(local_folder, "run", *QUICK, *mixes, *shares)) == 0
    frame, protocol = read_run(folder / "run")
    kl = frame.groupby("setting").kl.mean()
    # At the ends of the range a mix is its own high or low setting, whatever ranks the tokens.
    assert kl["affine-L16/3@1:key_span"] == pytest.approx(kl["affine-L16"], rel=1e-4)
    assert kl["affine-L16/3@0:key_span"] == pytest.approx(kl["affine-L3"], rel=1e-4)
    assert kl["affine-L16/3@0.5:key_span"] != pytest.approx(kl["affine-L16/3@0.5:recency"], rel=1e-4)
    assert list(protocol["own_code"]) == ["key_span.KeySpan"]
    from semkv_bench.importance import metric

    keys = torch.tensor([[[0.0, 3.0, -1.0], [1.0, 1.0, 1.0]], [[2.0, 2.0, 0.0], [5.0, 0.0, 0.0]]])
    with joined(["mine"]):
        assert metric("key_span").score(keys, keys).tolist() == [3.0, 2.5]


def test_the_task_is_asked_and_scored(own, local_folder):
    folder = own("add-a-task.md")
    sweep = _sweep(
        local_folder, "run", "task=multiple_choice", "task.path=mine/items.jsonl", "grid.levels=[4]"
    )
    assert main([*sweep, "seeds=[0,1]", "per_task=3", "engine.noise_examples=0"]) == 0
    frame, protocol = read_run(folder / "run")
    assert set(frame.task) == {"multiple_choice"} and len(frame) == 2 * 2 * 3
    assert set(frame.example_id) <= {"q1", "q2", "q3", "q4"}
    chance = protocol["chance"]["multiple_choice"]
    assert chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 2 + 1 / 3) / 4)
    assert f"Chance is {chance:.3f}" in (ROOT / "docs/add-a-task.md").read_text()
    from multiple_choice import MultipleChoice

    task, tokenizer = MultipleChoice("mine/items.jsonl"), AutoTokenizer.from_pretrained(local_folder)
    first, *_ = task.examples(tokenizer, [0], per_task=1)
    text = tokenizer.decode(first.input_ids)
    assert text.endswith("The answer is") and "Answer with one of: " in text
    answer = first.answers[0]
    assert tokenizer.decode(first.target_ids).strip() == answer
    assert task.score(first, f" {answer.upper()}.") == 1 and task.score(first, "") == 0
    more = task.examples(tokenizer, [0], per_task=4)
    assert more[0] == first and len({e.example_id for e in more}) == 4


def test_errors_of_own_folders_are_one_line(own, tmp_path, capsys):
    own("add-a-metric.md")

    def fails(code, told, *arguments):
        assert main(["storage", *arguments]) == code
        err = capsys.readouterr().err
        assert told in err and len(err.strip().splitlines()) == 1

    fails(3, "not a folder", "--conf", "nowhere")
    fails(2, "--conf needs a folder", "--conf")
    fails(2, "choose from", "--conf=mine", "allocation=two_level", "allocation.metric=nope")
    fails(2, "there is no quantizer 'nope'", "--conf", "mine", "quantizer=nope")
    fails(2, "no importance metric", "allocation=two_level", "allocation.metric=key_spam")
    (tmp_path / "mine/metric/other.yaml").write_text("_target_: key_span.KeySpan\n")
    other = ("allocation=two_level", "allocation.metric=other")
    fails(2, "name the file key_span.yaml", "--conf", "mine", *other)
    for target in ("key_span.Missing", "nowhere.Missing", "json.dumps", "x", ""):
        (tmp_path / "mine/metric/other.yaml").write_text(f"_target_: {target}\n")
        choice._of_file.cache_clear()
        fails(2, "mine/metric/other.yaml: ", "--conf", "mine", *other)
    (tmp_path / "mine/metric/other.yaml").unlink()
    (tmp_path / "mine/quantizer").mkdir()
    (tmp_path / "mine/quantizer/affine.yaml").write_text("_target_: own.Affine\n")
    fails(2, "quantizer=affine is a choice of the package's own", "--conf", "mine")
    (tmp_path / "mine/quantizer/affine.yaml").rename(tmp_path / "mine/quantizer/gone.yaml")
    fails(2, "own.Affine", "--conf", "mine", "quantizer=gone")


@pytest.mark.slow
def test_own_choices_are_listed_and_run_side_by_side(own, local_folder, tmp_path, monkeypatch, capsys):
    folder = own("add-a-quantizer.md")
    (folder / "it's mine").mkdir()
    shutil.copytree(folder / "mine", folder / "it's mine/conf")
    monkeypatch.setenv("SEMKV_CONF", str(folder / "it's mine/conf"))
    assert main(["sweep", "--help"]) == 0
    assert re.search(r"choices: affine, .*symmetric, .*turboquant", capsys.readouterr().out)
    one = ["sweep", "model=custom", f"model.path={local_folder}", *QUICK, "per_task=1", "grid.levels=[4]"]
    assert main([*one, "-m", "quantizer=affine,symmetric"]) == 0
    runs = [yaml.safe_load((p / "protocol.yaml").read_text()) for p in (folder / "results/runs").iterdir()]
    assert sorted(name for run in runs for name in run["settings"] if name != "full") == [
        "affine-L4",
        "symmetric-L4",
    ]


@pytest.mark.parametrize(("guide", "most"), [("add-a-quantizer.md", 3), ("add-a-metric.md", 2)])
def test_an_extension_is_few_files(guide, most):
    assert len(shown_files(ROOT / "docs" / guide)) <= most


def test_every_guide_shows_whole_files():
    for page in sorted((ROOT / "docs").glob("add-a-*.md")):
        files = shown_files(page)
        assert {name.rpartition(".")[2] for name in files} >= {"py", "yaml"}, page.name
        for name, text in files.items():
            if name.endswith(".py"):
                compile(text, name, "exec")
