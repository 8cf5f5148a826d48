"""The scripts of walkthroughs/ are the commands of their page, at most six each, and take files that are there."""

import json
import re
import shlex

import pytest
from guides import ROOT, commands, shown_files

SCRIPTS = sorted((ROOT / "scripts" / "walkthroughs").glob("*.sh"))
PAGE = ROOT / "docs" / "walkthroughs.md"


def _lines(script) -> list[str]:
    """Commands as the shell would run them without arguments."""
    text = script.read_text().replace("\\\n", " ")
    defaults = dict(re.findall(r"(\w+)=\$\{\d:-(\S+)\}", text)) | {"model": "MODEL.gguf"}
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    lines = [line for line in lines if not re.match(r"\w+=\$\{", line)]
    return [re.sub(r'"?\$(\w+)"?', lambda name: defaults[name.group(1)], line) for line in lines]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_walkthrough_is_at_most_six_commands_and_those_of_the_page(script):
    lines = _lines(script)
    assert 4 <= len(lines) <= 6
    ours = [shlex.split(line)[1:] for line in lines if "/semkv-bench " in line]
    assert ours and all(command in commands(PAGE) for command in ours)


def test_their_files_are_there_and_those_of_the_guide():
    shown = shown_files(ROOT / "docs" / "add-a-quantizer.md")
    for name in ("symmetric.py", "quantizer/symmetric.yaml"):
        assert (ROOT / "docs/examples/mine" / name).read_text() == shown[f"mine/{name}"]
    prompts = [json.loads(line) for line in (ROOT / "docs/examples/prompts.jsonl").read_text().splitlines()]
    assert len({prompt["id"] for prompt in prompts}) == 60
    assert all(prompt["answers"][0] in prompt["prompt"] for prompt in prompts)
