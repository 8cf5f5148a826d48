"""The table of all commands."""

from semkv_bench.commands import here, reports, sweeps
from semkv_bench.commands.given import Command, Option

__all__ = ["COMMANDS", "options_of"]


def options_of(command: Command) -> tuple[Option, ...]:
    """All options of a command, with those that every command has."""
    composed = (Option(("--cfg",), "print the composed configuration and run nothing", ("job",)),)
    return (*command.options, *(composed if command.config else ()), *_EVERYWHERE)


_EVERYWHERE = (
    Option(("--conf",), "DIR adds groups and classes of your own: DIR/quantizer/mine.yaml is quantizer=mine"),
    Option(("-h", "--help"), "this text"),
)
_JSON = Option(("--json",), "print JSON")
_MULTIRUN = Option(
    ("-m", "--multirun"),
    "one sweep per combination of comma-separated choices, or per shard: sweep -m shard=1/2,2/2 out=DIR "
    "hydra/launcher=joblib hydra.launcher.n_jobs=2; launchers: basic, joblib, ray, submitit_local, submitit_slurm",
)

COMMANDS: dict[str, Command] = {
    "sweep": Command(
        sweeps.sweep,
        "run or resume a sweep",
        "model=smollm2 quantizer=affine task=synthetic",
        config="sweep",
        options=(_MULTIRUN,),
    ),
    "cliff-report": Command(
        reports.cliff_report,
        "statistics and report; runs=[DIR,DIR,...] sets cliffs side by side; import=FORMAT full=PATH NAME:BITS=PATH "
        "reads logs of lm-eval, kvpress, longbench, inspect, lighteval, opencompass, llama-perplexity",
        "[DIR | records=FILE | import=FORMAT full=PATH ...]",
        config="cliff_report",
        bare="run",
        renamed=(("model", "records_model"),),
    ),
    "compare": Command(
        reports.compare,
        "method against method at equal bits, over runs of one model, protocol and list of examples",
        "runs=[DIR,DIR]",
        config="compare",
    ),
    "export": Command(
        sweeps.export,
        "the prompts of a sweep as JSONL, for an engine without an adapter",
        "task=synthetic out=prompts.jsonl",
        config="sweep",
    ),
    "score": Command(
        sweeps.score,
        "answers to exported prompts, scored into a run folder",
        "ANSWERS.jsonl [prompts=FILE] out=RUN",
        config="sweep",
    ),
    "show": Command(
        reports.show,
        "examples with question, expected answer and the first difference from full precision; only=lost|won|changed",
        "run=DIR setting=affine-L4 [only=lost]",
        keys=("run", "setting", "only"),
        bare="run",
    ),
    "badge": Command(
        reports.badge,
        "a line for a model card: the cheapest safe cache with its evidence; --json for an endpoint of shields.io",
        "run=DIR",
        keys=("run",),
        options=(_JSON,),
        bare="run",
    ),
    "measure": Command(
        sweeps.measure,
        "bytes, speed and answers of a run's operating point in the packed cache, beside a plain one",
        "[DIR] [setting=NAME] [examples=8]",
        config="measure",
        options=(_JSON,),
        bare="run",
    ),
    "atlas": Command(
        reports.atlas,
        "one page and one JSON of models x methods: cliff, cheapest safe cache, n, date, from folders of runs",
        "runs=[DIR,DIR] [out=results/atlas]",
        keys=("runs", "out"),
        bare="runs",
    ),
    "calibrate": Command(
        sweeps.calibrate,
        "fit a method to a model on a text that is not the evaluation's; sweeps of both then find the file",
        "model=smollm2 quantizer=kvquant [text=FILE]",
        config="calibrate",
    ),
    "recipe": Command(
        sweeps.recipe,
        "the cliff, then mixes just above it",
        "model=smollm2 quantizer=affine",
        config="recipe",
    ),
    "search": Command(
        sweeps.search,
        "levels by layer and side under a budget, by KL on calibration prompts, then confirmed on fresh examples "
        "against uniform levels and KVTuner's pairs",
        "model=smollm2 quantizer=affine target_bits=3.0",
        config="search",
    ),
    "regress": Command(
        sweeps.regress,
        "did the cliff move since the baseline?",
        "[run=DIR]",
        config="regress",
        options=(_JSON, Option(("--update",), "write the baseline anew")),
    ),
    "storage": Command(
        sweeps.storage,
        "bits per value, cache bytes",
        "quantizer=affine grid.levels=[6,5]",
        config="storage",
        options=(_JSON,),
    ),
    "plan": Command(
        sweeps.plan,
        "prompts, memory, time of a sweep; loads no weights; on=[A100,H100,H200,MI300X,cpu] estimates it for these",
        "model=llama31 task=longbench",
        config="sweep",
        options=(Option(("--calibrate",), "time one example here, and keep that for estimates"), _JSON),
    ),
    "models": Command(
        here.models,
        "what can be loaded here: cache shape, files on this disk, the command that fetches the rest; asks no network",
        keys=("model", "model.path"),
        options=(_JSON,),
    ),
    "doctor": Command(
        here.doctor,
        "every check of this machine, with the command that mends what it finds; exit 3 if a sweep needs it",
        options=(_JSON,),
    ),
    "completion": Command(
        here.completion,
        'completion of commands, keys and choices in a shell: eval "$(semkv-bench completion bash)"',
        "bash|zsh",
    ),
}
