"""A small server that speaks llama.cpp's interface and OpenAI's, as vLLM does, and lies as it is told.

``python fake_server.py PORT [type=TYPE] [LIES...]``
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT, LIES = int(sys.argv[1]), sys.argv[2:]
TYPE = next((lie.removeprefix("type=") for lie in LIES if lie.startswith("type=")), "f16")
SAID = next((lie.removeprefix("says=") for lie in LIES if lie.startswith("says=")), TYPE)
BITS = {"f16": 16.0, "bfloat16": 16.0, "auto": 16.0, "q8_0": 8.5, "fp8": 8.0, "fp8_e4m3": 8.0, "q4_0": 4.5}
BITS["turboquant_4bit_nc"] = 4.1875
# A file that is there once this server, or an earlier one, has died.
DIED = next((Path(lie.removeprefix("dies_once=")) for lie in LIES if lie.startswith("dies_once=")), None)
COUNT = {"requests": 0}


def told(ids: list[int], count: int) -> tuple[list[int], list[dict]]:
    """Tokens, and for each the likeliest ones; both change with the bits unless that is lied about."""
    shift = 0 if "ignores" in LIES else round(16 - BITS[TYPE])
    tokens = [(sum(ids) + place + (shift > 8)) % 50 + 5 for place in range(count)]
    logprob = float("nan") if "nan" in LIES else -0.1 - 0.01 * shift
    return tokens, [{7: logprob, 8: -3.0}] * count


def answer(body: dict) -> dict:
    ids = body["prompt"]
    tokens, top = told(ids, body["n_predict"])
    listed = [{"top_logprobs": [{"id": i, "logprob": p} for i, p in each.items()]} for each in top]
    return {
        "content": " ".join(map(str, tokens)),
        "tokens": tokens,
        "stop_type": "limit",
        "truncated": "truncates" in LIES,
        "tokens_evaluated": len(ids) - ("other" in LIES),
        "timings": {"cache_n": 5 if "cached" in LIES else 0},
        "completion_probabilities": listed if body.get("n_probs") else [],
    }


def openai_answer(body: dict) -> dict:
    prompt = body["prompt"]
    ids = [int(word) for word in prompt.split()] if isinstance(prompt, str) else prompt
    tokens, top = told(ids, body["max_tokens"])
    choice = {"text": " ".join(map(str, tokens)), "finish_reason": "length", "truncated": "truncates" in LIES}
    if body.get("return_token_ids"):
        choice["token_ids"] = tokens
    if body.get("logprobs"):
        choice["logprobs"] = {"top_logprobs": [{str(i): p for i, p in each.items()} for each in top]}
    usage = {"prompt_tokens": len(ids) - ("other" in LIES)}
    usage["prompt_tokens_details"] = {"cached_tokens": 5 if "cached" in LIES else 0}
    return {"choices": [] if "hollow" in LIES else [choice], "usage": usage}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/metrics":
            name = SAID if "mute" not in LIES else ""
            self._send(200, f'vllm:cache_config_info{{block_size="16",cache_dtype="{name}"}} 1.0\n')
        elif self.path == "/v1/models":
            self._send(200, {"data": [{"id": "m"}]})
        else:
            self._send(200, {"status": "ok", "version": "9.9"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            if not body.get("content", body.get("prompt")).replace(" ", "").isdigit():
                self._send(404, {"error": "words are not known here"})
                return
            given = [int(word) for word in body.get("content", body.get("prompt")).split()]
            self._send(200, {"tokens": [*given, 3] if "retokenizes" in LIES else given})
            return
        COUNT["requests"] += 1
        if "words_only" in LIES and not isinstance(body["prompt"], str):
            self._send(400, {"error": "prompt must be a string"})
            return
        for lie, status in (("busy", 503), ("limits", 429)):
            if lie in LIES and COUNT["requests"] % 3:
                self._send(status, {"error": "later"})
                return
        if "drops" in LIES and COUNT["requests"] % 3:
            self.close_connection = True
            self.connection.close()
            return
        if DIED is not None and not DIED.exists() and COUNT["requests"] > 3:
            DIED.touch()
            os._exit(1)
        if "dies" in LIES and COUNT["requests"] > 3:
            os._exit(1)
        self._send(200, openai_answer(body) if self.path.startswith("/v1/") else answer(body))

    def _send(self, status, content):
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
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
room = 1000 if "no_room" in LIES else round(1000 * 16 / BITS[TYPE])
print(f"GPU KV cache size: {room:,} tokens", flush=True)
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
