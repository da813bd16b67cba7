"""`prepare` killed, stopped, out of disk or started twice: it goes on to the same bytes, or says why not."""

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
from data_prep import document_stats, prepare, shard_writer
from data_prep.prepare import UNFINISHED
from data_prep.resume_state import NEAR
from data_prep.sources import plain_text
from tests.data_prep.calls import corpus_folder, main

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Corpus]


def stopped(config: dict[str, Any]) -> None:
    """Prepare, but for the card and the manifest: an interruption comes when all shards are finished."""

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
    prepare.prepare = lambda job, state: (prepare._begin(job, state), (job.folder / "validation-00000.bin").touch())
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


def test_text_made_by_other_rules_is_neither_gone_on_with_nor_found_by_its_settings(
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


@pytest.mark.parametrize("name", ["tokenizer.json", "train-00000.idx", "order-compressibility.npy"])
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

    for module in (files, prepare, shard_writer, document_stats):
        if hasattr(module, "overwrite_atomically"):
            monkeypatch.setattr(module, "overwrite_atomically", with_little_room)
    with pytest.raises(
        UserError, match=rf"{re.escape(name)}: File too large; .*then run the same command again"
    ):
        main(text_config(text_file))


def test_resuming_does_not_tokenize_finished_shards_again(
    tmp_path: Path, text_file: Path, text_config: Config, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    config = text_config(
        text_file, corpus=str(tmp_path / "c"), shard_tokens=3000, workers=1
    )  # counted in this process
    encoded: list[int] = []
    encode, save = shard_writer.Encoder.__call__, prepare.Unfinished.save
    monkeypatch.setattr(
        shard_writer.Encoder,
        "__call__",
        lambda self, batch: (encoded.append(len(batch.texts)), encode(self, batch))[1],
    )
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", 500)

    def stop_after_five(self: prepare.Unfinished, folder: Path) -> None:
        save(self, folder)
        if len(self.shards["train"]) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare.Unfinished, "save", stop_after_five)
        main(config)
    shards = json.loads((tmp_path / "c" / UNFINISHED).read_text())["shards"]
    finished = sum(shard["documents"] for of_split in shards.values() for shard in of_split)
    encoded.clear()
    run(config)
    assert finished > 50 and sum(encoded) <= 300 - finished + 2


def test_a_resume_reads_no_finished_shard_and_counts_what_is_in_it(
    tmp_path: Path, text_file: Path, text_config: Config, run: Run
) -> None:
    """What stands in the shards is exchanged for other tokens: nothing that a resume counts tells of it."""
    manifests = []
    for name in ("whole", "broken"):
        config = text_config(text_file, corpus=str(tmp_path / name), shard_tokens=3000)
        stopped(config)
        shards = json.loads((tmp_path / name / UNFINISHED).read_text())["shards"]
        files = [
            tmp_path / name / shard["file"] for of_split in shards.values() for shard in of_split
        ]
        for file in files if name == "broken" else []:
            file.write_bytes(bytes(file.stat().st_size))
        main(config)
        manifests.append(manifest.Manifest.load(tmp_path / name / manifest.MANIFEST))
    whole, broken = manifests
    assert (
        whole.splits == broken.splits
        and whole.counts == broken.counts
        and whole.stages == broken.stages
    )
    assert len(files) > 5 and whole.statistics == broken.statistics
    with pytest.raises(UserError, match=r"train-00000\.bin"):
        Corpus.open(tmp_path / "broken", verify=True)


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: os.truncate(file, 100)])
def test_a_finished_shard_that_is_gone_or_cut_is_named_and_all_made_anew(
    tmp_path: Path,
    text_file: Path,
    text_config: Config,
    run: Run,
    capsys: Any,
    damage: Callable[[Path], None],
) -> None:
    config = text_config(text_file, corpus=str(tmp_path / "c"), shard_tokens=3000)
    stopped(config)
    damage(tmp_path / "c" / "train-00002.bin")
    run(config)
    said = capsys.readouterr().out
    assert "train-00002.bin: " in said and "cannot go on" in said and "starting over" in said


def test_a_changed_source_says_how_much_finished_work_is_made_anew(
    tmp_path: Path, text_file: Path, text_config: Config, run: Run, capsys: Any
) -> None:
    config = text_config(text_file, corpus=str(tmp_path / "c"), shard_tokens=3000)
    stopped(config)
    finished = sum(
        map(len, json.loads((tmp_path / "c" / UNFINISHED).read_text())["shards"].values())
    )
    text_file.write_text(
        text_file.read_text(encoding="utf-8") + "\n\none more document, added since",
        encoding="utf-8",
    )
    run(config)
    said = capsys.readouterr().out
    assert (
        finished > 5
        and f"has changed: {text_file}); starting over: {finished} finished shards go" in said
    )


def test_a_state_that_cannot_be_read_is_refused_and_nothing_is_deleted(
    tmp_path: Path, text_file: Path, text_config: Config
) -> None:
    config = text_config(text_file, corpus=str(tmp_path / "c"), shard_tokens=3000)
    stopped(config)
    state = json.loads((tmp_path / "c" / "unfinished.json").read_text())
    del state["token_use"]  # as an earlier version wrote it
    (tmp_path / "c" / "unfinished.json").write_text(json.dumps(state))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        UserError, match=r"damaged or of another version .*; delete .*/c and prepare anew"
    ):
        main(config)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("change", [lambda path: path.write_text("{"), lambda path: path.unlink()])
def test_another_tokenizer_in_an_interrupted_run_is_named_and_all_made_anew(
    tmp_path: Path,
    text_file: Path,
    text_config: Config,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], object],
) -> None:
    config = text_config(text_file, corpus=str(tmp_path / "c"), shard_tokens=3000)
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
        UserError, match=r"unfinished\.json: damaged .*; delete .*c and prepare anew"
    ):
        main(text_config(text_file, corpus=str(tmp_path / "c")))


def test_an_error_keeps_what_was_finished_before(
    tmp_path: Path, text_file: Path, text_config: Config, run: Run, capsys: Any
) -> None:
    """Of an earlier run, as when a disk is not there for a moment; and of a first one, whatever takes long."""
    (tmp_path / "glue" / "CoLA").mkdir(parents=True)
    (tmp_path / "glue" / "CoLA" / "dev.tsv").write_text(
        "gj04\t1\t\tNothing of this stands in the text at all.\n"
    )
    searched = {
        "near_duplicates": {"enabled": True},
        "decontaminate": {"tasks": str(tmp_path / "glue")},
    }
    config = text_config(text_file, corpus=str(tmp_path / "c"), shard_tokens=3000, **searched)
    with pytest.raises(
        UserError, match=rf"vocab_size=12 is too small: .*; what is finished stays in {tmp_path}/c$"
    ):
        main({**config, "tokenizer": {**config["tokenizer"], "vocab_size": 12}})
    assert (tmp_path / "c" / NEAR).is_file()
    stopped(config)
    (tmp_path / "glue").rename(tmp_path / "unmounted")
    with pytest.raises(
        UserError, match=r"no folder that holds one of CoLA.*; what is finished stays"
    ):
        main(config)
    (tmp_path / "unmounted").rename(tmp_path / "glue")
    capsys.readouterr()
    run(config)
    assert re.search(
        r"going on with an interrupted run, [1-9]\d* shards are finished", capsys.readouterr().out
    )
