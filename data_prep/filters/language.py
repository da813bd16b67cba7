"""The language of a text: the optional package `py3langid` (Lui and Baldwin 2012), whose model comes in its wheel."""

import functools
from typing import Any

from cramming.config import UserError

JUDGED_CHARACTERS = 1000  # from the middle: titles and names stand at the beginning


def language_of(text: str) -> str:
    """The most likely language's code of ISO 639-1. UserError when the package is missing."""
    middle = max(0, (len(text) - JUDGED_CHARACTERS) // 2)
    return str(_identifier().classify(text[middle : middle + JUDGED_CHARACTERS])[0])


@functools.cache
def _identifier() -> Any:
    try:
        from py3langid import langid
    except ImportError:
        raise UserError(
            "data.filters.languages needs the package py3langid: pip install 'cramming[language]', or set it to null"
        ) from None
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)


def require_package() -> None:
    """UserError when the package is missing; for a check before any text is read."""
    _identifier()
