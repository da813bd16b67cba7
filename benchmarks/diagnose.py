"""Is the planted cause named first by `cramming diagnose`, and is nothing named where nothing is wrong?

    python benchmarks/diagnose.py --work <folder> --text <folder with text files> [--seed 1] [--out <file>]

Twelve ills are planted into small runs on the embedded corpus: by settings, by the text, or by a change of the code in
the child process that trains (`PLANTS`). Ten runs with other seeds, models, objectives and corpora are healthy; three
of them read real text (`--text`: wiki_core.00.txt.xz and novels_eltec.txt.xz). `SECOND` are eight more ills and
one more healthy run, made once the limits were set. `--seed` gives all of them other weights, batches and texts. A
corpus or run that is there already is used as it is, so the script can be started again for the diagnosis alone.
"""

import argparse
import codecs
import json
import lzma
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cramming import device as devices
from data_prep.synthetic.documents import documents

WORDS = 1_000_000  # of a planted text, as the embedded corpus has
WIKI_SHARDS, NOVEL_PARTS = 8, 7
STUCK_SCALE = 2.0**40
SMALL = ("model.hidden_size=128", "model.num_layers=3", "model.num_heads=4")
BERT = ("model=bert-base", *SMALL, "model.intermediate_size=512", "model.max_length=128")
CRAMMED = ("model=crammed-bert", *SMALL, "model.intermediate_size=256", "model.max_length=128")


@dataclass(frozen=True)
class Case:
    """A run: overrides of its corpus and of its training, what is planted, and the finding that must come first.

    `expected`: None for a healthy run. `plant`: a key of `PLANTS`. `seed` and `text_seed` count from `--seed`.
    """

    name: str
    expected: str | None
    corpus: tuple[str, ...] = ()
    training: tuple[str, ...] = ("budget.steps=400",)
    plant: str = ""
    seed: int = 0
    text_seed: int = 0


def text_case(name: str, expected: str | None, file: str, *training: str) -> Case:
    """Return a case that reads a text file of the work folder."""
    paths = f"data.paths=[texts/{file}]"
    return Case(name, expected, ("data=text", paths), ("budget.steps=400", *training))


