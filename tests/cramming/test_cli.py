"""The command line: a table of verbs; a user's mistake is one line on stderr and exit code 2."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml

from cramming import __version__, cli, verbs
from cramming.config import UserError
from cramming.invocation import Call, Invocation
from cramming.overrides import compose
from cramming.runlog import RUN_LOG, End, EventLog, Start


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`run("pretrain", "--name", "a")` in this process and an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["cramming", *arguments])
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        return Ended(code, *capfd.readouterr())

    return call


def is_one_line(text: str) -> bool:
    return text.startswith("cramming: ") and text.endswith("\n") and text.count("\n") == 1


Verb = tuple[dict[str, Any], Invocation]


@pytest.fixture
def verb_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Verb]]:
    """Replaces `pretrain` by a stub; yields the recipes and invocations it was called with."""
    calls: list[Verb] = []
    use_stub(monkeypatch, "pretrain", lambda recipe, call: calls.append((recipe, call)))
    yield calls


def use_stub(monkeypatch: pytest.MonkeyPatch, verb: str, main: Callable[..., Any]) -> None:
    """Replaces the `main` of a verb."""
    stub = ModuleType("stub_verb")
    stub.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stub_verb", stub)
    monkeypatch.setitem(verbs.MODULES, verb, "stub_verb")
    monkeypatch.setitem(verbs.DEPENDENCIES, verb, {})


def test_the_everyday_verbs_come_first_in_the_help(run: Run) -> None:
    for arguments in ((), ("--help",), ("-h",)):
        ended = run(*arguments)
        assert ended.code == 0
        everyday, _ = ended.out.split("Other verbs")
        shown = re.findall(r"^[│|] (\w+) ", everyday.split("Everyday verbs")[1], re.MULTILINE)
        assert shown == ["run", "prepare", "pretrain", "glue", "report", "verify", "adapt"]
        assert all(f" {verb} " in ended.out for verb in verbs.MODULES)
    assert run("--version") == (0, __version__ + "\n", "")


@pytest.mark.parametrize("verb", ["run", *verbs.MODULES])
def test_each_verb_explains_its_options(run: Run, verb: str) -> None:
    ended = run(verb, "--help")
    assert ended.code == 0 and "Usage: cramming " + verb in ended.out and ended.err == ""


def test_an_unsupported_system_is_refused_at_the_start(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Windows")
    ended = run("pretrain")
    assert (
        ended.code == 2
        and is_one_line(ended.err)
        and "Windows: runs on Linux and macOS only" in ended.err
    )


@pytest.mark.parametrize("verb", ["run", "glue", "report"])
def test_what_is_one_process_says_so_under_torchrun(
    run: Run, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    ended = run(verb)
    assert (
        ended.code == 2
        and is_one_line(ended.err)
        and f"torchrun: {verb} is one process" in ended.err
    )


def test_a_verb_gets_the_recipe_and_beside_it_the_options(run: Run, verb_calls: list[Verb]) -> None:
    typed = ["model.hidden_size=64", "optim.betas=[0.8,0.9]", "--name", "1e3", "--runs", "~/läufe"]
    assert run("pretrain", *typed, "--nonce", "1e3", "--tracker", "wandb").code == 0
    ((recipe, invocation),) = verb_calls
    home = Path.home()
    assert (invocation.name, invocation.runs) == ("1e3", home / "läufe"), (
        "taken literally but for ~"
    )
    assert invocation.trackers == ("wandb",) and recipe["nonce"] == "1e3"
    assert recipe["model"]["hidden_size"] == 64
    assert recipe["optim"]["betas"] == [0.8, 0.9]
    assert not recipe.keys() & {"name", "runs", "corpora", "device", "resume", "trackers"}

    def plain(node: Any) -> bool:
        if isinstance(node, dict):
            return all(map(plain, node.values()))
        if type(node) is list:
            return all(map(plain, node))
        return type(node) in (str, int, float, bool, type(None))

    assert plain(recipe)


@pytest.mark.parametrize("verb", verbs.OPTIONS)
def test_verbs_of_a_pipeline_take_a_choice_that_is_named_like_an_option(verb: str) -> None:
    """`run` hands its recipe on, and `glue` has an option `--model`."""
    handed_on = Invocation(overrides=("model=tiny",)).arguments(*verbs.OPTIONS[verb])
    call = cli.parse([verb, *handed_on])
    assert call is not None and call.invocation.overrides == ("model=tiny",)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["frobnicate"], ["'frobnicate'"]),
        (["pretrian"], ["pretrian", "Did you mean", "pretrain"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["pretrain", "--nam", "a"], ["--nam", "--name"]),
        (["pretrain", "--name"], ["--name"]),
        (["pretrain", "name=a"], ["name=a: an option", "Did you mean --name a?"]),
        (["pretrain", "resume=true"], ["resume=true", "Did you mean --resume?"]),
        (["plan", "plan.device=A100"], ["plan.device=A100", "Did you mean --device A100?"]),
        (["duel", "--base", "", "--candidate", "a=1", "duel.pairs=3"], ["--pairs 3"]),
        (["glue", "--device", "gpu"], ["--device", "'auto', 'cpu', 'cuda'"]),
        (["inspect", "x", "--documents", "-1"], ["--documents"]),
        (["inspect", "x", "--split", "test"], ["--split", "'train', 'validation'"]),
        (["duel", "--base", "", "--candidate", "a=1", "--error", "0.9"], ["--error"]),
        (["bench", "--rounds", "0"], ["--rounds"]),
        (["plan", "--memory-gb", "0"], ["--memory-gb"]),
        (["inspect", "x", "--split", "test"], ["--split", "'train', 'validation'"]),
        (["project", "x", "--hours", "0"], ["--hours"]),
        (["duel", "--base", "", "--candidate", "a=1", "--pairs", "99"], ["--pairs"]),
        (["study"], ["WHAT"]),
        (["verify"], ["PATH"]),
        (["pretrain", "colour=red"], ["colour=red: no such setting"]),
        (["pretrain", "+colour=red"], ["colour=red: no setting"]),
        (["pretrain", "budget=steps"], ["budget=steps", "budget.<name>="]),
        (["pretrain", "seed=abc"], ["seed=abc: expected", "whole number"]),
        (["pretrain", "optim.lr=1e-3,2e-3"], ["optim.lr=1e-3,2e-3", "--sweep"]),
        (["pretrain", "--config-dir", "nowhere"], ["--config-dir=nowhere: no such folder"]),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    run: Run, verb_calls: list[Verb], arguments: list[str], names: list[str], tmp_path: Path
) -> None:
    ended = run(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert is_one_line(ended.err), ended.err
    assert all(name in ended.err for name in names), ended.err
    assert verb_calls == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "names"),
    [
        (UserError("model.x: is wrong"), 2, "model.x: is wrong"),
        (UserError("two\nlines"), 2, "two lines"),
        (UserError("a stranger's \x1b[2J"), 2, "a stranger's \ufffd[2J"),
        (
            PermissionError(13, "Permission denied", "runs"),
            2,
            "runs: Permission denied. ",
        ),
        (NotADirectoryError(20, "Not a directory", "a.txt/b"), 2, "a.txt/b: Not a directory"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_how_a_verb_may_end(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, names: str
) -> None:
    def fail(recipe: dict[str, Any], invocation: Invocation) -> None:
        raise error

    use_stub(monkeypatch, "pretrain", fail)
    ended = run("pretrain")
    assert ended.code == code
    assert is_one_line(ended.err), ended.err
    assert names in ended.err


@pytest.mark.parametrize("error", [ValueError("ours"), FileNotFoundError(2, "ours")])
def test_our_own_defects_keep_their_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(recipe: dict[str, Any], invocation: Invocation) -> None:
        raise error

    use_stub(monkeypatch, "pretrain", fail)
    with pytest.raises(type(error), match="ours"):
        run("pretrain")


def test_a_recipe_is_printed_as_it_is_read(run: Run, tmp_path: Path) -> None:
    ended = run("study", "data", "--show-config", "optim.lr=0.5")
    assert ended.code == 0
    assert yaml.safe_load(ended.out) == compose(["optim.lr=0.5"])
    assert list(tmp_path.iterdir()) == []


def write_ended_run(folder: Path, status: str, *overrides: str) -> None:
    """Write the log of a run that ended without a model."""
    folder.mkdir(parents=True)
    versions = {"suite_version": "1", "rules_version": "7", "division": "closed"}
    budget = {"unit": "hours", "limit": 0.05, "clock": "wall"}
    log = EventLog(folder / RUN_LOG)
    recipe = compose(overrides)
    log.append(Start(name=folder.name, elapsed=1, wall=2, recipe=recipe, **versions, **budget))
    reason = "diverged" if status == "diverged" else "finished"
    log.append(End(elapsed=2, wall=3, steps=0, reason=reason))
    log.close()


def recipe_of(*words: str) -> dict[str, Any]:
    call = cli.parse(list(words))
    assert isinstance(call, Call)
    return verbs.recipe_of(call)


@pytest.mark.parametrize("words", [["pretrain", "--resume"], ["run", "--resume"], ["glue"]])
def test_a_run_that_is_resumed_or_scored_has_its_own_recipe(
    tmp_path: Path, words: list[str]
) -> None:
    write_ended_run(tmp_path / "novels", "diverged", "model=small", "seed=7")
    place = ["--runs", str(tmp_path), "--name", "novels"]
    assert recipe_of(*words, *place) == compose(["model=small", "seed=7"])
    changed = recipe_of(*words, *place, "eval.seeds=[5]")
    assert changed["eval"]["seeds"] == [5] and changed["seed"] == 7
    assert recipe_of("pretrain", *place) == compose(), "another run of this name is refused later"


class TestChildren:
    """`run` and `--sweep` start one process per verb and per point."""

    @pytest.fixture
    def commands(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        started: list[list[str]] = []

        def note(command: list[str], stdout: int | None = None) -> int:
            started.append(command[3:])
            return {"--name=bad": 3, "--name=killed": -15}.get(command[4], 0)

        monkeypatch.setattr("cramming.children.run_process", note)
        monkeypatch.setattr(verbs, "run_process", note)
        monkeypatch.setattr(verbs, "check", lambda *_, **__: [])
        return started

    def test_run_is_the_pipeline_with_the_same_recipe(
        self, run: Run, commands: list[list[str]]
    ) -> None:
        typed = ["--runs=r", "--corpora=c", "--device=cpu"]
        assert run("run", "--name=a", *typed, "--nonce=n", "seed=3", "optim.lr=1e-3").code == 0
        recipe = ["seed=3", "optim.lr=1e-3"]
        of_run = ["--name=a", *typed, "--nonce=n", *recipe]
        assert commands == [
            ["run", "--check", *of_run],
            ["prepare", "--corpora=c", *recipe],
            ["pretrain", *of_run],
            ["glue", "--name=a", *typed, *recipe],
            ["report", "--runs=r"],
        ]
        for command in commands:
            assert cli.parse(command) is not None

    @pytest.mark.parametrize(("name", "code"), [("bad", 3), ("killed", 143)])
    def test_a_verb_that_fails_ends_the_pipeline(
        self, run: Run, commands: list[list[str]], name: str, code: int
    ) -> None:
        assert run("run", f"--name={name}").code in (code, 0)
        ended = run("pretrain", "--sweep", f"--name={name}", "eval.seeds=[0]")
        assert ended.code == code and len(commands) >= 1

    def test_a_sweep_starts_one_process_per_point_and_ends_with_a_table(
        self, run: Run, commands: list[list[str]]
    ) -> None:
        ended = run("pretrain", "--sweep", "--name", "lr", "optim.lr=1e-3,2e-3", "model=tiny")
        assert ended.code == 0
        assert [command[1] for command in commands] == ["--name=lr-0.001", "--name=lr-0.002"]
        assert [command[-2:] for command in commands] == [
            ["optim.lr=0.001", "model=tiny"],
            ["optim.lr=0.002", "model=tiny"],
        ]
        assert "validation loss" in ended.out and "lr-0.002" in ended.out

    def test_a_sweep_that_is_checked_or_printed_starts_nothing(
        self, run: Run, commands: list[list[str]]
    ) -> None:
        checked = run("pretrain", "--sweep", "--check", "seed=1,2")
        assert checked.code == 0 and "2 points, all in order" in checked.out and not commands
        assert run("pretrain", "--sweep", "--show-config", "seed=1,2").code == 2 and not commands

    def test_a_grid_of_fine_tunings_is_of_one_run(
        self, run: Run, commands: list[list[str]]
    ) -> None:
        assert run("glue", "--sweep", "--name=a", "eval.hyperparameters.epochs=1,2").code == 0
        assert [command[1] for command in commands] == ["--name=a"] * 2

    def test_a_mistake_in_any_point_is_found_before_the_first_begins(
        self, run: Run, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def check(verb: str, recipe: dict[str, Any], *_: object, **__: object) -> list[str]:
            if recipe["train"]["micro_batch"] == 3:
                raise UserError("train.batch_size=16: not a multiple")
            return []

        monkeypatch.setattr(verbs, "check", check)
        ended = run("pretrain", "--sweep", "budget.steps=5", "train.micro_batch=8,3")
        assert ended.code == 2 and is_one_line(ended.err) and not commands
        assert ended.err.startswith("cramming: train.micro_batch=3: train.batch_size"), (
            "what varies"
        )

    @pytest.mark.parametrize("status", ["diverged", "exhausted"])
    def test_a_point_that_left_no_model_does_not_hold_up_the_others(
        self,
        run: Run,
        commands: list[list[str]],
        tmp_path: Path,
        status: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """In this call, or in one before."""
        sweep = ("--sweep", "--name=a", "optim.lr=1,2")

        def diverge(command: list[str], stdout: int | None = None) -> int:
            commands.append(command[3:])
            if "--name=a-1" in command:
                write_ended_run(tmp_path / "runs" / "a-1", status, "optim.lr=1")
                return 2
            return 0

        with monkeypatch.context() as patch:
            patch.setattr(verbs, "run_process", diverge)
            ended = run("pretrain", *sweep)
        assert ended.code == 0 and [command[1] for command in commands] == [
            "--name=a-1",
            "--name=a-2",
        ]
        assert status in ended.out
        commands.clear()
        refused = run("pretrain", *sweep)
        assert refused.code == 2 and "--name=a-1" in refused.err and not commands
        for words in (["pretrain", "--resume"], ["run", "--resume"], ["glue"]):
            ended = run(*words, *sweep)
            assert ended.code == 0 and f"a-1: its run {status} without a model" in ended.out
            assert [command[:2] for command in commands] == [[words[0], "--name=a-2"]]
            commands.clear()

    def test_two_points_of_one_name_are_refused_before_the_first_begins(
        self, run: Run, commands: list[list[str]]
    ) -> None:
        ended = run("run", "--sweep", "eval.seeds=[0],[1]")
        assert ended.code == 2 and "several points of the sweep have this name" in ended.err
        assert not commands

    def test_children_find_what_is_in_a_folder_of_the_users(
        self, run: Run, commands: list[list[str]], tmp_path: Path
    ) -> None:
        (tmp_path / "my, own" / "experiment").mkdir(parents=True)
        (tmp_path / "my, own" / "experiment" / "mine.yaml").write_text(
            "# @package _global_\nseed: 5\n"
        )
        for words in (["run"], ["pretrain", "--sweep", "optim.lr=1,2"]):
            assert run(*words, "--config-dir=my, own", "experiment=mine").code == 0
            with_recipe = [command for command in commands if command[0] != "report"]
            assert len(with_recipe) in (2, 4)
            for command in with_recipe:
                assert recipe_of(*command)["seed"] == 5
            commands.clear()

    def test_a_file_of_the_users_that_ours_would_hide_is_refused(
        self, run: Run, tmp_path: Path
    ) -> None:
        (tmp_path / "my" / "model").mkdir(parents=True)
        (tmp_path / "my" / "model" / "tiny.yaml").touch()
        ended = run("pretrain", "--config-dir", "my", "--check")
        assert (
            ended.code == 2
            and is_one_line(ended.err)
            and "my: model/tiny.yaml is in conf/ too" in ended.err
        )


HERE = Invocation(device="cpu")


class TestCheck:
    """`--check`: a mistake that a verb would find in its turn, at once and with nothing written."""

    @pytest.mark.parametrize(
        ("arguments", "names"),
        [
            (["eval=glue_sane"], ["eval.data_dir is not set"]),
            (
                ["eval=glue_sane", "eval.data_dir=/nowhere/GLUE"],
                ["eval.data_dir=/nowhere/GLUE: no GLUE task found"],
            ),
            (["eval.tasks=[kola]"], ["eval.tasks", "kola", "cola"]),
            (
                ["model=bert-base", "eval.hyperparameters.max_length=4096"],
                ["max_length=4096", "512 positions"],
            ),
            (["optim.lr=-1"], ["optim"]),
            (["forced=[gibberish]"], ["forced=gibberish: unknown choice"]),
            (["train.sequence_length=100000"], ["train.sequence_length=100000"]),
            (["data=text", "data.paths=[nowhere.txt]"], ["nowhere.txt"]),
            (
                ["train.validation_corpus=/nowhere"],
                ["train.validation_corpus=/nowhere: no corpus there"],
            ),
        ],
    )
    def test_of_a_run_finds_the_mistake_of_any_verb(
        self, compose: Callable[..., dict[str, Any]], arguments: list[str], names: list[str]
    ) -> None:
        with pytest.raises(UserError) as caught:
            verbs.check("run", compose(*arguments), HERE)
        assert all(name in str(caught.value) for name in names), caught.value

    @pytest.mark.parametrize(
        ("options", "names"),
        [({"name": "a/b"}, "--name=a/b: "), ({"trackers": ("mine",)}, "--tracker=mine")],
    )
    def test_of_a_run_finds_a_wrong_option(
        self, compose: Callable[..., dict[str, Any]], options: dict[str, Any], names: str
    ) -> None:
        with pytest.raises(UserError, match=names):
            verbs.check("run", compose(), Invocation(**options))

    def test_names_a_place_where_nothing_can_be_made(
        self,
        compose: Callable[..., dict[str, Any]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        places = {"prepare": "corpora", "pretrain": "runs", "run": "runs"}
        (tmp_path / "file").touch()
        for verb, place in places.items():
            with pytest.raises(UserError, match=f"nothing can be made in {tmp_path}/file"):
                verbs.check(verb, compose(), Invocation(**{place: tmp_path / "file" / "b"}))
        monkeypatch.setattr(
            os, "access", lambda path, mode: path != tmp_path
        )  # root may write everywhere
        for verb, place in places.items():
            with pytest.raises(
                UserError, match=f"{tmp_path}/a/b/.*: nothing can be made in {tmp_path}"
            ):
                verbs.check(verb, compose(), Invocation(**{place: tmp_path / "a" / "b"}))

    def test_leaves_a_corpus_to_prepare(
        self, compose: Callable[..., dict[str, Any]], tiny_overrides: list[str], tmp_path: Path
    ) -> None:
        """`study` checks with `pretrain --check` before it prepares, whether that was interrupted before or not."""
        recipe = compose(*tiny_overrides, f"data.corpus={tmp_path / 'c'}")
        for _ in ("no folder", "half-written"):
            for verb in ("run", "pretrain"):
                lines = verbs.check(verb, recipe, Invocation(runs=tmp_path, device="cpu"))
                assert any("c, not prepared yet" in line for line in lines)
            (tmp_path / "c").mkdir(exist_ok=True)

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (
                ["train.order=sentence_length"],
                r"train\.order=sentence_length: .* has no such order file",
            ),
            (
                ["train.sequence_length=2048", "model.max_length=2048"],
                r"validation split: \d+ tokens are fewer",
            ),
            (["model.vocab_size=64"], r"model\.vocab_size=64: the tokenizer of .* has 300 entries"),
            (["train.validation_corpus={other}"], r"it has another tokenizer than"),
            (["data.corpus={cut}"], r"train-00001\.bin: 0 bytes, should have \d+ bytes"),
        ],
    )
    @pytest.mark.parametrize("verb", ["run", "pretrain"])
    def test_opens_a_corpus_as_the_run_does(
        self,
        compose: Callable[..., dict[str, Any]],
        tiny_overrides: list[str],
        make_corpus: Callable[..., Path],
        tmp_path: Path,
        verb: str,
        overrides: list[str],
        message: str,
    ) -> None:
        other, cut = (
            make_corpus(tmp_path / "other", spelling="<pad>"),
            make_corpus(tmp_path / "cut"),
        )
        (cut / "train-00001.bin").write_bytes(b"")
        values = [override.format(other=other, cut=cut) for override in overrides]
        with pytest.raises(UserError, match=message):
            verbs.check(verb, compose(*tiny_overrides, *values), Invocation(runs=tmp_path))

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (
                ["parallel=zero1", "train.micro_batch=8", "optim=muon"],
                "optim.name=muon: not where a process has a part of each weight",
            ),
            (
                ["train.batch_size=8", "train.micro_batch=8"],
                "not a multiple of train.micro_batch=8 x 2 process(es)",
            ),
        ],
    )
    def test_under_torchrun_is_about_all_of_its_processes(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
    ) -> None:
        assert run("pretrain", *arguments, "--check").code == 0
        monkeypatch.setenv("WORLD_SIZE", "2")
        for more in (["--check"], ["--sweep", "seed=1,2"]):
            ended = run("pretrain", *arguments, *more)
            assert ended.code == 2 and is_one_line(ended.err) and says in ended.err

    def test_a_mesh_needs_as_many_processes(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for processes in ("1", "2"):
            monkeypatch.setenv("WORLD_SIZE", processes)
            ended = run("pretrain", "parallel.dp=3", "--check")
            assert ended.code == 2 and is_one_line(ended.err) and "parallel.dp=3" in ended.err

    def test_says_what_would_run(self, run: Run, tmp_path: Path) -> None:
        ended = run("run", "--check")
        assert (ended.code, ended.err) == (0, "")
        for word in ("3 minutes", "tokens", "disk: ", "tasks: ", "all in order"):
            assert word in ended.out
        assert "5 steps" in run("pretrain", "--check", "budget.steps=5").out
        ended = run("run", "experiment=crammed-bert-day", "data=embedded", "--check")
        assert (
            ended.code == 2 and is_one_line(ended.err) and "eval.data_dir is not set" in ended.err
        )
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["lr=1/a", "a,b.record.zip", "b (1).record.zip", "${seed}.record.zip", "é'"]
)
def test_a_path_behind_a_verb_is_taken_as_it_is(name: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    for verb in ("verify", "submit"):
        ended = run(verb, name)
        said = ended.out + ended.err
        assert name in said and ("no such run log" in said or "no finished corpus" in said), ended


def test_sigterm_is_one_line_and_code_143(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned = []

    def work(recipe: dict[str, Any], invocation: Invocation, **options: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleaned.append(True)

    use_stub(monkeypatch, "glue", work)
    assert run("glue") == (143, "", "cramming: terminated\n")
    assert cleaned


WRAPPED = """
    try:
        raise cli.Terminated if sys.argv[-1] == "--name=SIGTERM" else KeyboardInterrupt
    except KeyboardInterrupt as interrupt:
        raise ImportError("initialization failed") from interrupt
