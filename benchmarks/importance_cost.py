"""What importance metrics cost on top of the prefill that they are collected in, and how exact the fast head is.

Every round runs, in this process and in turn, the stock prefill of transformers (with the last token's logits
only, as ``generate`` does it, and with all logits, as a plain forward call does it), the engine's prefill, and
the engine's prefill under each metric. A cost is the time spent in the metric over the time of the prefill around
it, of the same pass, so that other load on the machine falls on both; the median over passes counts. The
cost by wall clock (observed passes less unobserved ones) is given beside it. Passes during which other
processes took more than a twentieth of the machine are left out where three undisturbed ones are there.
On a machine that others use too, run it as ``OMP_WAIT_POLICY=passive python benchmarks/importance_cost.py``: threads
that wait for each other by spinning lose whole time slices there, observed or not.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import DynamicCache

from semkv_bench.engine.engine import Engine
from semkv_bench.importance import choices, metric, observe
from semkv_bench.importance.base import Recorder
from semkv_bench.models.device import describe
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.models.load import LoadedModel
from semkv_bench.settings.allocation import top_tokens
from semkv_bench.tasks import Synthetic

LIMITS = {"attention_received": 0.60, "all": 0.80}  # shares of the stock prefill
LIMIT = 0.10
DISTURBED = 0.05  # share of the machine taken by others
FLOAT32 = "surprisal, float32 product"


class Clock:
    """Seconds spent in recorders."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time every event and every ``scores`` of all recorders."""
        families = Recorder.__subclasses__()
        originals = [
            (family, name, getattr(family, name)) for family in families for name in ("hear", "scores")
        ]
        try:
            for family, name, original in originals:
                setattr(family, name, self._timed(original))
            yield
        finally:
            for family, name, original in originals:
                setattr(family, name, original)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


@dataclass(frozen=True)
class Pass:
    """One timed prefill: seconds in all, seconds in metrics, and the machine's share that others took."""

    seconds: float
    inside: float
    others: float

    @property
    def share(self) -> float:
        """Time in metrics over the time of the prefill around them."""
        return self.inside / (self.seconds - self.inside)


def timed(run: Callable[[], Any]) -> Pass:
    """Run once under the clock."""
    clock, own = Clock(), psutil.Process()
    with clock.running():
        machine_before, own_before, start = (
            busy(psutil.cpu_times()),
            busy(own.cpu_times()),
            time.perf_counter(),
        )
        run()
        seconds = time.perf_counter() - start
        others = busy(psutil.cpu_times()) - machine_before - (busy(own.cpu_times()) - own_before)
    return Pass(seconds, clock.seconds, max(0.0, others) / (seconds * psutil.cpu_count()))


def busy(times: Any) -> float:
    """Seconds of processor time, the hypervisor's other guests included."""
    return sum(getattr(times, name, 0.0) for name in ("user", "system", "nice", "irq", "softirq", "steal"))


@torch.inference_mode()
def stock(loaded: LoadedModel, ids: list[int], logits_to_keep: int) -> None:
    """A prefill by transformers alone; ``logits_to_keep=0`` computes all logits."""
    cache = DynamicCache(config=loaded.model.config)
    given = torch.tensor([ids], device=loaded.device)
    loaded.model(
        input_ids=given, use_cache=True, logits_to_keep=logits_to_keep, **{loaded.cache_keyword: cache}
    )


def observed(engine: Engine, ids: list[int], metrics: list[str], dtype: torch.dtype | None = None) -> None:
    """The engine's prefill and its scores."""
    with observe(engine.loaded, metrics, tokens=len(ids), logits_dtype=dtype) as observer:
        engine.prefill(ids)
    observer.scores()