ILLS = (
    text_case("repeated_lines", "repeated_text", "repeated.txt"),
    Case("wrong_tokenizer", "wrong_tokenizer", ("tokenizer.path=texts/rot13.json",)),
    Case("rate_x30", "rate_too_high", training=("budget.steps=400", "optim.lr=0.09")),
    Case("rate_100th", "rate_too_low", training=("budget.steps=400", "optim.lr=3e-5")),
    Case("masks_2_percent", "few_targets", training=("budget.steps=400", "objective.rate=0.02")),
    Case("shifted_labels", "shifted_labels", plant="shifted_labels"),
    Case("no_positions", "no_positions", training=("budget.steps=400", "model.positions=none")),
    Case(
        "fp16_stuck",
        "loss_scale_stuck",
        training=("budget.steps=400", "precision.mode=fp16"),
        plant="fp16_stuck",
    ),
    Case(
        "batch_of_one",
        "small_batch",
        training=("budget.steps=800", "train.batch_size=1", "train.micro_batch=1"),
    ),
    Case("tiny_vocabulary", "small_vocabulary", ("tokenizer.vocab_size=100",)),
    text_case("shuffled_words", "no_word_order", "shuffled.txt"),
    Case(
        "frozen_head",
        "frozen_parameters",
        training=("budget.steps=400", "model.tie_embeddings=false"),
        plant="frozen_head",
    ),
)
WIKI = (
    "data=text",
    "data.paths=[texts/wiki.txt]",
    "data.validation_fraction=0.03",
    "tokenizer.vocab_size=8192",
)
NOVELS = (
    "data=text",
    "data.paths=[texts/novels.txt]",
    "tokenizer=bpe",
    "tokenizer.vocab_size=4096",
)
HEALTHY = (
    Case("seed", None, seed=1),
    Case("other_text", None, seed=2, text_seed=5),
    Case("bert", None, training=("budget.steps=600", *BERT, "optim.lr=1e-3"), seed=3),
    Case("crammed", None, training=("budget.steps=400", *CRAMMED), seed=4),
    Case("muon", None, training=("budget.steps=400", "optim=muon"), seed=5),
    Case("all_mask", None, training=("budget.steps=400", "objective=mlm-allmask"), seed=6),
    Case(
        "constant_batch_32",
        None,
        training=(
            "budget.steps=400",
            "schedule=constant",
            "train.batch_size=32",
            "train.sequence_length=64",
            "optim=adamw",
            "optim.lr=2e-3",
            "train.packing=documents",
        ),
    ),
    Case("wiki", None, WIKI, ("budget.steps=700",), seed=7),
    Case("wiki_bert", None, WIKI, ("budget.steps=700", *BERT, "optim.lr=1e-3"), seed=8),
    Case(
        "novels_bpe",
        None,
        NOVELS,
        ("budget.steps=700", "train.batch_size=8", "train.micro_batch=8"),
    ),
)
# Runs that were made after the limits of eval/diagnose/findings.py had been set by those above.
SHORT, SHORTEST = "budget.steps=300", "budget.steps=100"
SECOND = (
    Case("second_rate_x30", "rate_too_high", WIKI, (SHORT, "optim.lr=0.09"), seed=11),
    Case("second_rate_100th", "rate_too_low", training=(SHORT, *BERT, "optim.lr=1e-5")),
    Case("second_frozen_block", "frozen_parameters", training=(SHORT, *BERT), plant="frozen_block"),
    Case(
        "second_shuffled_words",
        "no_word_order",
        ("data=text", "data.paths=[texts/wiki_shuffled.txt]", *WIKI[2:]),
        (SHORTEST,),
        seed=13,
    ),
    Case(
        "second_repeated_lines",
        "repeated_text",
        ("data=text", "data.paths=[texts/wiki_repeated.txt]", *WIKI[2:]),
        (SHORTEST,),
        seed=14,
    ),
    Case(
        "second_tiny_vocabulary",
        "small_vocabulary",
        (*WIKI[:3], "tokenizer.vocab_size=200"),
        (SHORTEST,),
    ),
    Case(
        "second_wrong_tokenizer",
        "wrong_tokenizer",
        (*WIKI[:3], "tokenizer.path=texts/embedded.json"),
        (SHORTEST,),
        seed=15,
    ),
    Case(
        "second_shifted_labels", "shifted_labels", training=(SHORT, *BERT), plant="shifted_labels"
    ),
    Case("second_cosine_short", None, WIKI, (SHORT, "schedule=cosine", "train.sequence_length=64")),
)
CASES = {case.name: case for case in (*ILLS, *HEALTHY, *SECOND)}

# Texts ------------------------------------------------------------------------------------------------------------