"""
DESTROYED = """
    class Slow:
        def __del__(self):
            os.kill(os.getpid(), getattr(signal, sys.argv[-1].removeprefix("--name=")))
    Slow()
    time.sleep(10)
    print("went on")
"""


@pytest.mark.parametrize(
    "work", [WRAPPED, DESTROYED], ids=["wrapped by a library", "in a destructor"]
)
@pytest.mark.parametrize(
    ("name", "code", "said"), [("SIGTERM", 143, "terminated"), ("SIGINT", 130, "interrupted")]
)
def test_an_interrupt_ends_the_verb_wherever_it_comes(
    tmp_path: Path, work: str, name: str, code: int, said: str
) -> None:
    """Also while a compiled module is imported, which answers with an error of its own."""
    program = f"""
import os, signal, sys, time, types
from cramming import cli, verbs
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
def work(*arguments, **options): {work}
sys.modules["stub_verb"] = types.SimpleNamespace(main=work)
verbs.MODULES["glue"] = "stub_verb"
cli.main()
"""
    command = [sys.executable, "-c", program, "glue", f"--name={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"cramming: {said}\n")


def test_an_interrupt_while_options_are_read_is_one_line(tmp_path: Path) -> None:
    program = """
import sys
from cramming import cli
def interrupt(*_):
    raise KeyboardInterrupt
