"""What stands beside the scores of GLUE, and what must not: baselines, other suites, minimal pairs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.config import UserError
from cramming.data.corpus import Corpus
from cramming.record import load_record
from tests.eval.glue.calls import main

Change = Callable[..., dict[str, Any]]
BASELINES = {"floor", "constant"}


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def record_of(config: dict[str, Any]) -> dict[str, Any]:
    return load_record(Path(config["runs"]) / config["name"])


def test_baselines_stand_beside_the_model_and_are_no_fine_tunings(
    config: dict[str, Any], with_eval: Change, section_of: Callable[..., dict[str, Any]]
) -> None:
    main(config)
    before = record_of(config)
    both = with_eval(config, baselines=True)
    main(both)
    record = record_of(config)
    assert record["glue"] == before["glue"] and record["history"] == before["history"]
    assert record["floor"]["init"] == "bag of words" and record["floor"]["seconds"] > 0
    for name in BASELINES:
        assert set(record[name]["tasks"]) == set(record["glue"]["pretrained"]["tasks"])
    main(both)
    assert record_of(config) == record, "a second time, nothing is done"
    repeated = {**both, "name": "again"}
    main(repeated)
    assert section_of(both, "floor") == section_of(repeated, "floor")


def test_superglue_and_minimal_pairs_stand_beside_glue(
    config: dict[str, Any], tmp_path: Path, with_eval: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(config)
    before = record_of(config)
    words = [f"w{i}" for i in range(20)]
    labels = {
        "RTE": ("entailment", "not_entailment"),
        "CB": ("neutral", "entailment", "contradiction"),
    }
    for name, known in labels.items():
        (tmp_path / "super" / name).mkdir(parents=True)
        rows = [
            {"premise": words[i % 20], "hypothesis": words[i % 7], "label": known[i % len(known)]}
            for i in range(24)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        for file in ("train.jsonl", "val.jsonl"):
            (tmp_path / "super" / name / file).write_text(text)
    (tmp_path / "pairs").mkdir()
    pair = {"sentence_good": "w1 w2", "sentence_bad": "w2 w1"}
    (tmp_path / "pairs/one.jsonl").write_text(json.dumps(pair) + "\n")
    changes = {
        "source": "superglue",
        "data_dir": tmp_path / "super",
        "minimal_pairs": tmp_path / "pairs",
        "baselines": True,
    }
    main(with_eval(config, **changes))
    record = record_of(config)
    monkeypatch.setattr("eval.extras.minimal_pairs.open_masked_lm", interrupt)
    main(with_eval(config, **changes))
    assert record_of(config) == record, "nothing is scored twice"
    assert (record["glue"], record["history"]) == (before["glue"], before["history"])
    assert not BASELINES & set(record) and set(record["superglue"]) == {"pretrained", *BASELINES}
    section = record["superglue"]["pretrained"]
    assert set(section["tasks"]) == {"superglue_rte", "cb"}
    assert section["averages"]["superglue5"]["value"] is None
    assert section["tasks"]["cb"]["main_metric"] == "accuracy_f1"
    assert section["tasks"]["cb"]["subset"]
    assert record["minimal_pairs"]["accuracy"] in (0, 100)


def test_demo_tasks_are_read_from_the_corpus_and_have_no_official_size(
    config: dict[str, Any],
    corpus: Path,
    with_eval: Change,
    predictions_of: Callable[..., Path],
) -> None:
    embedded = with_eval(config, source="embedded", data_dir=None, predict_test=False, seeds=[0])
    main(embedded)
    section = record_of(config)["glue"]["pretrained"]
    assert section["suite"] == "embedded" and set(section["averages"]) == {"embedded"}
    assert section["tasks_corpus_sha256"] == Corpus.open(corpus).manifest_sha256
    for task in section["tasks"].values():
        assert task["official_train_examples"] is None and not task["subset"]
    predictions = np.load(predictions_of(config, "mnli", 0))
    assert set(predictions) == {"dev.mnli_matched", "dev.mnli_mismatched"}


def test_demo_tasks_of_another_corpus_than_the_runs_are_warned_of(
    config: dict[str, Any],
    corpus: Path,
    finished_run: Path,
    with_eval: Change,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = with_eval(config, source="embedded", data_dir=None, seeds=[0], tasks=["cola"])
    main({**small, "model_name": None})
    said = " ".join(capsys.readouterr().out.split())
    assert "of another corpus than the run was trained on" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda f: (f / "tasks/CoLA/dev.tsv").write_text("x\t1\t\ta\n"),
            r"dev\.tsv: its SHA-256 is not the manifest's",
        ),
        (
            lambda f: shutil.copytree(f / "tasks/CoLA", f / "tasks/RTE"),
            r"RTE/\w+\.tsv: no file of this corpus",
        ),
        (lambda f: (f / "manifest.json").unlink(), r"half-written corpus, or none"),
    ],
)
def test_demo_tasks_that_were_not_made_with_the_corpus_are_refused(
    config: dict[str, Any],
    corpus: Path,
    with_eval: Change,
    change: Callable[[Path], object],
    says: str,
) -> None:
    (corpus / "tasks/.DS_Store").touch()
    change(corpus)
    with pytest.raises(UserError, match=says):
        main(with_eval(config, source="embedded", data_dir=None))
    assert not Path(config["runs"]).exists()


def test_scores_of_another_suite_leave_the_record(
    config: dict[str, Any],
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    with_eval: Change,
) -> None:
    """GLUE may follow the embedded tasks without a random baseline: that of the other suite must not remain."""
    small = with_eval(config, predict_test=False, seeds=[0], tasks=["cola"])
    embedded = with_eval(
        small, source="embedded", data_dir=None, init=["pretrained", "random"], baselines=True
    )
    main(embedded)
    before = record_of(config)
    with monkeypatch.context() as patch:
        patch.setattr("eval.finetune.scoring.fine_tune", interrupt)
        with pytest.raises(KeyboardInterrupt):
            main(with_eval(small, baselines=True, seeds=[1]))
    stopped = record_of(config)
    assert stopped.pop("unfinished") == ["glue, pretrained: 1 of 1 not fine-tuned"]
    assert {**stopped, "log": before["log"]} == before, "nothing goes before something new is there"
    hyper = {**small["eval"]["hyperparameters"], "learning_rate": 2e-3}
    main(with_eval(small, hyperparameters=hyper))
    record = record_of(config)
    suites = {init: section["suite"] for init, section in record["glue"].items()}
    assert suites == {"pretrained": "glue"} and not BASELINES & set(record)
    said = capsys.readouterr().out
    assert "was fine-tuned with" not in said, "each suite has settings of its own"
    main(embedded)
    after = record_of(config)
    for section in (after["glue"]["pretrained"], before["glue"]["pretrained"]):
        del section["history_entries"]
    assert after["glue"]["pretrained"] == before["glue"]["pretrained"]
    assert set(after) > BASELINES and set(after["glue"]) == {"pretrained", "random"}
