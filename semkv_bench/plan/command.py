"""The dry run as a command: a plan with what it needs and how long it may take."""

from collections.abc import Sequence

from omegaconf import DictConfig
from rich.console import Console

from semkv_bench.errors import MissingError, UsageError
from semkv_bench.plan.memory import Memory, estimate_memory, weights_of
from semkv_bench.plan.plan import Plan, make_plan
from semkv_bench.plan.roofline import Roofline, estimate_on
from semkv_bench.plan.storage import published_words
from semkv_bench.plan.timing import Duration, calibrate, estimate_time

__all__ = ["estimates"]


def estimates(
    config: DictConfig, console: Console, *, calibrated: bool = False, on: Sequence[str] = ()
) -> tuple[Plan, Memory | None, Duration | None, list[Roofline]]:
    """The plan of a sweep, its memory, its time where one like it was timed, and estimates for the accelerators ``on``.

    All are of rows that this process decodes; they are None or none for an engine with a server of its own.

    calibrated: time one example first, which loads the model; ``console`` says so meanwhile.

    Raises:
        MissingError: the model's configuration or tokenizer is not here; what is published of it is said.
        UsageError: it is to be timed, and does not fit or runs in an engine's own server.
    """
    try:
        plan = make_plan(config)
    except MissingError as error:
        raise MissingError(f"{error}{published_words(config.model)}") from error
    if not plan.engine.simulates:
        if calibrated:
            raise UsageError(
                f"--calibrate times engine=transformers, not engine={plan.engine.name}; leave it out"
            )
        return plan, None, None, []
    weights = weights_of(plan)
    memory = estimate_memory(plan, weights)
    if calibrated:
        if not memory.fits:
            raise UsageError(f"the model does not fit here: {memory.advice}")
        with console.status(f"timing {plan.source.name} on one example"):
            calibrate(plan, weights.parameters)
    rooflines = [estimate_on(plan, weights, name) for name in on]
    return plan, memory, estimate_time(plan, weights, memory.batch_rows, memory.store), rooflines