cli._call = interrupt
cli.main()
"""
    command = [sys.executable, "-c", program, "glue"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "cramming: interrupted\n")


def test_an_interrupt_of_the_first_import_is_one_line() -> None:
    program = """
import sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "cramming.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from cramming.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "cramming: interrupted\n")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("cramming stu", {"study"}),
        ("cramming pretrain --na", {"--name"}),
        ("cramming study masking optim=mu", {"optim=muon"}),
        ("cramming pretrain --name a optim.lr_w", {"optim.lr_width="}),
    ],
)
def test_a_shell_completes_verbs_options_and_settings(
    tmp_path: Path, line: str, offered: set[str]
) -> None:
    environment = {
        **os.environ,
        "_CRAMMING_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    command = [sys.executable, "-m", "cramming"]
    done = subprocess.run(
        command, text=True, capture_output=True, check=False, cwd=tmp_path, env=environment
    )
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize(
    "said",
    [
        "Connection closed by peer [127.0.0.1]:1234",
        "Read error [127.0.0.1]:1234: Connection reset by peer. This is typically caused by a remote worker hanging",
        "writev [127.0.0.1]:1234: Broken pipe",
    ],
)
def test_a_process_whose_neighbour_has_ended_says_so_in_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """gloo's exception names no cause, which is in the output of the other process."""

    def fail(recipe: dict[str, Any], invocation: Invocation) -> None:
        raise RuntimeError(f"[gloo/transport/tcp/pair.cc:553] {said}")

    use_stub(monkeypatch, "pretrain", fail)
    ended = run("pretrain")
    assert ended.code == 2 and is_one_line(ended.err) and "another process" in ended.err
