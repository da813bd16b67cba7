"""Sentence embeddings from an exported model, with sentence-transformers.

    pip install 'sentence-transformers[train]>=6'
    cramming export --name first
    python docs/sentence_embeddings.py runs/first/export --pairs pairs.tsv --out embedder

Every line of `pairs.tsv` holds two texts of like meaning, between them a tab. A text's embedding is pooled from its
token vectors as the folder says. It is trained so that each text is nearer to its partner than to the other partners
in the batch (`MultipleNegativesRankingLoss`). Without `--pairs` a handful of pairs shows that it runs.
"""

import argparse
import tempfile
from pathlib import Path

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

EXAMPLES = [
    ("The cat sleeps on the sofa.", "A cat is lying on the couch."),
    ("He bought a new car.", "He has purchased an automobile."),
    ("It is raining in the city.", "The town has wet weather."),
    ("She wrote a long letter.", "A lengthy letter was written by her."),
    ("The train was late.", "The train did not arrive on time."),
    ("They are playing football.", "A game of soccer is going on."),
    ("The soup is too hot.", "This soup will burn your tongue."),
    ("The museum opens at nine.", "You can visit the museum from nine o'clock."),
]


def main() -> None:
    arguments = parse()
    # The folder's own code computes what transformers lacks; for other architectures there is none to run.
    model = SentenceTransformer(
        str(arguments.folder), trust_remote_code=True, device=arguments.device
    )
    pairs = read(arguments.pairs) if arguments.pairs else EXAMPLES
    before = found_first(model, pairs)
    with tempfile.TemporaryDirectory() as scratch:
        settings = SentenceTransformerTrainingArguments(
            output_dir=scratch,
            num_train_epochs=arguments.epochs,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=arguments.learning_rate,
            warmup_steps=0.1,  # a share of all steps
            use_cpu=arguments.device == "cpu",
            save_strategy="no",
            report_to="none",
        )
        first, second = zip(*pairs)
        data = Dataset.from_dict({"anchor": list(first), "positive": list(second)})
        SentenceTransformerTrainer(
            model, settings, data, loss=MultipleNegativesRankingLoss(model)
        ).train()
    print(
        f"texts nearest to their partner: {before:.0%} before, {found_first(model, pairs):.0%} after"
    )
    model.save_pretrained(str(arguments.out))
    again = SentenceTransformer(str(arguments.out), trust_remote_code=True, device=arguments.device)
    vectors = again.encode([first[0], second[0], second[1]])
    print(
        f"{arguments.out}: {vectors.shape[1]} numbers a text; similarities {again.similarity(vectors, vectors)[0]}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train sentence embeddings on an exported model.")
    parser.add_argument("folder", type=Path, help="what `cramming export` wrote")
    parser.add_argument("--pairs", type=Path, help="text, tab, text of like meaning, per line")
    parser.add_argument("--out", type=Path, default=Path("embedder"))
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--device", help="cpu, cuda; the best there is if not given")
    return parser.parse_args()


def read(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = [tuple(line.split("\t")) for line in lines if line.strip()]
    if wrong := next((n for n, pair in enumerate(pairs, 1) if len(pair) != 2), None):
        raise SystemExit(f"{path}: pair {wrong} is not two texts with a tab between them")
    return [(first, second) for first, second in pairs]


def found_first(model: SentenceTransformer, pairs: list[tuple[str, str]]) -> float:
    """Share of the first texts whose partner is the most similar of all second texts."""
    first, second = (model.encode(list(texts), show_progress_bar=False) for texts in zip(*pairs))
    nearest = model.similarity(first, second).argmax(dim=1).tolist()
    return sum(place == best for place, best in enumerate(nearest)) / len(pairs)


if __name__ == "__main__":
    main()
