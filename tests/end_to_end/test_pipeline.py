"""The whole pipeline on a little text and a little task, every verb the real one, in this process and in seconds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming import cli, verbs
from cramming.invocation import Invocation
from eval.rules.load import load_run


def write_rte(folder: Path) -> None:
    (folder / "RTE").mkdir(parents=True)
    for name, count in (("train", 12), ("dev", 6)):
        rows = [
            f"{i}\tthe {i} birds sing\tbirds sing\t{'not_' * (i % 2)}entailment"
            for i in range(count)
        ]
        text = "\n".join(["index\tsentence1\tsentence2\tlabel", *rows, ""])
        (folder / "RTE" / f"{name}.tsv").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("objective", ["mlm", "rtd"])
def test_from_text_to_the_leaderboard(
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
    tmp_path: Path,
    objective: str,
) -> None:
    birds = ("robin", "wren", "heron", "finch", "magpie")
    paragraphs = [
        f"The {bird} number {i} sings in tree {i * 7 % 31} until noon."
        for i in range(60)
        for bird in birds
    ]
    (tmp_path / "a.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    write_rte(tmp_path / "GLUE")
    no_corpus_yet = [o for o in tiny_overrides if not o.startswith("data.corpus=")]
    settings = compose(
        *no_corpus_yet,
        "data=text",
        f"data.paths=[{tmp_path / 'a.txt'}]",
        "data.validation_fraction=0.2",
        "tokenizer.vocab_size=200",
        "budget.steps=3",
        "eval=glue_small",
        f"eval.data_dir={tmp_path / 'GLUE'}",
        "eval.seeds=[0]",
        "eval.workers=1",
        "eval.hyperparameters.max_length=24",
        f"objective={objective}",
    )
    here = Invocation("a", tmp_path / "runs", tmp_path / "corpora", "cpu")
    verbs.check("run", settings, here)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "corpora").exists()
    for verb in ("prepare", "pretrain", "glue"):
        verbs.main_of(verb)(settings, here)
    verbs.run(cli.parse(["report", "--runs", str(here.runs)]))
    record = json.loads((tmp_path / "runs" / "a" / "record.json").read_text(encoding="utf-8"))
    assert record["pretrain"]["status"] == "finished" and record["pretrain"]["steps"] == 3
    assert record["corpus"]["sources"][0]["name"].endswith("a.txt")
    measured = (
        {"loss", "all_mask_loss", "bits_per_byte"}
        if objective == "mlm"
        else {"replaced_token_loss"}
    )
    losses = {*measured, "loss", "all_mask_loss", "bits_per_byte"}
    assert measured == {
        name for name in losses if record["pretrain"]["validation"][name] is not None
    }
    broken = {finding.rule for finding in load_run(tmp_path / "runs" / "a").verdict.broken}
    assert ("R9" in broken) == (objective == "rtd")
    assert record["glue"]["pretrained"]["tasks"]["rte"]["score"] is not None
    assert {"pretrained", "random"} <= record["glue"].keys()
    page = (tmp_path / "runs" / "report" / "leaderboard.md").read_text(encoding="utf-8")
    assert "Not ranked: parts of the official data" in page and "| a |" in page
