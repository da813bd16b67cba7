"""The command line: a table of verbs; a user's mistake is one line on stderr and exit code 2."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from cramming import __version__, children, cli, completion
from cramming.config import UserError
from cramming.overrides import compose, with_quotes
from cramming.runlog import RUN_LOG, End, EventLog, Start


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`run("pretrain", "name=a")` in this process and an empty folder."""
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


@pytest.fixture
def verb_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Replaces `pretrain` by a stub; yields the settings it was called with."""
    calls: list[dict[str, Any]] = []
    stub = ModuleType("stub_verb")
    stub.main = calls.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stub_verb", stub)
    monkeypatch.setitem(cli.VERBS, "pretrain", cli.Verb("stub_verb:main", "stub"))
    yield calls


def test_what_it_says_without_a_verb(run: Run) -> None:
    for arguments in ((), ("--help",), ("-h",), ("help",)):
        ended = run(*arguments)
        assert ended.code == 0
        assert all(f"\n  {verb} " in ended.out for verb in cli.VERBS)
    assert run("--version") == (0, __version__ + "\n", "")


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


def test_a_verb_gets_the_whole_settings_as_plain_values(
    run: Run, verb_calls: list[dict[str, Any]]
) -> None:
    assert run("pretrain", "name=42", "model.hidden_size=64", "optim.betas=[0.8,0.9]").code == 0
    (settings,) = verb_calls
    assert settings["name"] == 42
    assert settings["model"]["hidden_size"] == 64
    assert settings["optim"]["betas"] == [0.8, 0.9]
    assert {"data", "tokenizer", "budget", "eval", "report", "checkpoint"} <= settings.keys()

    def plain(node: Any) -> bool:
        if isinstance(node, dict):
            return all(map(plain, node.values()))
        return (
            all(map(plain, node))
            if type(node) is list
            else type(node) in (str, int, float, bool, type(None))
        )

    assert plain(settings)


def test_letters_beyond_ascii_and_a_home_folder_need_no_quotes(
    run: Run, verb_calls: list[dict[str, Any]]
) -> None:
    typed = [
        "data=text",
        "data.paths=[~/a.txt,ü.txt,~/wiki/*.xz,'~/c, ö.txt']",
        "runs=~/läufe x",
        "name=größe",
    ]
    quoted = with_quotes([*typed, "~tokenizer.path"])
    assert quoted[1:3] == [
        'data.paths=["~/a.txt","ü.txt","~/wiki/*.xz",\'~/c, ö.txt\']',
        'runs="~/läufe x"',
    ]
    assert with_quotes(quoted) == quoted and quoted[-1] == "~tokenizer.path"
    assert run("pretrain", *typed).code == 0
    assert verb_calls[0]["data"]["paths"] == ["~/a.txt", "ü.txt", "~/wiki/*.xz", "~/c, ö.txt"]
    assert (verb_calls[0]["name"], verb_calls[0]["runs"]) == ("größe", "~/läufe x")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["frobnicate"], ["'frobnicate'", "pretrain", "report"]),
        (["--frobnicate"], ["--frobnicate", "pretrain"]),
        (["pretrain", "colour=red"], ["'colour'", "--cfg job"]),
        (["pretrain", "+colour=red"], ["colour=red: is no setting"]),
        (["pretrain", "budget=steps"], ["budget=steps", "budget.<name>="]),
        (["pretrain", "model=huge"], ["model/huge", "bert-base", "tiny"]),
        (["pretrain", "a=["], ["a=["]),
        (["prepare", "data=text", "data.paths=[a=b.txt]"], ["""as in 'data.paths=["a=b.txt"]'"""]),
        (["prepare", "data=text", "data.paths={a: b}"], ["data.paths: a list", "mapping"]),
        (
            ["prepare", "data=text", "data.paths.x=3"],
            ["data.paths.x=3: one of these", "a list is set as a whole"],
        ),
        (["pretrain", "train=[1]"], ["train=[1]: one of these", "a group takes the name"]),
        (["pretrain", "name=a", "seed"], ["seed: a setting has a value, as in seed=..."]),
        (["pretrain", "experiment=null"], ["experiment/null", "bert-base-day"]),
        (["prepare", "data=3"], ["data/3", "wikipedia"]),
        (["pretrain", "model.hidden_size=${nothing}"], ["model.hidden_size", "nothing"]),
        (["pretrain", "seed=abc"], ["seed=abc: ", "whole number"]),
        (["pretrain", "data.corpus="], ["data.corpus= has no value", "leave it out"]),
        (["completion", "fish"], ["bash and zsh", "fish"]),
        (["pretrain", "--foo"], ["--foo", "name=a", "pretrain --help"]),
        (["pretrain", "schedule=linear", "schedule.decay=0.3"], ["'schedule.decay'"]),
        (["pretrain", "--cfg", "jbo"], ["--cfg", "invalid choice", "job"]),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    run: Run,
    verb_calls: list[dict[str, Any]],
    arguments: list[str],
    names: list[str],
    tmp_path: Path,
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
            "runs: Permission denied; get the right",
        ),
        (NotADirectoryError(20, "Not a directory", "a.txt/b"), 2, "a.txt/b: Not a directory"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_how_a_verb_may_end(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    verb_calls: list[Any],
    error: BaseException,
    code: int,
    names: str,
) -> None:
    def fail(settings: dict[str, Any]) -> None:
        raise error

    monkeypatch.setattr(sys.modules["stub_verb"], "main", fail)
    ended = run("pretrain")
    assert ended.code == code
    assert is_one_line(ended.err), ended.err
    assert names in ended.err


@pytest.mark.parametrize("error", [ValueError("ours"), FileNotFoundError(2, "ours")])
def test_our_own_defects_keep_their_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch, verb_calls: list[Any], error: Exception
) -> None:
    def fail(settings: dict[str, Any]) -> None:
        raise error

    monkeypatch.setattr(sys.modules["stub_verb"], "main", fail)
    with pytest.raises(type(error), match="ours"):
        run("pretrain")


def test_a_verb_prints_its_settings_and_the_groups(run: Run, tmp_path: Path) -> None:
    ended = run("study", "data", "--cfg", "job", "name=shown")
    assert ended.code == 0
    assert (
        "name: shown" in ended.out
        and "what: data" in ended.out
        and "heartbeat_seconds" in ended.out
    )
    helped = run("prepare", "--help")
    assert helped.code == 0 and "bert-base" in helped.out
    assert list(tmp_path.iterdir()) == []


def write_ended_run(folder: Path, status: str) -> None:
    """Write the log of a run that ended without a model."""
    folder.mkdir(parents=True)
    versions = {"suite_version": "1", "rules_version": "7", "division": "closed"}
    budget = {"unit": "hours", "limit": 0.05, "clock": "wall"}
    log = EventLog(folder / RUN_LOG)
    log.append(Start(elapsed=1, wall=2, recipe=compose(["name=a"]), **versions, **budget))
    reason = "diverged" if status == "diverged" else "finished"
    log.append(End(elapsed=2, wall=3, steps=0, reason=reason))
    log.close()


class TestChildren:
    """`run` and `--multirun` start one process per verb and per job."""

    @pytest.fixture
    def commands(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        started: list[list[str]] = []

        def note(command: list[str], stdout: int | None) -> int:
            started.append(command[3:])
            return 3 if "name=bad" in command else -15 if "name=killed" in command else 0

        monkeypatch.setattr(children, "run_process", note)
        return started

    def test_run_is_the_pipeline_with_the_same_overrides(
        self, run: Run, commands: list[list[str]]
    ) -> None:
        assert run("run", "name=a", "seed=3").code == 0
        verbs = [[verb, "name=a", "seed=3"] for verb in ("prepare", "pretrain", "glue", "report")]
        assert commands == [["run", "name=a", "seed=3", "--check"], *verbs]

    @pytest.mark.parametrize(("name", "code"), [("bad", 3), ("killed", 143)])
    def test_a_verb_that_fails_ends_the_pipeline(
        self, run: Run, commands: list[list[str]], name: str, code: int
    ) -> None:
        assert run("run", f"name={name}").code == code
        assert [c[0] for c in commands] == ["run"]

    def test_multirun_starts_one_process_per_job(
        self, run: Run, commands: list[list[str]], tmp_path: Path
    ) -> None:
        assert run("run", "--multirun", "name=a,b", "model=tiny").code == 0
        assert commands == [["run", f"name={name}", "model=tiny"] for name in "ab"]
        assert [path.name for path in tmp_path.iterdir()] == ["multirun"], (
            "which .gitignore has: the checkout is clean"
        )

    def test_a_mistake_in_any_point_is_found_before_the_first_begins(
        self, run: Run, commands: list[list[str]]
    ) -> None:
        ended = run("pretrain", "-m", "name=a,b", "budget.steps=5", "train.micro_batch=8,3")
        assert ended.code == 2 and is_one_line(ended.err) and not commands
        assert ended.err.startswith("cramming: name=a train.micro_batch=3: train.batch_size"), (
            "only what varies"
        )

    @pytest.mark.parametrize("status", ["diverged", "exhausted"])
    def test_a_point_that_left_no_model_does_not_hold_up_the_others(
        self, run: Run, commands: list[list[str]], tmp_path: Path, status: str
    ) -> None:
        """Once they are to go on; `glue` has nothing to score of it."""
        write_ended_run(tmp_path / "runs" / "a", status)
        ended = run("pretrain", "-m", "name=a,b")
        assert ended.code == 2 and ended.err.startswith("cramming: name=a: ") and not commands
        for words in (["pretrain", "resume=true"], ["run", "resume=true"], ["glue"]):
            ended = run(*words, "-m", "name=a,b")
            assert (
                ended.code == 0 and f"name=a: its run ended without a model ({status})" in ended.out
            )
            assert [(command[0], command[-1]) for command in commands] == [(words[0], "name=b")]
            commands.clear()
        other = run("pretrain", "resume=true", "-m", "name=a,b", "optim.lr=1")
        assert other.code == 2 and other.err.startswith("cramming: name=a: "), (
            "of other settings it is another run's"
        )

    @pytest.mark.parametrize("flag", ["--config-dir=my", "hydra.searchpath=[file://my]"])
    def test_children_find_what_is_in_a_folder_of_the_users(
        self, run: Run, commands: list[list[str]], tmp_path: Path, flag: str
    ) -> None:
        (tmp_path / "my" / "experiment").mkdir(parents=True)
        (tmp_path / "my" / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 5\n")
        for words, verbs in (
            (["run"], ["run", *cli.PIPELINE]),
            (["pretrain", "-m", "name=a,b"], ["pretrain"] * 2),
        ):
            assert run(*words, flag, "experiment=mine").code == 0
            assert [command[0] for command in commands] == verbs
            for command in commands:
                assert compose(word for word in command[1:] if word != "--check")["seed"] == 5
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

    def test_two_points_of_one_name_are_refused_before_the_first_begins(
        self, run: Run, commands: list[list[str]]
    ) -> None:
        ended = run("pretrain", "-m", "optim.lr=1e-3,2e-3")
        assert ended.code == 2 and "name=default: more than one point" in ended.err and not commands
        assert "'name=lr-${optim.lr}'" in ended.err
        assert run("pretrain", "-m", "name=lr-${optim.lr}", "optim.lr=1e-3,2e-3").code == 0
        assert [command[-1] for command in commands] == ["optim.lr=0.001", "optim.lr=0.002"]
        assert (
            run("glue", "-m", "eval.hyperparameters.epochs=1,2").code == 0
        )  # a grid of one run's fine-tuning

    def test_a_multirun_is_not_printed(self, run: Run, commands: list[list[str]]) -> None:
        ended = run("pretrain", "-m", "name=a,b", "--cfg", "job")
        assert (
            ended.code == 2 and "not allowed with argument --multirun" in ended.err and not commands
        )

    def test_a_job_that_fails_ends_the_multirun(self, run: Run, commands: list[list[str]]) -> None:
        assert run("pretrain", "-m", "name=bad,b").code == 3
        assert commands == [["pretrain", "name=bad"]]


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
            (["report.each_run=perhaps"], ["report.each_run=perhaps: "]),
            (["eval.tasks=[kola]"], ["eval.tasks", "kola", "cola"]),
            (
                ["model=bert-base", "eval.hyperparameters.max_length=4096"],
                ["max_length=4096", "512 positions"],
            ),
            (["optim.lr=-1"], ["optim"]),
            (["forced=[gibberish]"], ["forced=gibberish: unknown choice"]),
            (["name=a/b"], ["name=a/b: "]),
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
            cli.check("run", compose(*arguments))
        assert all(name in str(caught.value) for name in names), caught.value

    def test_names_a_place_where_nothing_can_be_made(
        self,
        compose: Callable[..., dict[str, Any]],
        tiny_overrides: list[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        places = {"prepare": "corpora", "pretrain": "runs", "run": "runs"}
        (tmp_path / "file").touch()
        for verb, place in places.items():
            with pytest.raises(UserError, match=f"nothing can be made in {tmp_path}/file;"):
                cli.check(verb, compose(f"{place}={tmp_path}/file/b"))
        monkeypatch.setattr(
            os, "access", lambda path, mode: path != tmp_path
        )  # root may write everywhere
        for verb, place in places.items():
            with pytest.raises(
                UserError, match=f"{tmp_path}/a/b/.*: nothing can be made in {tmp_path};"
            ):
                cli.check(verb, compose(f"{place}={tmp_path}/a/b"))
        there = Path(compose(*tiny_overrides)["data"]["corpus"])
        monkeypatch.setattr(os, "access", lambda path, mode: path not in (there, there.parent))
        cli.check("prepare", compose(*tiny_overrides))  # it is finished, so nothing is made

    def test_leaves_a_corpus_to_prepare(
        self,
        compose: Callable[..., dict[str, Any]],
        tiny_overrides: list[str],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """`study` checks with `pretrain --check` before it prepares, whether that was interrupted before or not."""
        settings = compose(*tiny_overrides, f"data.corpus={tmp_path / 'c'}", f"runs={tmp_path}")
        for _ in ("no folder", "half-written"):
            cli.check("run", settings)
            assert not capsys.readouterr().err
            cli.check("pretrain", settings)
            assert (
                "c: no finished corpus yet, so what it holds was not checked"
                in capsys.readouterr().err
            )
            (tmp_path / "c").mkdir(exist_ok=True)
        cli.check("pretrain", compose(f"corpora={tmp_path}"))  # none is named, and none made yet
        assert not capsys.readouterr().err

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
            cli.check(verb, compose(*tiny_overrides, f"runs={tmp_path}", *values))

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
            (["parallel.dp=3"], "a mesh of 3 x 1 x 1 = 3 processes, and there are 2"),
        ],
    )
    def test_under_torchrun_is_about_all_of_its_processes(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
    ) -> None:
        assert run("pretrain", *arguments, "--check") == (0, "", "")
        monkeypatch.setenv("WORLD_SIZE", "2")
        for more in (["--check"], ["--multirun", "name=a,b"]):
            ended = run("pretrain", *arguments, *more)
            assert ended.code == 2 and is_one_line(ended.err) and says in ended.err

    def test_on_the_command_line(self, run: Run, tmp_path: Path) -> None:
        assert run("run", "--check") == (0, "", "")
        ended = run("run", "experiment=crammed-bert-day", "data=embedded", "--check")
        assert (
            ended.code == 2 and is_one_line(ended.err) and "eval.data_dir is not set" in ended.err
        )
        assert list(tmp_path.iterdir()) == []
        assert "--check: is for the verbs run, prepare" in run("plan", "--check").err

    def test_a_model_from_elsewhere_is_for_glue_alone(self, run: Run) -> None:
        assert (
            "model_path=x: `run` scores the model that it trains" in run("run", "model_path=x").err
        )


@pytest.mark.parametrize(
    "name", ["lr=1/a", "a,b.record.zip", "b (1).record.zip", "${seed}.record.zip", "é'"]
)
def test_a_path_behind_a_verb_is_taken_as_it_is(name: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    for verb in ("verify", "submit"):
        ended = run(verb, name)
        said = ended.out + ended.err
        assert name in said and ("no such run log" in said or "no finished corpus here" in said), (
            ended
        )


def test_an_empty_word_behind_a_verb_names_nothing(run: Run) -> None:
    assert "data.corpus= has no value" in run("verify", "").err


def test_sigterm_is_one_line_and_code_143(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = ModuleType("stub_verb")
    cleaned = []

    def work(settings: dict[str, Any]) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleaned.append(True)

    stub.main = work  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stub_verb", stub)
    monkeypatch.setitem(cli.VERBS, "glue", cli.Verb("stub_verb:main", "stub"))
    assert run("glue") == (143, "", "cramming: terminated\n")
    assert cleaned


WRAPPED = """
    try:
        raise cli.Terminated if sys.argv[-1] == "name=SIGTERM" else KeyboardInterrupt
    except KeyboardInterrupt as interrupt:
        raise ImportError("initialization failed") from interrupt
