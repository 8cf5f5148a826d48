"""Is the model hub within reach? Asked once, so that a machine without network fails at once and not after retries."""

import os
import socket
from functools import lru_cache
from urllib.parse import urlsplit

from huggingface_hub import constants

__all__ = ["hub_reachable"]

_TIMEOUT_S = 5.0


@lru_cache(maxsize=1)
def hub_reachable() -> bool:
    """False where the hub is switched off (``HF_HUB_OFFLINE``) or takes no connection; a proxy counts as reach."""
    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    address = urlsplit(constants.ENDPOINT)
    try:
        with socket.create_connection((address.hostname, address.port or 443), timeout=_TIMEOUT_S):
            return True
    except OSError:
        return False