def measure(loaded: LoadedModel, ids: list[int], rounds: int) -> dict[str, Any]:
    """Costs over ``rounds`` rounds, after a warm-up of each kind of pass."""
    engine = Engine(loaded)
    bases: dict[str, Callable[[], None]] = {
        "stock": partial(stock, loaded, ids, 1),
        "stock_all_logits": partial(stock, loaded, ids, 0),
        "engine": partial(engine.prefill, ids),
    }
    followed = [name for name in choices() if not metric(name).replays]
    runs = {name: partial(observed, engine, ids, [name]) for name in followed}
    runs["all"] = partial(observed, engine, ids, followed)
    runs[FLOAT32] = partial(observed, engine, ids, ["surprisal"], torch.float32)
    for run in (*bases.values(), runs["all"]):
        run()
    passes: dict[str, list[Pass]] = {name: [] for name in (*bases, *runs)}
    for number in range(1, rounds + 1):
        for index, (name, run) in enumerate(runs.items()):
            if index % 6 == 0:
                for base, base_run in bases.items():
                    passes[base].append(timed(base_run))
            passes[name].append(timed(run))
        print(
            f"round {number}: " + ", ".join(f"{name} {passes[name][-1].share:.3f}" for name in runs),
            flush=True,
        )
    return summary(passes, list(bases), list(runs))


def summary(passes: dict[str, list[Pass]], bases: list[str], runs: list[str]) -> dict[str, Any]:
    """Medians, rounded to three places."""
    used = {name: undisturbed(made) for name, made in passes.items()}
    seconds = {name: statistics.median(one.seconds for one in made) for name, made in used.items()}
    metrics = {}
    for name in runs:
        shares = [one.share for one in used[name]]
        share = statistics.median(shares)
        metrics[name] = {
            "share": round(share, 3),
            "share_lowest_highest": [round(min(shares), 3), round(max(shares), 3)],
            "by_wall_clock": {
                f"of_{base}": round((seconds[name] - seconds["engine"]) / seconds[base], 3) for base in bases
            },
            "passes": len(passes[name]),
            "undisturbed": sum(one.others <= DISTURBED for one in passes[name]),
        }
        if name != FLOAT32:
            metrics[name]["limit"] = LIMITS.get(name, LIMIT)
            metrics[name]["within_limit"] = share <= LIMITS.get(name, LIMIT)
    others = statistics.median(one.others for made in passes.values() for one in made)
    return {
        "prefill_seconds": {name: round(seconds[name], 2) for name in bases},
        "machine_taken_by_others": round(others, 2),
        "metrics": metrics,
    }


def undisturbed(passes: list[Pass]) -> list[Pass]:
    """The passes that had the machine to themselves, or all where there are fewer than three of them."""
    quiet = [one for one in passes if one.others <= DISTURBED]
    return quiet if len(quiet) >= 3 else passes


def exactness(loaded: LoadedModel, ids: list[int]) -> dict[str, Any]:
    """Surprisal and entropy by the product that this machine chooses against the float32 product."""
    names = ["surprisal", "logit_entropy"]
    results = []
    for dtype in (None, torch.float32):
        with observe(loaded, names, tokens=len(ids), logits_dtype=dtype) as observer:
            Engine(loaded).prefill(ids)
        results.append(observer.scores())
    errors = {}
    for name in names:
        fast, exact = (scores[name][0] for scores in results)
        kept = (top_tokens(fast, 0.25) & top_tokens(exact, 0.25)).sum() / top_tokens(exact, 0.25).sum()
        ranks = torch.stack([scores.argsort().argsort().double() for scores in (fast, exact)])
        errors[name] = {
            "mean_nats": round(exact.mean().item(), 4),
            "mean_error_nats": round((fast - exact).abs().mean().item(), 5),
            "largest_error_nats": round((fast - exact).abs().max().item(), 4),
            "rank_correlation": round(torch.corrcoef(ranks)[0, 1].item(), 5),
            "same_tokens_in_top_quarter": round(kept.item(), 4),
        }
    return errors


def main() -> None:
    """Measure and write the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/importance_cost.json"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    loaded = EmbeddedModel().load()
    examples = Synthetic(length=arguments.tokens + 100).examples(loaded.tokenizer, seeds=[0], per_task=1)
    ids = list(examples[-1].input_ids[: arguments.tokens])
    outcome = {
        "what": "time in importance metrics over the time of the prefill around them",
        "model": loaded.label,
        "prompt_tokens": len(ids),
        "rounds": arguments.rounds,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "machine": describe(loaded.device),
        "head_product_against_float32": exactness(loaded, ids),
        "threads": {},
    }
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        outcome["threads"][str(threads)] = measure(loaded, ids, arguments.rounds)
        arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")
    print(json.dumps(outcome, indent=1))


if __name__ == "__main__":
    main()
