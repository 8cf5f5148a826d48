"""How far quantizers move cached keys and values: relative squared error by levels, on the embedded small model.

Reconstruction error ranks quantizers wrongly where quality is concerned and nothing is chosen by it; the figure
shows what kind of data they meet. ``python scripts/cache_distortion.py`` writes docs/figures/cache_distortion.png
and results/small/cache_distortion.json.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import torch

from semkv_bench.engine.engine import Engine
from semkv_bench.models.device import describe
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.quantizers import Affine, TurboQuant
from semkv_bench.tasks import Synthetic

LEVELS = [2, 3, 4, 5, 6, 7, 8, 12, 16]
SIDES = ("keys", "values")


@torch.inference_mode()
def distortion(engine: Engine, quantizers: dict, prompts: int) -> dict[str, dict[str, list[float]]]:
    """Sum of squared errors over sum of squares, by quantizer and side, one number per level count."""
    examples = Synthetic(subset="niah_prose").examples(engine.loaded.tokenizer, [0], per_task=prompts)
    levels = torch.tensor(LEVELS)[:, None]
    error = {
        name: {side: torch.zeros(len(LEVELS), dtype=torch.float64) for side in SIDES} for name in quantizers
    }
    power = dict.fromkeys(SIDES, 0.0)
    for example in examples:
        prompt = engine.prefill(example.input_ids[:-1]).cache
        for index, layer in enumerate(prompt.layers):
            for side, (name, stored) in enumerate(zip(SIDES, layer.stored(), strict=True)):
                x = stored[0].double()
                power[name] += x.square().sum().item()
                for label, quantizer in quantizers.items():
                    coder = quantizer.coder(x.shape[-1], seed=2 * index + side)
                    found = coder.quantize_dequantize(stored[0], levels).double()
                    error[label][name] += (found - x).square().sum(dim=(1, 2, 3))
    return {
        label: {side: (total / power[side]).tolist() for side, total in sides.items()}
        for label, sides in error.items()
    }


def draw(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Error against code bits, a panel for keys and one for values."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bits = torch.tensor(LEVELS, dtype=torch.float64).log2().tolist()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for axis, side in zip(axes, SIDES, strict=True):
        for (label, sides), colour, marker in zip(found.items(), ("#0072B2", "#D55E00"), "os", strict=True):
            axis.semilogy(bits, sides[side], color=colour, marker=marker, label=label)
        axis.set(title=f"cached {side}", xlabel="code bits per value, log2(L)")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("squared error / sum of squares")
    axes[1].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/cache_distortion.png"))
    parser.add_argument("--out", type=Path, default=Path("results/small/cache_distortion.json"))
    arguments = parser.parse_args()
    loaded = EmbeddedModel().load()
    quantizers = {"affine": Affine(), "TurboQuant": TurboQuant()}
    found = distortion(Engine(loaded), quantizers, arguments.prompts)
    draw(found, arguments.figure)
    outcome = {
        "what": "relative squared error of cached keys and values, all layers",
        "model": loaded.label,
        "prompts": arguments.prompts,
        "levels": LEVELS,
        "distortion": found,
        "machine": describe(loaded.device),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
