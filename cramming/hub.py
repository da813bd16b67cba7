"""Check whether the Hugging Face hub can be reached.

Without a network the hub's clients retry for half a minute before they give up, and they do so per file. Here one
short request decides, through the user's proxies and endpoint.
"""

import os
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path

from cramming.config import UserError

MODEL_TEXTS = ("*.json", "*.txt", "*.model")
TIMEOUT_SECONDS = 5


def why_unreachable() -> str | None:
    """Return in one line why the hub cannot be reached, or None if it answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
            return None
    except urllib.error.HTTPError:  # any status is an answer
        return None
    except (OSError, ValueError) as error:  # ValueError: the endpoint is not a URL
        return one_line(getattr(error, "reason", error))


@cache
def prepare_hub() -> bool:
    """Return whether the hub can be reached, checked once; if not, switch its clients to their offline mode.

    In that mode the cache still loads, and everything else fails immediately.
    """
    import huggingface_hub.constants as constants

    if constants.HF_HUB_OFFLINE:
        return False
    if why_unreachable() is None:
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    return False


def download_model(name: str, setting: str) -> Path:
    """Return the hub's model of this name as a local folder; raise UserError about `setting` if it is not available."""
    online = prepare_hub()
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=[*MODEL_TEXTS, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            weights = [*MODEL_TEXTS, "pytorch_model*.bin"]
            folder = Path(snapshot_download(name, allow_patterns=weights))
    except (OSError, ValueError) as error:
        reason = "no connection to the hub, and not in the cache"
        if online:
            reason = " ".join(str(error).split())[:150]
        raise UserError(
            f"{setting}={name}: no such folder, and {reason}. Give a local model folder."
        ) from None
    return folder


def one_line(error: object) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
