"""`cramming verify`: a run, its archive and the records that are shipped are in order; one changed byte is named."""

import errno
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cramming.cli import VERBS, _load
from cramming.config import file_sha256
from eval import glue, verify
from eval.archive import LIST, SUFFIX, _signed, _text, list_of, opened, pack
from eval.rules.table import RULES
from eval.verify import Means, verify_run

RECORDS = Path(__file__).parents[2] / "eval" / "records"


def test_a_run_its_archive_and_another_of_its_name(
    honest_run: Path,
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    means: Means,
) -> None:
    archive, lent = tmp_path / f"honest{SUFFIX}", (means.make_tasks, means.search)
    pack(honest_run, archive)
    for place in (honest_run, archive):
        verify.main(compose(f"data.corpus={place}"), *lent)
        told = " ".join(capsys.readouterr().out.split())
        assert "in order, closed division" in told and "39 values of 9 tasks computed again" in told
    altered = shutil.copytree(honest_run, tmp_path / "altered")
    record = json.loads((altered / "record.json").read_text())
    record["pretrain"]["train_loss"] = 0.1
    (altered / "record.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit) as ended:
        verify.main(compose(f"data.corpus={altered}", "verify.json=true"), *lent)
    told = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1 and not told["in_order"] and told["division"] == "invalid"
    assert [finding["rule"] for finding in told["findings"] if not finding["ok"]] == ["R27"]


@pytest.mark.parametrize(
    "corpus",
    [
        *(
            {"settings": settings}
            for settings in (
                [],
                {},
                {"data": None},
                {"data": {"seed": "x"}},
                {"data": {"seed": -1}},
            )
        ),
        {"sources": []},
        {"manifest_sha256": "of another corpus than the tasks"},
        None,
    ],
)
def test_tasks_of_an_unknown_seed_are_not_generated(
    honest_run: Path, tmp_path: Path, means: Means, corpus: dict[str, Any] | None
) -> None:
    """As of a stranger's record, or of a model from elsewhere, which has no corpus."""
    run = shutil.copytree(honest_run, tmp_path / "run")
    record = json.loads((run / "record.json").read_text())
    record["corpus"] = corpus and {**record["corpus"], **corpus}
    (run / "record.json").write_text(json.dumps(record))
    found = verify_run(run, replace(means, make_tasks=lambda *_: pytest.fail("of which seed?")))
    assert "not computed again: the record does not say with which seed" in found.looked_at[0]
    assert not [problem for problem in found.problems if problem.startswith("scores")]


def hostile(
    honest: Path, place: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]
) -> Path:
    """A copy of the run after a change of its record and of the list of its files, which is signed anew."""
    run = shutil.copytree(honest, place / "hostile")
    record, listed = json.loads((run / "record.json").read_text()), list_of(run)
    change(record, listed)
    (run / "record.json").write_text(json.dumps(record))
    listed["files"]["record.json"] = {
        "bytes": (run / "record.json").stat().st_size,
        "sha256": file_sha256(run / "record.json"),
    }
    (run / LIST).write_bytes(_text(_signed(listed)))
    return run


LONG_STEP = f"checkpoints/step-{'9' * 5000}.pt"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError()])
def test_the_verifiers_own_troubles_are_no_problems_of_the_run(
    honest_run: Path, means: Means, error: Exception
) -> None:
    def fail(*_: object) -> bool:
        raise error

    with pytest.raises(type(error)):
        verify_run(honest_run, replace(means, make_tasks=fail))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda _, listed: listed["outside"].update({LONG_STEP: {"sha256": "0"}}), "checkpoints: "),
        (lambda record, _: record["corpus"].update(folder="a\0b"), "corpus: "),
        (lambda record, _: record["corpus"].update(folder="\ud800"), "corpus: "),
        (
            lambda record, _: record["glue"]["pretrained"]["seeds"].__setitem__(0, "x" * 300),
            "scores: ",
        ),
        (
            lambda record, _: record["glue"].update({"x" * 300: record["glue"]["pretrained"]}),
            "scores: ",
        ),
    ],
)
def test_what_a_check_stumbles_over_is_a_problem_and_hides_no_finding(
    change: Callable[[dict[str, Any], dict[str, Any]], object],
    told: str,
    honest_run: Path,
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    means: Means,
) -> None:
    run = hostile(honest_run, tmp_path, change)
    with pytest.raises(SystemExit) as ended:
        verify.main(
            compose(f"data.corpus={run}", "verify.json=true"), means.make_tasks, means.search
        )
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1 and not found["in_order"] and len(found["findings"]) == len(RULES)
    (problem,) = [
        problem for problem in found["problems"] if problem.startswith(f"{told}cannot be judged (")
    ]
    assert len(problem) < 150


FORGED = "glue\x1b[2J\n::error::x\nruns/a: in order, closed division\x1b[8m\ud800"


