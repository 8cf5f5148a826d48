"""``python llamacpp_child.py JSON``: the packaged llama.cpp server, until a signal comes."""

import json
import signal
import sys

import xllamacpp

__all__ = ["main"]


def main(options: dict) -> None:
    """Serve a GGUF file: model, port, cells (tokens of all slots), slots, keys and values (cache types), threads."""
    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.port = options["port"]
    params.n_ctx = options["cells"]
    params.n_parallel = options["slots"]
    params.cache_type_k = _type(options["keys"])
    params.cache_type_v = _type(options["values"])
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.ctx_shift = False
    params.warmup = False
    # The line that tells how the cache is stored is printed from this level on.
    params.verbosity = 4
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


def _type(name: str) -> xllamacpp.ggml_type:
    return getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
