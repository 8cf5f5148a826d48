"""What a run says that it saved: of the whole cache at its lengths, beside the price of a coded value."""

import json

import pytest
import yaml

from semkv_bench.cli import main
from semkv_bench.records.folder import read_run

pytestmark = pytest.mark.usefixtures("without_figures")

TOKENS = ("8192", "32768", "131072")


@pytest.fixture(scope="module")
def generated(local_folder, tmp_path_factory):
    """A run whose prompts stay in 16 bits."""
    out = tmp_path_factory.mktemp("runs") / "generated"
    asked = ["protocol=generation", "protocol.parts=generated", "protocol.block=4", "task.length=300"]
    asked += ["per_task=2", "subset=niah_noise", "grid.levels=[4,2]", "max_new_tokens=9"]
    asked += ["engine.noise_examples=0", f"model.path={local_folder}", f"out={out}"]
    assert main(["sweep", "model=custom", *asked]) == 0
    assert main(["cliff-report", f"run={out}"]) == 0
    return out


def test_a_prompt_in_16_bits_is_no_saving(generated):
    frame, _ = read_run(generated)
    report = json.loads((generated / "report.json").read_text())
    rows = {row["setting"]: row for row in report["settings"]}
    for name in ("affine-L4", "affine-L2"):
        row, records = rows[name], frame[frame["setting"] == name]
        assert row["cache_bits"] == pytest.approx(records["cache_bits"].mean())
        # At most two blocks of four of some 300 tokens.
        assert row["effective_bits"] < 5 and 15.5 < row["cache_bits"] < 16
        assert row["compression"] == pytest.approx(16 / row["cache_bits"])
    assert rows["full"]["cache_bits"] == 16 and rows["full"]["compression"] == 1
    assert report["layers"] == {"total": 2, "quantized": 2}


def test_records_count_what_their_rows_held(generated):
    frame, _ = read_run(generated)
    for _, record in frame.iterrows():
        # Two layers, keys and values, all that was fed; the last token of an answer at its limit is not.
        held = 4 * (record.prompt_tokens + record.new_tokens)
        states = record.token_layers
        assert abs(sum(states.values()) - held) <= 4
        assert states["coded"] % (4 * 4) == 0 and states["deleted"] == 0
        price = record.effective_bits
        total = sum(states.values())
        expected = (states["coded"] * price + (total - states["coded"]) * 16) / total
        assert record.cache_bits == pytest.approx(expected)


def test_whole_caches_at_other_lengths_follow_the_protocol(generated, local_folder, tmp_path, capsys):
    at = yaml.safe_load((generated / "protocol.yaml").read_text())["settings"]["affine-L2"]["cache_at"]
    assert tuple(at) == TOKENS and all(15.9 < size["cache_bits"] < 16 for size in at.values())
    report = json.loads((generated / "report.json").read_text())
    assert report["settings"][-1]["cache_at"] == at
    asked = ["model=custom", f"model.path={local_folder}", "per_task=1", "grid.levels=[2]", "task.length=300"]
    capsys.readouterr()
    assert main(["plan", *asked, "--json"]) == 0
    coded = json.loads(capsys.readouterr().out)["settings"][-1]
    assert (
        coded["effective_bits"]
        < coded["cache_at"]["131072"]["cache_bits"]
        < coded["cache_at"]["8192"]["cache_bits"]
    )
    assert coded["effective_bits"] < coded["cache_bits"] < 16


def test_of_a_model_with_few_coded_layers_the_whole_cache_speaks(tmp_path, capsys):
    from transformers import Gemma3TextConfig

    shape = {"num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 128}
    shape |= {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 300}
    Gemma3TextConfig(**shape, architectures=["Gemma3ForCausalLM"]).save_pretrained(tmp_path)
    asked = ["model=custom", f"model.path={tmp_path}", "grid.levels=[16]", "tokens=300"]
    assert main(["storage", *asked, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    # One layer of 300 tokens coded at 5 bits, five of the 127 in 16 that a window of 128 keeps between steps.
    assert row["compression"] == pytest.approx(3.2)
    assert row["cache_bits"] == pytest.approx((300 * 5 + 5 * 127 * 16) / (300 + 5 * 127))
    assert row["layers"] == "1 of 6 layers are coded; 5 hold a window in 16 bits"
    assert main(["storage", *asked]) == 0
    assert "1 of 6 layers are coded" in capsys.readouterr().out
