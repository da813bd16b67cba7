"""One seed for all, a tokenizer file, and a way to save models."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from cramming.model.export import SPECIAL_TOKENS, save_pretrained
from cramming.model.heads import MaskedLM


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers in every test, whatever ran before."""
    torch.manual_seed(7)


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A WordPiece tokenizer of about a hundred entries."""
    words = [*SPECIAL_TOKENS.values(), *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def save(tokenizer_file: Path) -> Callable[[MaskedLM, Path], None]:
    """`save(model, folder)`: save_pretrained with that tokenizer."""
    return lambda model, folder: save_pretrained(model, folder, tokenizer_file)