def test_the_text_of_a_stranger_neither_steers_the_terminal_nor_begins_a_line(
    honest_run: Path,
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    means: Means,
) -> None:
    """A program gets it as it is."""

    def change(record: dict[str, Any], listed: dict[str, Any]) -> None:
        record["corpus"]["sources"][0]["name"] = FORGED
        record["rules_version"] = record["glue"]["pretrained"]["suite"] = FORGED
        listed["files"][FORGED] = {"bytes": 1, "sha256": "0"}

    run = hostile(honest_run, tmp_path, change)
    for more in ([], ["verify.json=true"]):
        with pytest.raises(SystemExit):
            verify.main(compose(f"data.corpus={run}", *more), means.make_tasks, means.search)
        out, err = capsys.readouterr()
        said = (err or out).splitlines()
        assert len([line for line in said if "::error::x" in line]) >= 3 and all(
            map(str.isprintable, said)
        )
        assert not [line for line in said if line.startswith(("::", "runs/a"))]
    assert any(FORGED in problem for problem in json.loads(out)["problems"])


@pytest.mark.parametrize("altered", [False, True])
def test_a_corpus_as_json(
    altered: bool,
    tmp_path: Path,
    make_corpus: Callable[..., Path],
    compose: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    means: Means,
) -> None:
    corpus = make_corpus(tmp_path / "corpus", documents=60)
    if altered:
        (corpus / "train-00000.bin").write_bytes(b"")
    ended = pytest.raises(SystemExit, match=r"^1$") if altered else nullcontext()
    with ended:
        verify.main(
            compose(f"data.corpus={corpus}", "verify.json=true"), means.make_tasks, means.search
        )
    found = json.loads(capsys.readouterr().out)
    assert (found["corpus"], found["in_order"]) == (str(corpus), not altered)
    assert ["train-00000.bin: its SHA-256" in problem for problem in found["problems"]] == [
        True
    ] * altered


@pytest.mark.parametrize("name", ["honest.zip", "honest.record (1).zip", "honest"])
def test_an_archive_is_known_by_its_content(
    name: str,
    honest_run: Path,
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    means: Means,
) -> None:
    pack(honest_run, tmp_path / name)
    settings = compose()
    settings["data"]["corpus"] = str(tmp_path / name)
    verify.main(settings, means.make_tasks, means.search)
    assert "in order, closed division" in " ".join(capsys.readouterr().out.split())


def unscored(run: Path, place: Path, without: str = "") -> Path:
    """A copy of a run without its scores, and without one part of the record's section on training."""
    copied = shutil.copytree(run, place / "unscored", ignore=shutil.ignore_patterns("glue"))
    record = json.loads((copied / "record.json").read_text())
    del record["glue"], record["history"]
    record["pretrain"].pop(without, None)
    (copied / "record.json").write_text(json.dumps(record))
    return copied


def test_of_a_run_that_is_not_scored_yet_the_cure_is_said_once(
    honest_run: Path,
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    means: Means,
) -> None:
    run = unscored(honest_run, tmp_path)
    with pytest.raises(SystemExit):
        verify.main(compose(f"data.corpus={run}"), means.make_tasks, means.search)
    told = " ".join(capsys.readouterr().out.split())
    assert (
        told.count("no scores yet; `cramming glue name=unscored`")
        == told.count("cramming glue")
        == 1
    )
    assert "R7 no scores yet" in told and "every score is" not in told
    assert (
        "R6 no scores yet, which R14, R18, R19, R20, R21, R22 need too R7" in told
        and "BROKEN" not in told
    )
    assert told.endswith("unscored: not scored yet; nothing else makes it invalid")


@pytest.mark.parametrize(
    ("part", "rule"), [("status", "R3"), ("final_sha256", "R14"), ("train_loss", "R27"), ("", "")]
)
def test_of_a_run_that_is_not_scored_yet_a_breach_is_still_named(
    part: str,
    rule: str,
    honest_run: Path,
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    means: Means,
) -> None:
    run = unscored(honest_run, tmp_path, part)
    with pytest.raises(SystemExit) as ended:
        verify.main(
            compose(f"data.corpus={run}", "verify.json=true"), means.make_tasks, means.search
        )
    out, told = capsys.readouterr()
    found, said = (
        json.loads(out),
        [line.split()[0] for line in told.splitlines() if "BROKEN" in line],
    )
    assert ended.value.code == 1 and not found["in_order"] and found["only_unscored"] == (not rule)
    assert (rule in said) if rule else not said
    assert ("NOT in order" in told) == bool(rule)


def test_of_a_record_that_cannot_be_read_that_alone_is_said(
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    means: Means,
) -> None:
    """All rules would be broken, and none of that would be true."""
    (tmp_path / "record.json").write_text('{"format": 99}')
    with pytest.raises(SystemExit):
        verify.main(
            compose(f"data.corpus={tmp_path}", "verify.json=true"), means.make_tasks, means.search
        )
    out, told = capsys.readouterr()
    found = json.loads(out)
    assert "format 99" in found["problems"][0] and (found["division"], found["findings"]) == (
        None,
        [],
    )
    assert "BROKEN" not in told and "NOT in order" in told and "agrees with itself" not in told


