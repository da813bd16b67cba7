"""The archive of a run: what is in it, that it comes back as it was, and that nothing else is unpacked."""

import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming import process_pool
from cramming.config import UserError, file_sha256
from eval import archive
from eval.archive import LIST, altered_since, opened, pack, unpack
from eval.report.main import main as report
from eval.rules import load
from eval.rules.load import load_run, load_runs

REPORT = {"each_run": True, "ledger": "duels", "repository": None}


@pytest.fixture
def run(
    tmp_path: Path, make_record: Callable[..., dict[str, Any]], write_run: Callable[..., Path]
) -> Path:
    """A run folder with what belongs into an archive, and with what does not."""
    folder = write_run(tmp_path / "runs" / "first", make_record())
    for name in ("final/model.safetensors", "checkpoints/step-00000100.pt", "git.diff"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(name.encode())
    for name in (
        "report/report.html",
        "export/config.json",
        "glue/.history.jsonl.1.tmp",
        ".lock",
        "first.record.zip",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not of the record")
    return folder


def test_holds_the_record_and_knows_the_weights_by_hash(run: Path, tmp_path: Path) -> None:
    listed = pack(run, tmp_path / "a.zip")
    predictions = {
        f"glue/pretrained/predictions/{p.name}" for p in run.glob("glue/pretrained/predictions/*")
    }
    kept = {
        "record.json",
        "budget.jsonl",
        "metrics.jsonl",
        "config.yaml",
        "environment.json",
        "git.diff",
        "glue/history.jsonl",
        *predictions,
    }
    assert listed["files"].keys() == kept and len(predictions) > 20
    weights = run / "final" / "model.safetensors"
    assert listed["outside"].keys() == {"final/model.safetensors", "checkpoints/step-00000100.pt"}
    assert listed["outside"]["final/model.safetensors"] == {
        "sha256": file_sha256(weights),
        "bytes": 23,
    }
    unpacked = unpack(tmp_path / "a.zip", tmp_path / "out")
    assert {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file()} == {
        *kept,
        LIST,
    }
    assert all((unpacked / name).read_bytes() == (run / name).read_bytes() for name in kept)
    assert altered_since(unpacked) == []


def test_the_same_run_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    pack(run, tmp_path / "a.zip")
    for path in run.rglob("*"):
        path.touch()
    (run / "report" / "more.html").write_text("made meanwhile")
    pack(run, tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_what_lies_on_another_disk_is_in_it(run: Path, tmp_path: Path) -> None:
    listed = pack(run, tmp_path / "a.zip")
    for name in ("glue", "final"):
        shutil.move(run / name, tmp_path / "disk" / name)
        (run / name).symlink_to(tmp_path / "disk" / name)
    (run / "data").symlink_to("/")  # is not looked into
    (tmp_path / "disk" / "glue" / "again").symlink_to(run)  # nor gone around in
    assert pack(run, tmp_path / "b.zip") == listed
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_weights_are_not_read_to_know_that_nothing_was_altered(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / LIST).write_bytes(archive._text(archive.list_of(run)))
    seen, original = list[str](), archive.file_sha256
    monkeypatch.setattr(
        archive, "file_sha256", lambda path: seen.append(path.parent.name) or original(path)
    )
    assert (
        altered_since(run) == []
        and "predictions" in seen
        and not {"final", "checkpoints"} & set(seen)
    )


def test_every_change_is_named(run: Path, tmp_path: Path) -> None:
    """One bit anywhere in any file, the list itself included; a file more, a file less. A report in it is no change."""
    pack(run, tmp_path / "a.zip")
    folder = unpack(tmp_path / "a.zip", tmp_path / "out")
    (folder / "report").mkdir()
    (folder / "report" / "report.html").write_text("made of it")
    assert altered_since(folder) == []
    for path in [
        path for path in folder.rglob("*") if path.is_file() and path.parent.name != "report"
    ]:
        name, whole = str(path.relative_to(folder)), path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            expected = f"{LIST} is not as it was written" if name == LIST else f"{name} was changed"
            assert altered_since(folder) == [expected]
        path.write_bytes(whole)
    (folder / "config.yaml").rename(folder / "README.md")
    assert altered_since(folder) == ["config.yaml is missing", f"README.md is not in {LIST}"]


@pytest.mark.parametrize("files", [[[1, 2], ["a", "b"]], [], None, "abc"])
def test_a_list_of_another_form_is_not_as_it_was_written(run: Path, files: Any) -> None:
    """However well it is signed."""
    (run / LIST).write_bytes(
        archive._text(archive._signed({**archive.list_of(run), "files": files}))
    )
    assert altered_since(run) == [f"{LIST} is not as it was written"]


def test_a_list_that_was_made_to_agree_is_another(run: Path, tmp_path: Path) -> None:
    """The SHA-256 at its end stands for the whole run."""
    before = pack(run, tmp_path / "a.zip")
    (run / "final" / "model.safetensors").write_bytes(b"other weights")
    assert pack(run, tmp_path / "a.zip")["sha256"] != before["sha256"]


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, content in files.items():
            bundle.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../record.json",
            "a/../../record.json",
            "/record.json",
            "a/glue/../../../x",
            "a\\..\\record.json",
        ),
        *(
            "a/.git/config",
            "a/glue/",
            "a/cramming/pretrain.py",
            "record.json",
            "b/record.json",
            "a/checkpoints/x.pt",
        ),
    ],
)
def test_nothing_is_unpacked_elsewhere(tmp_path: Path, name: str) -> None:
    whole = {f"a/{LIST}": b"{}", "a/record.json": b"{}"}
    (tmp_path / "a.zip").write_bytes(packed({**whole, name: b"x"}))
    with pytest.raises(UserError, match=r"a.zip: (holds|not one run folder)"):
        unpack(tmp_path / "a.zip", tmp_path / "deep" / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["a.zip"]


def test_a_link_becomes_no_link(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("a/record.json")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as bundle:
        bundle.writestr(f"a/{LIST}", "{}")
        bundle.writestr(link, "/etc/passwd")
    folder = unpack(tmp_path / "a.zip", tmp_path / "out")
    assert (
        not (folder / "record.json").is_symlink()
        and (folder / "record.json").read_text() == "/etc/passwd"
    )


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that says its size, nor one that does not, nor one file twice."""
    monkeypatch.setattr(archive, "MOST_BYTES", 10_000)
    whole = {f"a/{LIST}": b"{}", "a/record.json": bytes(20_000)}
    says = packed(whole)
    lies = says.replace((20_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    twice = packed({**whole, "a/record.json": b"{}", "a/config.yaml": b"{}"}).replace(
        b"config.yaml", b"record.json"
    )
    for content, reason in ((says, "at most"), (lies, "can be unpacked"), (twice, "some twice")):
        (tmp_path / "a.zip").write_bytes(content)
        with pytest.raises(UserError, match=reason):
            unpack(tmp_path / "a.zip", tmp_path / "out")


def beyond_any_file(content: bytes) -> bytes:
    """Of an archive of one file: its entry, in the form for large archives, begins behind byte 2^63."""
    begins, end = content.rfind(b"PK\x01\x02"), content.rfind(b"PK\x05\x06")
    entry, more = bytearray(content[begins:end]), struct.pack("<HHQ", 1, 8, 2**63 + 5)
    entry[30:32], entry[42:46] = struct.pack("<H", len(more)), b"\xff" * 4
    last = bytearray(content[end:])
    last[12:16] = struct.pack("<I", len(entry) + len(more))
    return content[:begins] + entry + more + last


def test_an_entry_beyond_any_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(beyond_any_file(packed({f"a/{LIST}": b"{}"})))
    with pytest.raises(UserError, match="not an archive that can be unpacked"):
        unpack(tmp_path / "a.zip", tmp_path / "out")


def test_a_damaged_archive_is_refused_in_one_line_or_its_file_is_named(
    run: Path, tmp_path: Path
) -> None:
    for path in run.glob("glue/pretrained/predictions/*"):
        path.unlink()
    pack(run, tmp_path / "a.zip")
    whole, outcomes = (tmp_path / "a.zip").read_bytes(), set()
    for place in range(0, len(whole), 199):
        (tmp_path / "b.zip").write_bytes(
            whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
        )
        try:
            with opened(tmp_path / "b.zip") as folder:
                outcomes.add(
                    "altered" if altered_since(folder) else "as it was"
                )  # dates and rights mean nothing
        except UserError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    (tmp_path / "b.zip").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not an archive"), opened(tmp_path / "b.zip"):
        pass
    assert "refused" in outcomes
    assert json.loads((run / "record.json").read_text())["name"] == "first"


def test_the_report_reads_archives_beside_folders(run: Path, tmp_path: Path) -> None:
    """With the same findings as unpacked; one that was altered, or is none, is listed with what is wrong."""
    pack(run, tmp_path / "a.record.zip")
    folder = unpack(tmp_path / "a.record.zip", tmp_path / "out")
    verdict = load_run(folder).verdict
    (folder / "config.yaml").write_text("budget: {hours: 1000}")
    with zipfile.ZipFile(tmp_path / "altered.record.zip", "w") as bundle:
        for path in (path for path in folder.rglob("*") if path.is_file()):
            bundle.write(path, f"first/{path.relative_to(folder)}")
    (tmp_path / "none.record.zip").write_bytes(b"PK")
    found, altered, none = load_runs(tmp_path)
    assert found.folder == tmp_path / "a.record.zip" and found.verdict == verdict and found.metrics
    assert altered.problem == f"{altered.folder}: config.yaml was changed"
    assert none.problem and "not an archive" in none.problem
    board = tmp_path / "board"
    report({"runs": str(tmp_path), "report": REPORT | {"out": str(board)}})
    assert "altered.record.zip" in (page := (board / "leaderboard.md").read_text(encoding="utf-8"))
    assert "(../a.record.zip)" in page


def test_processes_change_nothing_of_the_report(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, written = run.parent, list[dict[str, bytes]]()
    shutil.copytree(run, runs / "two")
    pack(run, runs / "a.record.zip")
    (runs / "none.record.zip").write_bytes(b"PK")
    monkeypatch.setattr(load, "usable_cores", lambda: 2)
    start, started = process_pool._start, list[object]()
    monkeypatch.setattr(process_pool, "_start", lambda begin: started.append(begin) or start(begin))
    for worth, processes in ((load.BYTES_PER_PROCESS, 0), (1, 2)):
        monkeypatch.setattr(load, "BYTES_PER_PROCESS", worth)
        report({"runs": str(runs), "report": REPORT | {"out": None}})
        assert len(started) == processes
        written.append({str(path): path.read_bytes() for path in runs.rglob("*") if path.is_file()})
    assert written[0] == written[1] and any("two/report/report.html" in path for path in written[0])


def test_what_is_too_large_is_not_packed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MOST_BYTES", 100)
    with pytest.raises(UserError, match="a run's archive has at most"):
        archive.pack(run, tmp_path / "a.zip")
    assert not (tmp_path / "a.zip").exists()
