"""Prompts out, answers in, for engines that nobody wrote an adapter for."""

import json
from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf import DictConfig

from semkv_bench.config.compose import compose_config
from semkv_bench.config.overrides import override
from semkv_bench.engine.served.answers import prompt_id
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.files import check_writable, json_lines, read_text, write_atomically
from semkv_bench.plan.plan import make_plan, prompt_hash
from semkv_bench.sweep.command import sweep_once

__all__ = ["export_prompts", "score_answers"]

_ENDING = ".export.yaml"


def export_prompts(config: DictConfig, overrides: Sequence[str], out: Path) -> int:
    """Write every prompt of the configured sweep to the JSONL file ``out``, and how it was made beside it.

    config: composed of ``overrides``.

    Each line has ``id`` (which the answers must carry), ``prompt``, ``prompt_ids``, ``max_new_tokens``,
    ``min_new_tokens``, ``stop_token_ids`` and ``prompt_hash``. Returns the number of prompts.
    """
    if out.suffix != ".jsonl":
        raise UsageError(f"out={out} must end in .jsonl")
    check_writable(out.parent)
    plan = make_plan(config)
    tokenizer = plan.engine.tokenizer(plan.source)
    if several := next((example for example in plan.examples if example.turns > 1), None):
        raise UsageError(
            f"{several.task} asks {several.turns} questions in turn; only single questions are exported"
        )
    lines = [
        json.dumps(
            {
                "id": prompt_id(example),
                "prompt": tokenizer.decode(list(example.input_ids), skip_special_tokens=False),
                "prompt_ids": list(example.input_ids),
                "max_new_tokens": example.max_new_tokens,
                "min_new_tokens": example.min_new_tokens,
                "stop_token_ids": list(example.stop_token_ids),
                "prompt_hash": prompt_hash(example),
            },
            ensure_ascii=False,
        )
        for example in plan.examples
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "\n".join(lines) + "\n")
    write_atomically(_beside(out), yaml.safe_dump({"overrides": list(overrides)}))
    return len(lines)


def score_answers(answers: Path, prompts: Path | None, overrides: Sequence[str]) -> None:
    """Score the answers to exported prompts into a run folder.

    prompts: the exported file; None takes the one whose description lies beside the answers.

    Raises UsageError or MissingError where that cannot be told, or where an answer is missing or of no such prompt.
    """
    read_text(answers)
    made = _beside(prompts) if prompts is not None else _only_export(answers.resolve().parent)
    try:
        exported = [str(one) for one in yaml.safe_load(made.read_text())["overrides"]]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise MissingError(
            f"{made} does not tell how the prompts were made; keep it beside the file that semkv-bench export wrote"
        ) from error
    _check_prompts(answers, made.with_name(made.name.removesuffix(_ENDING) + ".jsonl"))
    path = override("engine.path", answers)
    sweep_once(compose_config("sweep", [*exported, "engine=answers", path, *overrides]))


def _check_prompts(answers: Path, prompts: Path) -> None:
    """Raise UsageError for an answer to no exported prompt, or to one of other content."""
    if not prompts.exists():
        return
    hashes = {row.get("id"): row.get("prompt_hash") for _, row in json_lines(prompts)}
    for number, row in json_lines(answers):
        name, where = row.get("id"), f"{answers}, line {number}"
        if isinstance(name, str) and name not in hashes:
            raise UsageError(f"{where}: {prompts.name} has no prompt {name}")
        if row.get("prompt_hash") not in (None, hashes.get(name)):
            raise UsageError(
                f"{where}: its prompt_hash is another than that of {name} in {prompts.name}; it answers another prompt"
            )


def _beside(prompts: Path) -> Path:
    return prompts.with_name(prompts.stem + _ENDING)


def _only_export(folder: Path) -> Path:
    found = sorted(folder.glob(f"*{_ENDING}"))
    if len(found) != 1:
        held = f"{len(found)} exports" if found else "no export"
        raise UsageError(f"{folder} holds {held}; name the prompts: prompts=FILE.jsonl")
    return found[0]
