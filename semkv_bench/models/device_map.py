"""Where a model's layers go: checks of ``model.device_map`` before any weight is read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from semkv_bench.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["check_device_map", "check_devices_present", "check_modules", "input_device", "spread"]

_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_CHOICES = (
    "null, auto, balanced, balanced_low_0, sequential, cpu, cuda, cuda:1, a GPU's number, or {module: device}"
)


def check_device_map(device_map: Any) -> None:
    """Raise UsageError unless ``device_map`` is one that transformers understands."""
    if (isinstance(device_map, str) and device_map in _STRATEGIES) or device_map is None:
        return
    if isinstance(device_map, Mapping):
        wrong = [name for name in device_map if not isinstance(name, str)]
        wrong += [place for place in device_map.values() if place != "disk" and not _is_device(place)]
        if wrong or not device_map:
            what = f"holds {wrong[0]!r}" if wrong else "is empty"
            raise UsageError(
                f"model.device_map {what}; it takes module names, each with a device or disk, for example "
                "model.device_map={'': 'cuda:0'}"
            )
        return
    if not _is_device(device_map):
        raise UsageError(f"model.device_map={device_map} is not one of {_CHOICES}")


def check_devices_present(device_map: Any) -> None:
    """Raise UsageError if ``device_map`` names a device that this machine does not have."""
    import torch

    places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    for place in places:
        if place is None or place == "disk" or place in _STRATEGIES:
            continue
        device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
        count = _count(device.type)
        if (device.index or 0) >= count:
            raise UsageError(
                f"model.device_map={device_map}: this machine has {count or 'no'} {device.type} device"
                f"{'s' if count > 1 else ''}; semkv-bench doctor tells what it has"
            )


def check_modules(device_map: Any, model: "torch.nn.Module") -> None:
    """Raise UsageError if a device map by module names others than ``model`` has, or leaves weights out.

    model: of the same architecture; its weights may be on the meta device.
    """
    if not isinstance(device_map, Mapping):
        return
    names = {name for name, _ in model.named_modules()}
    if strange := sorted(set(device_map) - names):
        tops = ", ".join(name for name, _ in model.named_children())
        raise UsageError(f"model.device_map: the model has no module {strange[0]!r} (it begins with {tops})")
    left = [
        name
        for name, _ in model.named_parameters()
        if not any(key == "" or name == key or name.startswith(f"{key}.") for key in device_map)
    ]
    if left:
        raise UsageError(f"model.device_map gives no device to {left[0]} and {len(left) - 1} more weights")


def spread(device_map: Any) -> bool:
    """May ``device_map`` put layers on several devices?"""
    return isinstance(device_map, Mapping) or (isinstance(device_map, str) and device_map in _STRATEGIES)


def input_device(model: "torch.nn.Module") -> "torch.device":
    """Device that takes the token ids, also where the embedding's weights are offloaded."""
    import torch

    embedding = model.get_input_embeddings()
    if embedding.weight.device.type != "meta":
        return embedding.weight.device
    hook = getattr(embedding, "_hf_hook", None)
    for candidate in getattr(hook, "hooks", [hook]):
        place = getattr(candidate, "execution_device", None)
        if place is not None:
            return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    return torch.device("cpu")


def _is_device(place: Any) -> bool:
    if isinstance(place, bool):
        return False
    if isinstance(place, int):
        return place >= 0
    import torch

    try:
        return torch.device(place).type in _DEVICES
    except (RuntimeError, TypeError):
        return False


def _count(kind: str) -> int:
    if kind == "cpu":
        return 1
    import torch

    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = getattr(torch, kind, None)
    return module.device_count() if module is not None and module.is_available() else 0
