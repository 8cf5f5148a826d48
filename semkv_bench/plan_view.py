"""A dry run in words: what a sweep would do and what its rows need."""

from rich.console import Console
from rich.table import Table

from semkv_bench.engine import row_bytes
from semkv_bench.plan import Plan, most_tokens

__all__ = ["show_plan"]


def show_plan(plan: Plan, console: Console) -> None:
    """Settings with their bits, examples per sub-task with their tokens, and the size of the rows."""
    settings = Table(title=f"{len(plan.settings)} settings of {plan.source.name}", title_justify="left")
    settings.add_column("setting", overflow="fold")
    for column in ("code bits", "effective bits", "compression"):
        settings.add_column(column, justify="right", no_wrap=True)
    for setting in plan.settings:
        cost = setting.storage(plan.shape.head_dim)
        settings.add_row(
            setting.name, f"{cost.code_bits:.3f}", f"{cost.effective_bits:.3f}", f"{cost.compression:.2f}x"
        )
    console.print(settings)
    tasks = Table(title=f"{len(plan.examples)} examples", title_justify="left")
    tasks.add_column("task", overflow="fold")
    for column in ("examples", "turns", "mean prompt tokens", "longest", "answer limit"):
        tasks.add_column(column, justify="right", no_wrap=True)
    for name in sorted({example.task for example in plan.examples}):
        mine = [example for example in plan.examples if example.task == name]
        lengths = [len(example.input_ids) for example in mine]
        limit = max(turn.max_new_tokens for example in mine for turn in (example, *example.follow_ups))
        turns = str(max(example.turns for example in mine))
        tasks.add_row(
            name, str(len(mine)), turns, f"{sum(lengths) / len(mine):.0f}", str(max(lengths)), str(limit)
        )
    console.print(tasks)
    longest = max(most_tokens(example, plan.runner.own_history) for example in plan.examples)
    layers = f"{len(plan.shape.quantized_layers)} of {plan.shape.layers} layers quantized"
    size = row_bytes(plan.shape, longest, 2) * len(plan.settings) / 2**30
    console.print(f"protocol {plan.runner.name}: {plan.runner.stores}", highlight=False)
    console.print(f"{layers}; cache rows of the longest prompt: {size:.2f} GiB in 16 bits", highlight=False)
