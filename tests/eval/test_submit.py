"""`cramming submit`: an archive of a run that the rules accept, and none of one that they do not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from eval.archive import opened
from eval.rules.load import load_run
from eval.submit import main

Write = Callable[..., Path]


def settings(run: Path) -> dict[str, Any]:
    return {"submit": {"run": str(run), "out": None}, "name": "other", "runs": "runs"}


@pytest.mark.parametrize("division", ["closed", "open"])
def test_a_run_and_its_archive_are_judged_alike(
    tmp_path: Path,
    make_record: Callable[..., Any],
    write_run: Write,
    capsys: pytest.CaptureFixture[str],
    division: str,
) -> None:
    record = make_record()
    record["division_requested"] = division
    run = write_run(tmp_path / "first", record)
    main(settings(run))
    said = capsys.readouterr().out
    assert f"{division} division" in said and all(f"R{number} " in said for number in range(1, 27))
    with opened(run / "first.record.zip") as folder:
        assert load_run(folder).verdict == load_run(run).verdict


def test_an_invalid_run_is_refused(
    tmp_path: Path, make_record: Callable[..., Any], write_run: Write
) -> None:
    run = write_run(tmp_path / "first", make_record())
    (run / "budget.jsonl").unlink()
    with pytest.raises(UserError, match="first: invalid by"):
        main(settings(run))
    assert not (run / "first.record.zip").exists()


def test_what_a_run_without_scores_needs_is_said_once(
    tmp_path: Path,
    make_record: Callable[..., Any],
    write_run: Write,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = make_record()
    del record["glue"]
    run = write_run(tmp_path / "first", record)
    with pytest.raises(UserError, match=r"first: no scores yet; `cramming glue name=first`$"):
        main(settings(run))
    said = capsys.readouterr().out
    assert "cramming glue" not in said and not (run / "first.record.zip").exists()
    record["pretrain"]["status"] = "interrupted"
    with pytest.raises(UserError, match="first: invalid by"):
        main(settings(write_run(tmp_path / "first", record)))


@pytest.mark.parametrize("name", ["my run é", ".hidden", "a(1)"])
def test_a_folder_whose_name_no_archive_has_is_refused_before_anything_is_written(
    tmp_path: Path, make_record: Callable[..., Any], write_run: Write, name: str
) -> None:
    run = write_run(tmp_path / name, make_record())
    before = sorted(run.rglob("*"))
    with pytest.raises(
        UserError, match=r"cannot stand in an archive; rename it to letters, digits, - \. _"
    ):
        main(settings(run))
    assert sorted(run.rglob("*")) == before


def test_an_archive_is_never_written_over_a_file_of_the_run(
    tmp_path: Path, make_record: Callable[..., Any], write_run: Write
) -> None:
    run = write_run(tmp_path / "first", make_record())
    before = (run / "record.json").read_bytes()
    with pytest.raises(UserError, match="let it end in"):
        main(settings(run) | {"submit": {"run": str(run), "out": str(run / "record.json")}})
    assert (run / "record.json").read_bytes() == before


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is .* a run folder"):
        main(settings(tmp_path / "nothing"))
