"""Running, resuming and launching sweeps. Called, as ``semkv_bench.sweep(model, ...)``, it is ``python.sweep``."""

from semkv_bench.lazy import called

called(__name__, "semkv_bench.sweep.python")
