"""Writes docs/fields.md: every field of a record and of report.json, from the code that makes them."""

import inspect
import sys
import types
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path

from semkv_bench.stats.result import Report

PAGE = Path(__file__).resolve().parents[1] / "docs" / "fields.md"

RECORD = {
    "task, example_id, seed, turn": "what was asked: together with `setting`, one row each",
    "turns": "how many questions the example has",
    "setting": "`full`, or what is compared with it; the fields from `kind` to `options` say the same apart",
    "kind": "`full`, `uniform`, `mixed`, `prune`, `evict` or `format`",
    "family": "the quantizer without its options",
    "levels": "level count of a uniform setting",
    "high, low, fraction": "of a mix: level counts, and the share of tokens at `high`",
    "keep": "of a deletion: the share that stays",
    "metric, scope": "what ranks the tokens, and whether per layer or for all layers alike",
    "options": "options of the quantizer that are not at their defaults",
    "quantizer": "the quantizer with its options",
    "model, model_revision": "label and revision of the model",
    "protocol": "what is coded when: `prefill`, `generation`, `multiturn`, `engine`, ...",
    "cluster": "what questions share: a document, a haystack; rows of one cluster are not independent",
    "prompts": "whose wording: `generated`, `own`, `official`",
    "prompt_hash": "of the token ids that are fed; the key of `prompts-*.jsonl`",
    "answers_hash": "of the expected answers",
    "truncated": "was the prompt cut to `max_prompt_tokens`?",
    "depths": "where in the prompt the needles stand, 0 to 1",
    "task_length": "of a task with several lengths: tokens that the prompt was made for",
    "perturb": "of a prompt that was changed: `typo`, `case` or `punctuation`",
    "prompt_tokens": "tokens that the cache held before the answer",
    "look": "of a sequential run: the stage the example belongs to",
    "code_bits": "log2 of the levels, per value",
    "packed_bits": "bits of a packed code, per value",
    "effective_bits": "packed bits and metadata of a coded value",
    "cache_bits, key_cache_bits, value_cache_bits": "bits per value of the whole cache at the end of the answer: "
    "what is coded, what is kept in 16 bits, what is still open, nothing for what is deleted",
    "read_bits": "bits per value that a decode step reads on average, of settings that read only some blocks",
    "cache_bytes": "the same in bytes",
    "token_layers": "tokens times layers by state: `coded`, `kept`, `open`, `deleted`; keys and values are a half each",
    "coded_share": "share of the token-layers that are coded",
    "score": "0 to 1, by the task's scorer",
    "prediction": "the answer's text",
    "new_tokens": "its length in tokens, the end token included",
    "runaway, loop": "did it run to its limit in repetition; does it repeat itself",
    "kl, kl_first": "KL divergence from `full` over the reference answer, mean and first token, in nats",
    "top1_agreement": "share of the reference answer's tokens on which the most likely token is that of `full`",
    "nll": "of tasks that are scored by it: mean negative log-likelihood, in nats",
    "agreement": "share of the answer that equals that of `full`, token by token",
    "parted_at, parted_by": "where and how it parts: another `token`, or an `end`",
    "quantized_reads": "token-layers in coded state that attention read",
    "batch_rows": "rows that were decoded together",
    "alone_score, alone_same_tokens, alone_kl": "of `full`, on some examples: the same run alone, the engine's noise",
    "charter": "hash of the protocol that the run fixed beforehand",
    "of_unit": "of examples under a part of the settings, because others were added or had left: how many they are",
}


def page() -> str:
    """The whole page."""
    lines = [
        "# Fields of records and of report.json",
        "",
        "A run folder holds `records-*.jsonl`, an object for every answer. An absent value is null, never zero: an "
        "engine that tells no probabilities has no `kl`. Fields that do not apply to a run may be missing.",
        "",
        "| field | meaning |",
        "|---|---|",
        *(
            f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {text} |"
            for names, text in RECORD.items()
        ),
        "",
        "`semkv_bench.read_records(run)` gives them as a data frame. Files of scores made elsewhere need `task`, "
        "`example_id`, `setting`, `code_bits` and `score` ([import.md](import.md)).",
        "",
        "## report.json",
        "",
        "`semkv_bench.report(run)` returns it as dataclasses, whose fields these are; "
        "[report.schema.json](report.schema.json) is the schema. `Ends` are the two ends of an interval.",
        "",
    ]
    for kind in _kinds(Report):
        lines += [f"### {kind.__name__}", "", _plain(kind), "", "| field | type |", "|---|---|"]
        hints = typing.get_type_hints(kind, vars(sys.modules[kind.__module__]))
        lines += [f"| `{f.name}` | {_type(hints[f.name])} |" for f in fields(kind)]
        lines += [""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _kinds(kind: type) -> list[type]:
    """``kind`` and the dataclasses that its fields hold, each once, in order."""
    found = [kind]
    for each in found:
        for hint in typing.get_type_hints(each, vars(sys.modules[each.__module__])).values():
            found += [k for k in _inner(hint) if is_dataclass(k) and k not in found]
    return list(dict.fromkeys(found))


def _inner(hint: object) -> list[type]:
    parts = typing.get_args(hint)
    return [k for part in parts for k in _inner(part)] if parts else [hint]


def _type(hint: object) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        null = " or null" if len(parts) < len(typing.get_args(hint)) else ""
        return " or ".join(_type(part) for part in parts) + null
    if typing.get_origin(hint) is tuple:
        first, *rest = typing.get_args(hint)
        return f"list of {_type(first)}" if rest == [Ellipsis] else "two ends"
    if typing.get_origin(hint) is dict:
        return f"object of {_type(typing.get_args(hint)[1])}"
    name = getattr(hint, "__name__", str(hint))
    return f"[{name}](#{name.lower()})" if is_dataclass(hint) else f"`{name}`"


def _plain(kind: type) -> str:
    return " ".join(inspect.cleandoc(kind.__doc__ or "").replace("``", "`").split())


if __name__ == "__main__":
    PAGE.write_text(page())
