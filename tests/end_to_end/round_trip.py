"""What a user does with an exported folder, where only torch and transformers are installed.

    python round_trip.py <folder> ...

For each folder: the logits of `expected.pt` (token ids, and what our own model computed for them), `pipeline`, twenty
steps of fine-tuning a classifier, the other heads, and the fine-tuned model saved and loaded again. Prints a line per
folder; a failure is an assertion. This program imports nothing of ours, and no test collects it.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

TEXTS = [
    "the cat sat on the mat",
    "a dog ran",
    "my cat is black and the sun is red",
    "the dog saw a red bird",
]


def main() -> None:
    for package in ("cramming", "data_prep", "eval", "hydra", "datasets"):
        assert importlib.util.find_spec(package) is None, (
            f"{package} can be imported: this place proves nothing"
        )
    for folder in map(Path, sys.argv[1:]):
        torch.manual_seed(0)
        told = {"trust_remote_code": True} if (folder / "hf_adapter.py").exists() else {}
        outcome = {
            "folder": folder.name,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }
        outcome["largest_difference"] = masked_lm(folder, told)
        outcome["fill_mask"] = fill_mask(folder, told)
        outcome["losses"] = fine_tune(folder, told)
        other_heads(folder, told)
        print(json.dumps(outcome), flush=True)


def masked_lm(folder: Path, told: dict[str, Any]) -> float:
    """Every weight finds its place, and the logits are those of our model."""
    model, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True, **told)
    assert (
        not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ), info
    expected = torch.load(folder / "expected.pt", weights_only=True)

    def difference(ids: torch.Tensor) -> float:
        with torch.no_grad():
            logits = model.eval()(input_ids=ids, attention_mask=expected["mask"]).logits
        return (logits - expected["logits"])[expected["mask"] == 1].abs().max().item()

    distance = difference(expected["ids"])
    assert distance < 1e-4, distance
    changed = expected["ids"].clone()
    changed[:, 0] = changed[:, 1]
    assert (
        difference(changed) > 1e-2
    )  # one other token in each row is seen: the comparison can fail
    return distance


def fill_mask(folder: Path, told: dict[str, Any]) -> str:
    fill = pipeline("fill-mask", model=str(folder), **told)
    text = f"the cat sat on the {fill.tokenizer.mask_token}"
    answers = fill(text)
    assert len(answers) == 5 and all(0 <= answer["score"] <= 1 for answer in answers)
    assert len(fill([text, f"a {fill.tokenizer.mask_token}"], batch_size=2)) == 2
    return str(answers[0]["token_str"])


def fine_tune(folder: Path, told: dict[str, Any]) -> list[float]:
    """Loss before and after twenty steps, and the same model after it was saved and loaded."""
    tokenizer = AutoTokenizer.from_pretrained(folder, **told)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, **told).train()
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    labels = torch.tensor([0, 1, 0, 2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        output = model(**inputs, labels=labels)
        assert output.logits.shape == (4, 3)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    assert losses[-1] < 0.7 * losses[0], losses
    saved = folder.parent / f"{folder.name}-classifier"
    model.eval().save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    reloaded = AutoModelForSequenceClassification.from_pretrained(saved, **told).eval()
    with torch.no_grad():
        assert torch.equal(reloaded(**inputs).logits, model(**inputs).logits)
    assert len(pipeline("text-classification", model=str(saved), **told)(TEXTS)) == 4
    return [losses[0], losses[-1]]


def other_heads(folder: Path, told: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, **told)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    width, places = (
        AutoModel.from_pretrained(folder, **told).config.hidden_size,
        inputs["input_ids"].shape,
    )
    with torch.no_grad():
        encoded = AutoModel.from_pretrained(folder, **told)(**inputs).last_hidden_state
        tagged = AutoModelForTokenClassification.from_pretrained(folder, num_labels=7, **told)(
            **inputs
        ).logits
        answers = AutoModelForQuestionAnswering.from_pretrained(folder, **told)(**inputs)
    assert encoded.shape == (*places, width) and tagged.shape == (*places, 7)
    assert answers.start_logits.shape == answers.end_logits.shape == places


if __name__ == "__main__":
    main()
