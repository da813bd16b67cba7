"""Whether the Hugging Face hub can be reached, asked once and at once.

Without a network the hub's clients retry for half a minute before they give up, and they do so per file. Here one
short connection attempt decides; without a connection they are switched to their offline mode, in which a data set or
model that is already in the cache still loads and anything else fails immediately.
"""

import os
import socket
from functools import cache
from urllib.parse import urlparse

TIMEOUT_SECONDS = 3.0


@cache
def prepare_hub() -> bool:
    """Switch the hub's clients to offline mode where there is no connection; whether there is one."""
    import huggingface_hub.constants as constants

    if constants.HF_HUB_OFFLINE:
        return False
    if _behind_proxy() or _answers(constants.ENDPOINT):
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    return False


def _behind_proxy() -> bool:
    return any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))


def _answers(endpoint: str) -> bool:
    address = urlparse(endpoint)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=TIMEOUT_SECONDS):
            return True
    except OSError:
        return False