"""
DESTROYED = """
    class Slow:
        def __del__(self):
            os.kill(os.getpid(), getattr(signal, sys.argv[-1].removeprefix("name=")))
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
from cramming import cli
def work(settings): {work}
sys.modules["stub_verb"] = types.SimpleNamespace(main=work)
cli.VERBS["glue"] = cli.Verb("stub_verb:main", "stub")
cli.main()
"""
    command = [sys.executable, "-c", program, "glue", f"name={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"cramming: {said}\n")


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


def test_completion_scripts_are_valid_shell() -> None:
    for shell in ("bash", "zsh"):
        script = completion.script(shell, cli.VERBS)
        assert all(verb in script for verb in cli.VERBS)
    checked = subprocess.run(
        ["bash", "-n"],
        input=completion.script("bash", cli.VERBS),
        text=True,
        capture_output=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("cramming stu", {"study"}),
        ("cramming study mask", {"masking"}),
        ("cramming study masking optim=mu", {"optim=muon"}),
        ("cramming duel lad", {"ladder"}),
        (
            "cramming duel base='' candidate='optim.lr=1e-3 model.qk_norm=true' optim.lr_w",
            {"optim.lr_width="},
        ),
        ("cramming duel base='' candidate='optim.lr=1e-3 optim=mu", {"optim=muon"}),
        ("cramming project runs project.h", {"project.hours="}),
        ("cramming pretrain budget.hours= optim=mu", {"optim=muon"}),
        (
            "cramming pretrain --check precision=fp32 'name=a b' optim=sgd optim.mom",
            {"optim.momentum="},
        ),
    ],
)
def test_a_shell_completes_whatever_stands_before(
    tmp_path: Path, line: str, offered: set[str]
) -> None:
    script = f"""{completion.script("bash", cli.VERBS)}
