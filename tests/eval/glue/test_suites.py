"""What stands beside the scores of GLUE, and what must not: floor, other suites, minimal pairs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.config import UserError, file_sha256
from cramming.data.corpus import Corpus
from cramming.record import load_record
from cramming.record_schema import WITHOUT_ENCODER, read_record
from eval.finetune.history import history_file
from eval.glue import main
from eval.report.ranking import rows_of
from eval.report.render import markdown
from eval.report.run_page import RunPage
from eval.rules.load import load_run
from eval.rules.table import judge
from eval.tasks import locate

Change = Callable[..., dict[str, Any]]
Read = Callable[..., bytes]


def test_a_bag_of_words_stands_beside_the_model_and_is_judged_by_no_rule(
    config: dict[str, Any], with_eval: Change
) -> None:
    main(config)
    before = judge(read_record(load_record(Path(config["runs"]) / "first")))
    main(with_eval(config, baselines=True))
    record = load_record(Path(config["runs"]) / "first")
    assert judge(read_record(record)) == before and set(record["glue"]) == {"pretrained"}
    assert (
        set(record["floor"]["tasks"]) == set(record["glue"]["pretrained"]["tasks"])
        and record["floor"]["seconds"] > 0
    )
    rows = rows_of([load_run(Path(config["runs"]) / "first")])
    assert {row.init for row in rows} == {"pretrained", *WITHOUT_ENCODER.values()} and not any(
        row.ranked for row in rows
    )
    assert set(record["constant"]["tasks"]) == set(record["floor"]["tasks"])
    lines = history_file(Path(config["runs"]) / "first").read_text().splitlines()
    assert {json.loads(line)["init"] for line in lines} == {"pretrained"}, (
        "no line for what is not fine-tuned"
    )
    stored = (Path(config["runs"]) / "first/glue/floor/glue.json").read_bytes()
    main(with_eval({**config, "name": "again"}, baselines=True))
    assert stored == (Path(config["runs"]) / "again/glue/floor/glue.json").read_bytes()


def test_superglue_and_minimal_pairs_stand_beside_glue(
    config: dict[str, Any], tmp_path: Path, with_eval: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(config)
    before = judge(read_record(load_record(Path(config["runs"]) / "first")))
    words = [f"w{i}" for i in range(20)]
    for name in ("RTE", "CB"):
        (tmp_path / "super" / name).mkdir(parents=True)
        labels = (
            ("entailment", "not_entailment")
            if name == "RTE"
            else ("neutral", "entailment", "contradiction")
        )
        rows = [
            {"premise": words[i % 20], "hypothesis": words[i % 7], "label": labels[i % len(labels)]}
            for i in range(24)
        ]
        for file in ("train.jsonl", "val.jsonl"):
            (tmp_path / "super" / name / file).write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs/one.jsonl").write_text(
        json.dumps({"sentence_good": "w1 w2", "sentence_bad": "w2 w1"}) + "\n"
    )
    changes = {
        "data_dir": tmp_path / "super",
        "minimal_pairs": tmp_path / "pairs",
        "baselines": True,
    }
    main(with_eval(config, source="superglue", **changes))
    monkeypatch.setattr("eval.extras.minimal_pairs.open_masked_lm", interrupt)
    main(with_eval(config, source="superglue", **changes))  # nothing is scored twice
    record = load_record(Path(config["runs"]) / "first")
    assert judge(read_record(record)) == before and set(record["superglue"]) == {
        "pretrained",
        *WITHOUT_ENCODER,
    }
    section = record["superglue"]["pretrained"]
    assert (
        set(section["tasks"]) == {"superglue_rte", "cb"}
        and section["averages"]["superglue5"]["value"] is None
    )
    assert (
        section["tasks"]["cb"]["main_metric"] == "accuracy_f1" and section["tasks"]["cb"]["subset"]
    )
    assert record["minimal_pairs"]["accuracy"] in (0, 100)
    said = markdown("report.j2", one=RunPage(load_run(Path(config["runs"]) / "first"), []))
    assert "SuperGLUE, pretrained: CB" in said and "Minimal pairs: " in said
    for task in section["tasks"].values():
        spread = 100 * task["metrics"][task["main_metric"]]["std"]
        assert f"{task['title']} {task['score']:.1f}† ±{spread:.1f}" in said
    assert "† not the official number of examples" in said
    assert (
        f"average not printed ({section['averages']['superglue5']['definition']}); boolq: no such task folder"
        in said
    )


@pytest.fixture
def corpus(
    config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    make_corpus: Callable[..., Path],
) -> Path:
    """A corpus with tasks, where the settings look for it."""
    folder = make_corpus(tmp_path / "corpus", documents=20)
    monkeypatch.setattr(locate, "corpus_folder", lambda config: folder)
    shutil.copytree(config["eval"]["data_dir"], folder / "tasks")
    files = {
        f.relative_to(folder).as_posix(): file_sha256(f) for f in (folder / "tasks").rglob("*.tsv")
    }
    (folder / "manifest.json").write_text(
        replace(Corpus.open(folder).manifest, files=files).to_json()
    )
    return folder


def test_embedded_tasks_are_read_from_the_corpus_and_have_no_official_size(
    config: dict[str, Any], corpus: Path, with_eval: Change
) -> None:
    main(with_eval(config, source="embedded", data_dir=None, predict_test=False, seeds=[0]))
    section = load_record(Path(config["runs"]) / "first")["glue"]["pretrained"]
    assert section["suite"] == "embedded" and set(section["averages"]) == {"embedded"}
    assert section["tasks_corpus_sha256"] == Corpus.open(corpus).manifest_sha256
    assert all(
        t["official_train_examples"] is None and not t["subset"] for t in section["tasks"].values()
    )
    predictions = np.load(Path(config["runs"]) / "first/glue/pretrained/predictions/mnli-seed0.npz")
    assert set(predictions) == {"dev.mnli_matched", "dev.mnli_mismatched"}


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
def test_embedded_tasks_that_were_not_made_with_the_corpus_are_refused(
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


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_scores_of_another_suite_leave_the_record(
    config: dict[str, Any],
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    with_eval: Change,
) -> None:
    """As when GLUE follows the embedded tasks without a random baseline: theirs must not stand beside its scores."""
    few = with_eval(config, predict_test=False, seeds=[0], tasks=["cola"])
    main(
        with_eval(
            few, source="embedded", data_dir=None, init=["pretrained", "random"], baselines=True
        )
    )
    assert "dropped" not in capsys.readouterr().err
    before = load_record(Path(config["runs"]) / "first")
    with monkeypatch.context() as patch:
        patch.setattr("eval.glue.score_model", interrupt)
        with pytest.raises(KeyboardInterrupt):
            main(with_eval(few, baselines=True))
    assert load_record(Path(config["runs"]) / "first") == before, (
        "nothing goes before there is something new"
    )
    main(with_eval(few, hyperparameters={**few["eval"]["hyperparameters"], "learning_rate": 2e-3}))
    record = load_record(Path(config["runs"]) / "first")
    assert {init: section["suite"] for init, section in record["glue"].items()} == {
        "pretrained": "glue"
    }
    assert not set(WITHOUT_ENCODER) & set(record)
    said = capsys.readouterr()
    assert (
        "dropped from it glue.pretrained, glue.random, floor, constant of another"
        in said.out + said.err
    )
    assert "was fine-tuned with" not in said.out, "R20 looks at each suite apart"