def write_texts(folder: Path, sources: Path | None, seed: int) -> None:
    """Write the planted texts, the wrong tokenizer and samples of real text, what of them is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)

    def embedded() -> Iterator[str]:
        return documents(seed, WORDS)

    makers: dict[str, Callable[[], str]] = {
        "repeated.txt": lambda: "\n\n".join(with_repeated_lines(embedded(), rng)),
        "shuffled.txt": lambda: "\n\n".join(shuffled(text, rng) for text in embedded()),
        "rot13.txt": lambda: "\n\n".join(codecs.encode(text, "rot13") for text in embedded()),
    }
    if sources is not None:
        shard = sources / f"wiki_core.0{seed % WIKI_SHARDS}.txt.xz"
        novels = sources / "novels_eltec.txt.xz"
        makers["wiki.txt"] = lambda: first_documents(shard, 500)
        makers["wiki_shuffled.txt"] = lambda: "\n\n".join(
            shuffled(text, rng) for text in wiki_documents(folder)
        )
        makers["wiki_repeated.txt"] = lambda: "\n\n".join(
            with_shared_lines(wiki_documents(folder), rng)
        )
        makers["novels.txt"] = lambda: part_of(novels, seed % NOVEL_PARTS, 8_000_000)
    for name, make in makers.items():
        path = folder / name
        if not path.exists():
            path.write_text(make(), encoding="utf-8")
    for name, words in (
        ("rot13", ["data=text", f"data.paths=[{folder / 'rot13.txt'}]"]),
        ("embedded", [f"data.seed={seed}"]),
    ):
        tokenizer = folder / f"{name}.json"
        if not tokenizer.exists():
            corpora = folder.parent / f"corpora_of_{name}"
            command(["prepare", f"--corpora={corpora}", *words], folder.parent)
            corpus = next(corpora.iterdir())
            tokenizer.write_bytes((corpus / "tokenizer.json").read_bytes())


def wiki_documents(folder: Path) -> list[str]:
    """Return the documents of the sample of Wikipedia."""
    return (folder / "wiki.txt").read_text(encoding="utf-8").split("\n\n")


def with_repeated_lines(texts: Any, rng: random.Random) -> list[str]:
    """Return documents in which three of five lines are one of ten lines that stand in all documents."""
    originals = list(islice(texts, 20_000))
    menu = [" ".join(text.split()[:25]) for text in originals[:10]]
    planted = []
    for text in originals:
        lines = [text]
        for _ in range(3):
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(menu))
        planted.append("\n".join(lines))
    return planted


def with_shared_lines(texts: list[str], rng: random.Random) -> list[str]:
    """Return documents of which each second line is followed by two of 40 lines that all share."""
    menu = [" ".join(text.split()[:30]) for text in texts[:40]]
    planted = []
    for text in texts:
        lines: list[str] = []
        for number, line in enumerate(text.split("\n")):
            lines.append(line)
            if number % 2:
                lines += rng.sample(menu, 2)
        planted.append("\n".join(lines))
    return planted


def shuffled(text: str, rng: random.Random) -> str:
    """Return a document with its words in random order."""
    words = text.split()
    rng.shuffle(words)
    return " ".join(words)


def first_documents(path: Path, count: int) -> str:
    """Return the first documents of a packed text file."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        texts = file.read(40 * 1024 * count).split("\n\n")
    return "\n\n".join(texts[:count])


