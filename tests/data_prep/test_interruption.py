"""`prepare` killed, stopped, out of disk or started twice: it resumes to the same bytes, or says why not."""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming import files
from cramming.config import UserError
from cramming.data import manifest
from cramming.data.corpus import Corpus
from cramming.files import lock
from data_prep import prepare, shard_writer, stats, task_grid
from data_prep.readers import plain_text
from data_prep.stages import Stages
from data_prep.task_grid import PARTS, UNFINISHED
from tests.data_prep.calls import corpus_folder, main

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Corpus]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tasks in a file of some thousand bytes."""
    monkeypatch.setattr(plain_text, "RANGE_BYTES", 20_000)


def finished_tasks(folder: Path) -> int:
    return len(list((folder / PARTS).iterdir()))


def stopped(config: dict[str, Any]) -> None:
    """Prepare, but for the card and the manifest: an interruption comes when all shards are written."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare.corpus_card, "complete", interrupt)
        main(config)


@pytest.mark.parametrize("moment", ["first write", "giving up"])
def test_a_kill_while_the_folder_has_no_state_does_not_block_it(
    tmp_path: Path, text_file: Path, text_config: Config, moment: str, run: Run
) -> None:
    """Killed before the state has its name, or while all is cleared away for changed settings: the next run begins."""
    folder = tmp_path / "c"
    code = """
import json, os, signal, sys
from pathlib import Path
from data_prep import prepare
from tests.data_prep.calls import main
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
config, moment = json.loads(sys.argv[1]), sys.argv[2]
if moment == "first write":
    Path.replace = die
else:
    prepare.prepare = lambda job, grid: (job.folder / "validation-00000.bin").touch()
    main(config)
    unlink = Path.unlink
    Path.unlink = lambda path, **k: die() if path.suffix == ".bin" else unlink(path, **k)
    config["data"]["shard_tokens"] = 3000
main(config)
"""
    config = text_config(text_file, corpus=str(folder))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(
        [sys.executable, "-c", code, json.dumps(config), moment], env=environment, check=False
    )
    assert killed.returncode == -signal.SIGKILL and any(folder.iterdir())
    run(config)
    assert not [path.name for path in folder.iterdir() if path.name.startswith((".", "unfinished"))]


def test_text_made_by_other_rules_is_neither_resumed_nor_found_by_its_settings(
    tmp_path: Path,
    text_file: Path,
    text_config: Config,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
    capsys: Any,
) -> None:
    """It is read by its name as before, and `prepare` leaves it as it is."""
    config = text_config(text_file, corpus=str(tmp_path / "c"))
    config["corpora"], unnamed = str(tmp_path), config | {"data": config["data"] | {"corpus": None}}
    with monkeypatch.context() as earlier:
        earlier.setattr(manifest, "TEXT_VERSION", manifest.TEXT_VERSION - 1)
        name_before = corpus_folder(unnamed)
        stopped(config)
    assert corpus_folder(unnamed) != name_before
    run(config)
    assert "has changed: settings, or the rules for text); starting over" in capsys.readouterr().out
    monkeypatch.setattr(manifest, "TEXT_VERSION", manifest.TEXT_VERSION + 1)
    main(config)
    assert "by an earlier version's rules for text" in capsys.readouterr().out and Corpus.open(
        tmp_path / "c"
    )


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "000001", "train-00000.idx", "order-compressibility.npy"]
)
def test_a_disk_that_is_full_at_any_file_is_one_line_that_names_it(
    text_file: Path, text_config: Config, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whoever writes it: the libraries' own writing loses what the system said."""
    overwrite, (soft, hard) = files.overwrite_atomically, resource.getrlimit(resource.RLIMIT_FSIZE)

    def with_little_room(path: Path, *arguments: Any, **options: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200 if path.name == name else soft, hard))
        try:
            overwrite(path, *arguments, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    for module in (files, prepare, shard_writer, stats, task_grid):
        if hasattr(module, "overwrite_atomically"):
            monkeypatch.setattr(module, "overwrite_atomically", with_little_room)
    message = rf"{re.escape(name)}: File too large.*then run the same command again"
    with pytest.raises(UserError, match=message):
        main(text_config(text_file, workers=1))


def test_a_resume_does_no_finished_task_again(
    tmp_path: Path, text_file: Path, text_config: Config, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    config = text_config(text_file, corpus=str(tmp_path / "c"), workers=1)
    make, done = Stages.__call__, list[str]()

    def stop_after_two(stages: Stages, task: Any, folder: Path) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        make(stages, task, folder)
        done.append(task.name)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Stages, "__call__", stop_after_two)
        main(config)
    assert finished_tasks(tmp_path / "c") == 2
    first = done.copy()
    done.clear()

    def noted(stages: Stages, task: Any, folder: Path) -> None:
        done.append(task.name)
        make(stages, task, folder)

    monkeypatch.setattr(Stages, "__call__", noted)
    run(config)
    assert len(done) > 1 and not set(done) & set(first)


@pytest.mark.parametrize(
    "name", ["tokens.bin", "rows.npz", "excerpts.jsonl", "lines.json", "stats.json"]
)
@pytest.mark.parametrize("damage", [Path.unlink, lambda file: os.truncate(file, 100)])
def test_a_part_that_is_damaged_is_made_anew(
    tmp_path: Path,
    text_file: Path,
    text_config: Config,
    run: Run,
    contents: Any,
    damage: Callable[[Path], None],
    name: str,
) -> None:
    run(text_config(text_file, corpus=str(tmp_path / "whole"), workers=1))
    config = text_config(text_file, corpus=str(tmp_path / "broken"), workers=1)
    stopped(config)
    damage(tmp_path / "broken" / PARTS / "000001" / name)
    (tmp_path / "broken" / "train-00000.bin").write_bytes(b"other tokens")
    run(config)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_a_changed_source_says_how_much_finished_work_is_lost(
    tmp_path: Path, text_file: Path, text_config: Config, run: Run, capsys: Captured
) -> None:
    config = text_config(text_file, corpus=str(tmp_path / "c"), workers=1)
    stopped(config)
    finished = finished_tasks(tmp_path / "c")
    added = text_file.read_text(encoding="utf-8") + "\n\none more document, added since"
    text_file.write_text(added, encoding="utf-8")
    run(config)
    said = f"has changed: {text_file}); starting over, {finished} finished tasks are lost"
    assert finished > 3 and said in capsys.readouterr().out


def test_a_state_that_cannot_be_read_is_refused_and_nothing_is_deleted(
    tmp_path: Path, text_file: Path, text_config: Config
) -> None:
    config = text_config(text_file, corpus=str(tmp_path / "c"), workers=1)
    stopped(config)
    state = json.loads((tmp_path / "c" / UNFINISHED).read_text())
    del state["sources"]  # as another version wrote it
    (tmp_path / "c" / UNFINISHED).write_text(json.dumps(state))
    before = sorted(tmp_path.rglob("*"))
    message = r"damaged or of another version .*\. Delete .*/c and prepare anew"
    with pytest.raises(UserError, match=message):
        main(config)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("change", [lambda path: path.write_text("{"), lambda path: path.unlink()])
def test_another_tokenizer_in_an_interrupted_run_is_named_and_all_made_anew(
    tmp_path: Path,
    text_file: Path,
    text_config: Config,
    run: Run,
    capsys: Captured,
    change: Callable[[Path], object],
) -> None:
    config = text_config(text_file, corpus=str(tmp_path / "c"), workers=1)
    stopped(config)
    whole = (tmp_path / "c" / "tokenizer.json").read_bytes()
    change(tmp_path / "c" / "tokenizer.json")
    run(config)
    assert "not the tokenizer that it began with); starting over" in capsys.readouterr().out
    assert (tmp_path / "c" / "tokenizer.json").read_bytes() == whole


def test_two_at_once_are_refused(
    tmp_path: Path, text_file: Path, text_config: Config, run: Run
) -> None:
    config = text_config(text_file, corpus=str(tmp_path / "c"))
    with (
        lock(tmp_path / "c", "at work"),
        pytest.raises(UserError, match="another process is preparing this corpus"),
    ):
        main(config)
    run(config)


def test_a_finished_corpus_may_lie_where_nothing_can_be_written(
    text_file: Path, text_config: Config, monkeypatch: pytest.MonkeyPatch, run: Run, capsys: Any
) -> None:
    config = text_config(text_file)
    run(config)
    error = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(error))
    main(config)
    assert "already prepared" in capsys.readouterr().out


