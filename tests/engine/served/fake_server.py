"""A small server that speaks llama.cpp's interface and lies as it is told: ``python fake_server.py PORT LIES...``."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, LIES = int(sys.argv[1]), sys.argv[2:]
TYPE = next((lie.removeprefix("type=") for lie in LIES if lie.startswith("type=")), "f16")
SAID = next((lie.removeprefix("says=") for lie in LIES if lie.startswith("says=")), TYPE)
BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
COUNT = {"requests": 0}


def answer(body: dict) -> dict:
    ids = body["prompt"]
    shift = 0 if TYPE == "f16" or "ignores" in LIES else round(16 - BITS[TYPE])
    tokens = [(sum(ids) + place + (shift > 8)) % 50 + 5 for place in range(body["n_predict"])]
    logprob = float("nan") if "nan" in LIES else -0.1 - 0.01 * shift
    top = [{"id": 7, "logprob": logprob}, {"id": 8, "logprob": -3.0}]
    return {
        "content": " ".join(map(str, tokens)),
        "tokens": tokens,
        "stop_type": "limit",
        "truncated": "truncates" in LIES,
        "tokens_evaluated": len(ids) - ("other" in LIES),
        "timings": {"cache_n": 5 if "cached" in LIES else 0},
        "completion_probabilities": [{"top_logprobs": top} for _ in tokens] if body.get("n_probs") else [],
    }


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._send(200, {"status": "ok"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            given = [int(word) for word in body["content"].split()]
            self._send(200, {"tokens": [*given, 3] if "retokenizes" in LIES else given})
            return
        COUNT["requests"] += 1
        if "busy" in LIES and COUNT["requests"] % 3:
            self._send(503, {"error": "loading"})
            return
        if "dies" in LIES and COUNT["requests"] > 3:
            sys.stdout.flush()
            import os

            os._exit(1)
        self._send(200, answer(body))

    def _send(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


mib = 100 * BITS[SAID] / 16
print(
    f"llama_kv_cache: size = {2 * mib:.2f} MiB ( 256 cells, 2 layers, 1/1 seqs), "
    f"K ({SAID}): {mib:.2f} MiB, V ({SAID}): {mib:.2f} MiB",
    flush=True,
)
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
