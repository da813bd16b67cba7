"""`cramming verify`: a run, its archive and the records that are shipped are in order; one changed byte is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval import verify
from eval.archive import LIST, SUFFIX, pack
from eval.rules.load import load_run

RECORDS = Path(__file__).parents[2] / "eval" / "records"


def test_the_honest_run_is_of_the_closed_division(honest_run: Path) -> None:
    verdict = load_run(honest_run).verdict
    assert verdict.division == "closed", verdict.broken


def test_a_run_its_archive_and_another_of_its_name(
    honest_run: Path, tmp_path: Path, compose: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / f"honest{SUFFIX}"
    pack(honest_run, archive)
    for place in (honest_run, archive):
        verify.main(compose(f"data.corpus={place}"))
        assert "in order, closed division" in " ".join(capsys.readouterr().out.split())
    altered = shutil.copytree(honest_run, tmp_path / "altered")
    record = json.loads((altered / "record.json").read_text())
    record["pretrain"]["train_loss"] = 0.1
    (altered / "record.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit) as ended:
        verify.main(compose(f"data.corpus={altered}", "verify.json=true"))
    told = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1 and not told["in_order"] and told["division"] == "invalid"
    assert [finding["rule"] for finding in told["findings"] if not finding["ok"]] == ["R27"]


@pytest.mark.parametrize("folder", [one for one in RECORDS.iterdir() if one.is_dir()], ids=lambda one: one.name)
def test_of_a_shipped_record_each_changed_byte_is_named(folder: Path, tmp_path: Path) -> None:
    assert verify.verify_run(folder).in_order
    for name in [*json.loads((folder / LIST).read_text())["files"], LIST]:
        copied = shutil.copytree(folder, tmp_path / name.replace("/", "_"))
        content = bytearray((copied / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copied / name).write_bytes(content)
        assert any(name in problem for problem in verify.verify_run(copied).problems), name
