"""What a table of records must hold: its columns, and the words that stand in them."""

__all__ = ["COLUMNS", "EXAMPLE", "KINDS", "NEEDED", "PLACE", "REFERENCE", "UNIT", "Unit", "plain_name"]


KINDS = ("full", "uniform", "mixed", "prune", "read")


REFERENCE = "full"


EXAMPLE = ["task", "example_id", "seed"]  # what is recorded together


Unit = tuple[str, str, int]  # an example's own


UNIT = [*EXAMPLE, "turn"]


PLACE = ("record_file", "record_line")  # columns by which the records of a run folder say where they stand


NEEDED = ("task", "example_id", "setting", "code_bits", "score")


COLUMNS = (
    *NEEDED,
    "seed",
    "turn",
    "cluster",
    "model",
    "protocol",
    "quantizer",
    "kind",
    "packed_bits",
    "effective_bits",
    "cache_bits",
    "read_bits",
    "kl",
    "top1_agreement",
    "agreement",
    "nll",
    "runaway",
    "prediction",
    "new_tokens",
    "prompt_hash",
)


def plain_name(name: object) -> str:
    """A column's name as the schema spells it."""
    return str(name).strip().lower().replace(" ", "_").replace("-", "_")