@pytest.mark.parametrize("archive", sorted(RECORDS.glob(f"*{SUFFIX}")), ids=lambda one: one.name)
def test_a_shipped_archive_is_in_order(archive: Path, means: Means) -> None:
    with opened(archive) as folder:
        assert verify_run(folder, means).in_order


@pytest.mark.parametrize(
    "folder", [one for one in RECORDS.iterdir() if one.is_dir()], ids=lambda one: one.name
)
def test_of_a_shipped_record_each_changed_byte_is_named(
    folder: Path, tmp_path: Path, means: Means
) -> None:
    assert verify_run(folder, means).in_order
    for name in [*json.loads((folder / LIST).read_text())["files"], LIST]:
        copied = shutil.copytree(folder, tmp_path / name.replace("/", "_"))
        content = bytearray((copied / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copied / name).write_bytes(content)
        assert any(name in problem for problem in verify_run(copied, means).problems), name


@pytest.fixture(scope="module")
def scored(
    honest_run: Path,
    tmp_path_factory: pytest.TempPathFactory,
    compose: Callable[..., dict[str, Any]],
) -> tuple[Path, Path]:
    """The honest run's model scored on two of GLUE's tasks, a part of each; and the folder of these."""
    run = shutil.copytree(honest_run, tmp_path_factory.mktemp("glue") / "runs" / "honest")
    (corpus,) = honest_run.parents[1].glob("corpora/*")
    settings = compose(
        "eval=glue_sane",
        f"eval.data_dir={corpus / 'tasks'}",
        "eval.tasks=[rte,stsb]",
        "eval.seeds=[0,1]",
        "eval.workers=1",
        "eval.hyperparameters.epochs=1",
        "eval.hyperparameters.batch_size=400",
        "eval.hyperparameters.max_length=16",
        f"runs={run.parent}",
        "name=honest",
        "device=cpu",
    )
    glue.main(settings)
    return run, shutil.copytree(corpus / "tasks", run.parents[1] / "tasks")


def test_scores_are_computed_again_from_the_tasks_files(
    scored: tuple[Path, Path], means: Means
) -> None:
    """Floor and constant too; without the files it is said that they were not."""
    run, tasks = scored
    without, found = verify_run(run, means), verify_run(run, replace(means, tasks=tasks))
    assert (
        without.in_order
        and "not computed again" in without.looked_at[0]
        and "data_dir" in without.looked_at[0]
    )
    assert (
        found.in_order
        and "12 values of 2 tasks" in found.looked_at[0]
        and "all agree" in found.looked_at[0]
    )
    assert "share a run of 13 words" in found.looked_at[1]


@pytest.mark.parametrize("fault", ["labels", "rows", "no file", "no predictions"])
def test_each_value_that_the_labels_do_not_give_is_named(
    fault: str, scored: tuple[Path, Path], tmp_path: Path, means: Means
) -> None:
    run, tasks = (shutil.copytree(place, tmp_path / place.name) for place in scored)
    file = tasks / "RTE" / "dev.tsv"
    header, *rows = file.read_text().splitlines(keepends=True)
    if fault == "labels":
        *cells, label = rows[0].rstrip("\n").split("\t")
        rows[0] = (
            "\t".join([*cells, "entailment" if label == "not_entailment" else "not_entailment"])
            + "\n"
        )
    elif fault == "rows":
        rows = rows[:-1]
    elif fault == "no predictions":
        (run / "glue" / "pretrained" / "predictions" / "rte-seed1.npz").unlink()
    file.write_text("".join([header, *rows]))
    if fault == "no file":
        file.unlink()
    found = verify_run(run, replace(means, tasks=tasks))
    problems = [
        problem for problem in found.problems if problem.startswith("scores: pretrained: rte")
    ]
    if fault == "labels":
        told = problems[0].split()
        assert (
            problems[0].startswith("scores: pretrained: rte seed 0: accuracy is")
            and len(problems) == 2
        )
        stored, again = float(told[7]), float(told[10])
        assert abs(stored - again) == pytest.approx(1 / 400, abs=1e-6)
    elif fault == "no predictions":
        assert problems == ["scores: pretrained: rte seed 1: rte-seed1.npz is not there"]
    else:
        assert not problems and "not rte: " in found.looked_at[0] and found.in_order


def test_a_corpus_that_is_another_or_elsewhere(
    honest_run: Path, tmp_path: Path, means: Means
) -> None:
    for place, told in {tmp_path: "not in", honest_run: "not in"}.items():
        found = verify_run(honest_run, replace(means, corpus=place))
        assert (
            found.in_order and told in found.looked_at[1] and "verify.corpus" in found.looked_at[1]
        )


def test_what_verify_is_lent_exists() -> None:
    assert all(callable(_load(name)) for verb in VERBS.values() for name in verb.lent)