def part_of(path: Path, number: int, characters: int) -> str:
    """Return a part of a packed text file; part 0 is its beginning."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for _ in range(number):
            file.read(characters)
        return file.read(characters)


# Plants: changes of the code in the process that trains -----------------------------------------------------------


def plant_shifted_labels() -> None:
    """Let each target of the training be the token behind its place, as a wrong offset does."""
    from cramming.objectives import masking

    original = masking.MaskedTargets.mask

    def shifted(self: Any, masker: Any, ids_NL: np.ndarray, samples_N: np.ndarray) -> Any:
        masked = original(self, masker, ids_NL, samples_N)
        behind_M = np.roll(ids_NL, -1, axis=1).reshape(-1)[masked.target_positions_M]
        is_target_M = masked.target_ids_M != masking.IGNORE
        targets_M = np.where(is_target_M, behind_M, masking.IGNORE)
        return masked._replace(target_ids_M=targets_M.astype(np.int64))

    masking.MaskedTargets.mask = shifted  # type: ignore[method-assign]


def plant_fp16_stuck() -> None:
    """Keep the loss scale at a value from which every gradient overflows."""
    from torch.amp import GradScaler

    original = GradScaler.update

    def stuck(self: Any, new_scale: Any = None) -> None:
        original(self, new_scale)
        self._scale.fill_(STUCK_SCALE)

    begin = GradScaler.__init__

    def started(self: Any, device: str, **options: Any) -> None:
        begin(self, device, **{**options, "init_scale": STUCK_SCALE})

    GradScaler.update, GradScaler.__init__ = stuck, started  # type: ignore[method-assign]


def plant_frozen_head() -> None:
    """Train without the weights of the prediction head."""
    freeze(lambda name: not name.startswith("encoder."))


def plant_frozen_block() -> None:
    """Train without the weights of the second block."""
    freeze(lambda name: name.startswith("encoder.blocks.1."))


def freeze(is_frozen: Callable[[str], bool]) -> None:
    """Let models be built with parameters that need no gradient."""
    from cramming import engine

    original = engine.build_model

    def frozen(config: Any) -> Any:
        model = original(config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_frozen(name))
        return model

    engine.build_model = frozen


PLANTS = {
    "shifted_labels": plant_shifted_labels,
    "fp16_stuck": plant_fp16_stuck,
    "frozen_head": plant_frozen_head,
    "frozen_block": plant_frozen_block,
}


def train_planted(plant: str, words: list[str]) -> None:
    """Call the command line in this process, with a planted change."""
    from cramming import cli

    PLANTS[plant]()
    sys.argv = ["cramming", *words]
    cli.main()


# The comparison ---------------------------------------------------------------------------------------------------


def command(words: list[str], work: Path, plant: str = "") -> str:
    """Run a verb in a process of its own, in the work folder; returns what it printed on stdout."""
    program = ["-m", "cramming", *words]
    if plant:
        program = [str(Path(__file__).resolve()), "--plant", plant, *words]
    done = subprocess.run(
        [sys.executable, *program], cwd=work, capture_output=True, text=True, check=False
    )
    if done.returncode and "gradient was not finite" not in done.stderr:
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout


def train(case: Case, work: Path, seed: int) -> Path:
    """Prepare and train a case, what of it is not done yet; returns the run folder."""
    run = work / "runs" / case.name
    if not (run / "run.jsonl").exists():
        corpus = [*case.corpus, f"data.seed={case.text_seed + seed}"]
        command(["prepare", *corpus], work)
        words = ["pretrain", "--name", case.name, "--device", "cpu", *corpus, *case.training]
        command([*words, f"seed={case.seed + seed}"], work, case.plant)
    return run


def table(rows: list[tuple[Case, dict[str, Any]]]) -> list[str]:
    """Return the table of evidence in Markdown."""
    lines = [
        "| run | expected | named first | strength | evidence | then |",
        "|---|---|---|---|---|---|",
    ]
    for case, diagnosis in rows:
        findings = diagnosis["findings"]
        first = findings[0] if findings else {"name": "–", "strength": "–", "evidence": ""}
        others = ", ".join(f"{each['name']} {each['strength']:.2g}" for each in findings[1:])
        strength = first["strength"] if not findings else f"{first['strength']:.3g}"
        evidence = first["evidence"] or diagnosis["perspective"]
        cells = [case.name, case.expected or "–", first["name"], strength, evidence, others]
        lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    return lines


def header(seed: int) -> list[str]:
    """Return title, command and versions of the results."""
    cpu = devices.describe(torch.device("cpu")).name
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "tokenizers"))
    return [
        "# Planted ills and healthy runs before `cramming diagnose`",
        "",
        "`python benchmarks/diagnose.py --work <folder> --text <folder with text files>"
        f" --seed {seed} --out <this file>`: one thread of {cpu}, {versions},"
        f" Python {platform.python_version()}. Settings of each run are in the",
        "script; the raw answers are in the file of the same name that ends in .json. A strength is how many times a",
        "number is over its limit.",
        "",
    ]


def main() -> None:
    """Train all cases, diagnose them, and print the table."""
    if sys.argv[1:2] == ["--plant"]:
        train_planted(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of texts, corpora and runs"
    )
    parser.add_argument("--text", type=Path, help="folder with the real text")
    parser.add_argument("--seed", type=int, default=0, help="added to the seeds of all cases")
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--train-only", action="store_true", help="leave the diagnosis out")
    parser.add_argument("--out", type=Path, help="file of the table, and raw numbers beside it")
    args = parser.parse_args()
    work = args.work.resolve()
    write_texts(work / "texts", args.text, args.seed)
    names = args.only.split(",") if args.only else list(CASES)
    rows = []
    for name in names:
        run = train(CASES[name], work, args.seed)
        if not args.train_only:
            printed = command(["diagnose", str(run.relative_to(work)), "--json"], work)
            rows.append((CASES[name], json.loads(printed)))
            print(table(rows[-1:])[-1], flush=True)
    if not rows:
        return
    ills = [row for row in rows if row[0].expected]
    right = [case for case, d in ills if [f["name"] for f in d["findings"]][:1] == [case.expected]]
    healthy = [diagnosis for case, diagnosis in rows if not case.expected]
    silent = [diagnosis for diagnosis in healthy if not diagnosis["findings"]]
    lines = [
        *table(rows),
        "",
        f"Named first: {len(right)} of {len(ills)} planted ills."
        f" No alarm: {len(silent)} of {len(healthy)} healthy runs.",
    ]
    print("\n".join(lines))
    if args.out:
        text = "\n".join([*header(args.seed), *lines])
        args.out.write_text(text + "\n", encoding="utf-8")
        raw = {case.name: diagnosis for case, diagnosis in rows}
        args.out.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