cramming() {{ {sys.executable} -m cramming "$@"; }}
COMP_LINE=$1; COMP_WORDS=($1); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_cramming
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "-c", script, "bash", line],
        text=True,
        capture_output=True,
        check=True,
        cwd=tmp_path,
    )
    assert set(done.stdout.split()) == offered, done.stderr


LAUNCHER = """
from hydra.core.config_store import ConfigStore
from hydra.core.utils import run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict


class LocalLauncher(Launcher):
    def setup(self, *, hydra_context, task_function, config):
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides, initial_job_idx):
        setup_globals()
        found = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = number
            print("launched", *overrides, flush=True)
            found.append(run_job(hydra_context=self.context, task_function=self.task, config=config,
                                 job_dir_key="hydra.sweep.dir", job_subdir_key="hydra.sweep.subdir"))
        return found


node = {"_target_": "hydra_plugins.local_launcher.LocalLauncher"}
ConfigStore.instance().store(group="hydra/launcher", name="local", node=node, provider="local")
"""
PROGRAM = """
import sys
from cramming import __version__, children, cli
children.run_process = lambda command, stdout: print("child", *command[3:], flush=True) or 0
cli.main()
"""


def test_a_multirun_goes_with_hydras_launcher_plugins(tmp_path: Path) -> None:
    """The plugin says where a job runs; the job is a process of its own there, with its own budget clock."""
    plugins = tmp_path / "plugins" / "hydra_plugins"
    plugins.mkdir(parents=True)
    (plugins / "local_launcher.py").write_text(LAUNCHER, encoding="utf-8")
    words = ["pretrain", "-m", "hydra/launcher=local", "name=a,b", "device=cpu"]
    environment, command = (
        {**os.environ, "PYTHONPATH": str(plugins.parent)},
        [sys.executable, "-c", PROGRAM, *words],
    )
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    jobs = [
        [f"launched name={name} device=cpu", f"child pretrain name={name} device=cpu"]
        for name in "ab"
    ]
    assert (done.returncode, done.stdout.splitlines()) == (0, [*jobs[0], *jobs[1]]), done.stderr


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
    """What gloo raises there names no cause: that stands in what the other process said."""
    stub = ModuleType("stub_verb")

    def main(settings: dict[str, Any]) -> None:
        raise RuntimeError(f"[gloo/transport/tcp/pair.cc:553] {said}")

    stub.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stub_verb", stub)
    monkeypatch.setitem(cli.VERBS, "pretrain", cli.Verb("stub_verb:main", "stub"))
    ended = run("pretrain")
    assert ended.code == 2 and is_one_line(ended.err) and "another process" in ended.err