@pytest.mark.parametrize("damaged", ["", '{"shards": ', "[" * 100_000, "\udcff"])
def test_a_damaged_state_is_named(
    tmp_path: Path, text_file: Path, text_config: Config, damaged: str
) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / UNFINISHED).write_bytes(damaged.encode("utf-8", "surrogateescape"))
    with pytest.raises(
        UserError, match=r"unfinished\.json: damaged .*\. Delete .*c and prepare anew"
    ):
        main(text_config(text_file, corpus=str(tmp_path / "c")))


def test_an_error_keeps_what_was_finished_before(
    tmp_path: Path, text_file: Path, text_config: Config, run: Run, capsys: Captured
) -> None:
    """As when a disk is not there for a moment."""
    (tmp_path / "glue" / "CoLA").mkdir(parents=True)
    (tmp_path / "glue" / "CoLA" / "dev.tsv").write_text(
        "gj04\t1\t\tNothing of this stands in the text at all.\n"
    )
    tasks = {"decontaminate": {"tasks": str(tmp_path / "glue")}}
    config = text_config(text_file, corpus=str(tmp_path / "c"), workers=1, **tasks)
    stopped(config)
    (tmp_path / "glue").rename(tmp_path / "unmounted")
    message = r"no folder that holds one of CoLA.*; what is finished stays"
    with pytest.raises(UserError, match=message):
        main(config)
    (tmp_path / "unmounted").rename(tmp_path / "glue")
    capsys.readouterr()
    run(config)
    said = r"resuming an interrupted run, [1-9]\d* tasks are finished"
    assert re.search(said, capsys.readouterr().out)


def test_an_error_in_a_late_task_keeps_the_tasks_in_front(
    tmp_path: Path, text_file: Path, text_config: Config, made_up: Callable[..., list[str]]
) -> None:
    config = text_config(text_file, corpus=str(tmp_path / "first"), workers=1)
    main(config)
    tokenizer = {"path": str(tmp_path / "first" / "tokenizer.json")}
    late = tmp_path / "late.txt"
    late.write_bytes("\n\n".join(made_up(200)).encode() + b"\n\ncaf\xe9")
    config = text_config(late, corpus=str(tmp_path / "c"), workers=1, tokenizer=tokenizer)
    with pytest.raises(UserError, match=rf"not UTF-8 .*; what is finished stays in {tmp_path}/c$"):
        main(config)
    assert finished_tasks(tmp_path / "c") > 1
