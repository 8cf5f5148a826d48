"""Run folders filled with planted records, as a sweep would fill them."""

from dataclasses import asdict

import numpy as np

from semkv_bench.plan.stages import arrange, described, stage_number
from semkv_bench.records.folder import RunFolder
from semkv_bench.stats import StatsOptions
from semkv_bench.sweep.interim import in_order, take_due_looks
from semkv_bench.tasks import Example

QUICK = ["per_task=4", "task.length=300", "max_new_tokens=3", "grid.levels=[16,4,2]", "stats.margin=0.3"]
GRID = {"full": 16.0, "L16": 4.0, "L8": 3.0, "L4": 2.0, "L2": 1.0}


def examples_of(per_task=100, tasks=("a", "b"), seeds=(0,), shared=False) -> list[Example]:
    """``shared``: every seed asks the same items, else each has items of its own."""
    return [
        Example(
            task,
            f"{'' if shared else f's{seed}-'}{i:03d}",
            seed,
            input_ids=(1, 2),
            answers=("x",),
            max_new_tokens=1,
        )
        for task in tasks
        for seed in seeds
        for i in range(per_task)
    ]


class Run:
    """A run folder that is filled with planted records as a sweep would fill it."""

    def __init__(self, path, looks=(120, 240), per_task=300, lost=0.4, **options):
        self.options = StatsOptions(looks=looks, resamples=100, **options)
        self.examples = examples_of(per_task)
        self.stages = arrange(self.examples, self.options)
        self.lost = lost
        settings = {name: {"code_bits": bits} for name, bits in GRID.items()}
        protocol = {
            **{"model": "m", "prompts": "own", "seeds": [0], "chance": {}, "settings": settings},
            "examples": {"count": len(self.examples)},
            "stats": {
                name: given for name, given in asdict(self.options).items() if given not in (None, False)
            },
            "looks": described(self.stages),
        }
        self.folder = RunFolder.open(path, protocol, "a: 1\n")

    def records(self, example) -> list[dict]:
        """Of the settings that the folder lacks, as a sweep would write them."""
        missing = self.folder.missing(example.unit, stage_number(self.stages, example))
        part = {} if len(missing) == len(GRID) else {"of_unit": len(missing)}
        return [{**r, **part} for r in self.all_records(example) if r["setting"] in missing]

    def all_records(self, example) -> list[dict]:
        """Nothing is lost down to L8; of L4 and L2 a share ``lost`` or more."""
        rng = np.random.default_rng(list("-".join(map(str, example.unit)).encode()))
        right, u = rng.random() < 0.9, rng.random()
        fails = {"L4": u < self.lost, "L2": u < 0.9}
        return [
            {
                **dict(zip(("task", "example_id", "seed"), example.unit, strict=True)),
                **{"turn": 0, "look": stage_number(self.stages, example), "setting": name},
                **{"kind": "full" if name == "full" else "uniform", "quantizer": "q", "code_bits": bits},
                **{"effective_bits": bits, "score": float(right and not fails.get(name, False))},
            }
            for name, bits in GRID.items()
        ]

    def sweep(self, most: int | None = None) -> int:
        """Run what is left, at most ``most`` examples; returns how many were run."""
        self.folder.start()
        ran = 0
        try:
            ended = take_due_looks(self.stages, self.folder)
            pending = [e for e in self.examples if e.unit not in self.folder.done]
            if ended or not pending:
                return 0
            for example in in_order(self.stages, self.folder, pending):
                self.folder.append(self.records(example))
                ran += 1
                if ran == most:
                    break
            return ran
        finally:
            self.folder.close()
