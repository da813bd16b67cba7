"""The file tokenizer_config.json, which describes a tokenizer.json to transformers. Imports no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def tokenizer_config(tokenizer_file: Path, special_tokens: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings; `special_tokens` maps transformers' names ("pad_token") to entries.

    `AutoTokenizer` takes the normaliser of tokenizer.json as it is. `BertTokenizer` builds one from these settings, and
    lower-cases where they are missing.
    """
    normalizer = json.loads(tokenizer_file.read_text(encoding="utf-8")).get("normalizer") or {}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "do_lower_case": False,
        **special_tokens,
    }
    for step in normalizer.get("normalizers", [normalizer]):
        if step.get("type") == "Lowercase":
            settings["do_lower_case"] = True
        elif step.get("type") == "BertNormalizer":
            settings["do_lower_case"] = step["lowercase"]
            settings["strip_accents"] = step["strip_accents"]
            settings["tokenize_chinese_chars"] = step["handle_chinese_chars"]
    return settings
