"""A study runs what is missing, compares variants over seeds, and goes on after an interruption."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError, build, config_folder
from cramming.data.manifest import Manifest
from cramming.invocation import Invocation
from cramming.model.config import ModelConfig, count_parameters
from cramming.overrides import compose as compose_by_hydra
from cramming.recipe import Config, Hardware, check
from cramming.record import load_record
from cramming.record_schema import Pretraining, Record
from eval.extras import study
from eval.extras.study import Study, main, multiplied, variants_of, write
from eval.rules.load import Run, load_run
from tests.eval.runs import score_run, write_run

Calls = list[tuple[str, Invocation, tuple[str, ...]]]
Start = Callable[..., None]


def ran(calls: Calls) -> list[tuple[str, Invocation]]:
    """Those of the calls that make a run."""
    return [(verb, call) for verb, call, flags in calls if "--check" not in flags]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, compose: Callable[..., dict[str, Any]]) -> Calls:
    """The verbs that a study calls; they leave runs as the real ones do."""
    made: Calls = []

    def verb(name: str, call: Invocation, *flags: str, may_end_without_model: bool = False) -> None:
        made.append((name, call, flags))
        if flags:
            return
        if name == "pretrain":
            recipe = compose(*call.overrides)
            write_run(call.run_folder, recipe=recipe, limit=1.0, scores={})
        elif name == "glue":
            chosen = compose()["eval"]
            threads = {"scoring": {"threads_per_run": chosen["threads"]}}
            score_run(
                call.run_folder,
                suite="embedded",
                hyperparameters=chosen["hyperparameters"],
                change=threads,
            )

    monkeypatch.setattr(study, "_verb", verb)
    monkeypatch.setattr(study, "compose", lambda overrides: compose(*overrides))
    return made


@pytest.fixture
def start(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> Start:
    """`start(*overrides, what="vocab", ...)`: a study in the test's folder."""

    def call(*overrides: str, table: dict[str, list[str]] | None = None, **options: Any) -> None:
        arguments = {"what": "vocab", "seeds": "0,1", "vocab_sizes": "512,1024", "stages": 3}
        if table is not None:
            file = tmp_path / "data.yaml"
            file.write_text(json.dumps(table))
            arguments["what"] = str(file)
        overrides = overrides or ("budget.hours=1",)
        here = Invocation("x", tmp_path, tmp_path / "corpora", overrides=overrides)
        main(compose(), here, **{**arguments, "glue": None, "out": None, **options})

    return call


def test_all_is_checked_before_anything_trains_and_every_run_has_the_users_settings(
    calls: Calls, start: Start, tmp_path: Path
) -> None:
    start()
    checks, runs = calls[:6], ran(calls)
    assert [verb for verb, _, flags in checks if flags == ("--check",)] == [
        "glue",
        "prepare",
        "pretrain",
    ] * 2
    assert [call for _, call, flags in calls[6:]] == [call for _, call in runs]
    assert {call.name for _, call, _ in checks} == {"x-vocab512-1", "x-vocab1024-1"}
    assert [verb for verb, _ in runs] == ["prepare", "pretrain", "glue"] * 4
    first = runs[0][1]
    assert first.name == "x-vocab512-0"
    assert first.overrides == ("budget.hours=1", "tokenizer.vocab_size=512", "seed=0")
    table = (tmp_path / "x-vocab-study" / "study.md").read_text()
    assert "| vocab512 | 2 | 8,192 |" in table and "| vocab1024 | 2 |" in table


def test_the_same_command_again_does_only_what_is_missing(
    calls: Calls, start: Start, tmp_path: Path
) -> None:
    start(glue=False)
    assert {verb for verb, _, _ in calls} == {"prepare", "pretrain"}
    calls.clear()
    start(glue=True)
    assert [verb for verb, _ in ran(calls)] == ["glue"] * 4
    assert {verb for verb, _, _ in calls} == {"glue"}
    calls.clear()
    start()  # by its record a run is scored as soon as one initialisation is: glue knows what it lacks
    assert [verb for verb, _ in ran(calls)] == ["glue"] * 4
    calls.clear()
    folder = tmp_path / "x-vocab512-1"
    write_run(folder, recipe=load_record(folder)["config"], limit=1.0, ended="stopped")
    start()
    runs = [(verb, call) for verb, call in ran(calls) if call.name == "x-vocab512-1"]
    assert [verb for verb, _ in runs] == ["prepare", "pretrain", "glue"] and runs[1][1].resume
    assert [verb for verb, _ in ran(calls) if verb != "glue"] == ["prepare", "pretrain"]


@pytest.fixture
def earlier(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Path]:
    """`earlier("budget.hours=2", ...)`: the run of variant `vocab1024`, seed 1, with settings of its own."""

    def make(*overrides: str, **facts: Any) -> Path:
        settings = ("seed=1", "tokenizer.vocab_size=1024", "budget.hours=1")
        typed = {override.partition("=")[0] for override in overrides}
        recipe = compose(
            *(each for each in settings if each.partition("=")[0] not in typed), *overrides
        )
        limit = recipe["budget"]["hours"]
        whole = {"scores": {}, **facts}
        return write_run(tmp_path / "x-vocab1024-1", recipe=recipe, limit=limit, **whole)

    return make


@pytest.mark.parametrize(
    ("override", "was", "wanted"),
    [
        ("budget.hours=2", "budget.hours=2", "budget.hours=1"),
        ("optim.lr=0.5", "optim.lr=0.5", "optim.lr="),
        ("seed=3", "seed=3", "seed=1"),
        ("tokenizer.vocab_size=512", "tokenizer.vocab_size=512", "tokenizer.vocab_size=1024"),
    ],
)
@pytest.mark.parametrize("ended", ["finished", "stopped", "diverged"])
def test_a_run_made_with_other_settings_ends_the_study_before_anything_runs(
    calls: Calls,
    start: Start,
    earlier: Callable[..., Path],
    tmp_path: Path,
    override: str,
    was: str,
    wanted: str,
    ended: str,
) -> None:
    """Though it is of the last variant and seed."""
    earlier(override, ended=ended)
    with pytest.raises(UserError, match=f"x-vocab1024-1: .* made with {was}, .* has {wanted}"):
        start()
    assert not calls


def test_a_study_goes_on_with_other_places_and_more_seeds_or_variants(
    calls: Calls, start: Start, earlier: Callable[..., Path], tmp_path: Path
) -> None:
    earlier("checkpoint.every_steps=3", "eval.workers=2")
    start(vocab_sizes="1024", seeds="1", glue=False)
    assert not ran(calls)
    start(seeds="1,2", glue=False)
    names = {call.name for verb, call in ran(calls) if verb == "pretrain"}
    assert names == {"x-vocab512-1", "x-vocab512-2", "x-vocab1024-2"}


def test_a_corpus_may_lie_elsewhere_and_must_be_the_same(
    calls: Calls,
    start: Start,
    earlier: Callable[..., Path],
    make_corpus: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = [
        make_corpus(tmp_path / name, documents=20, seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    hashes = [Manifest.load(folder / "manifest.json").sha256() for folder in folders]
    assert hashes[0] == hashes[1] != hashes[2]
    for key, sections, other in (
        (
            "data.corpus",
            lambda sha256: {"manifest_sha256": sha256},
            f"corpus manifest_sha256={hashes[2]}",
        ),
        (
            "train.validation_corpus",
            lambda sha256: {"validation": {"manifest_sha256": sha256}},
            f"train.validation_corpus={folders[2]}",
        ),
    ):
        overrides = ["budget.hours=1", f"{key}={folders[0]}"]
        for folder, sha256, problem in (
            (folders[1], hashes[1], None),
            (folders[2], hashes[2], other),
            (folders[0], hashes[2], f"corpus manifest_sha256={hashes[2]}"),
        ):
            change = {"setup": {"corpus": sections(sha256)}}
            earlier(f"{key}={folder}", change=change)
            if problem:
                with pytest.raises(UserError, match=problem):
                    start(*overrides, vocab_sizes="1024", seeds="1", glue=False)
            else:
                start(*overrides, vocab_sizes="1024", seeds="1", glue=False)
    assert not ran(calls)


@pytest.mark.parametrize(
    ("scored", "problem"),
    [
        ({"hyperparameters": {"epochs": 77}}, "eval.hyperparameters.epochs=77"),
        ({"precision": "fp32", "threads_per_run": 64}, "eval.threads=64"),
    ],
)
def test_scores_made_with_other_settings_end_a_study_of_scores_only(
    calls: Calls,
    start: Start,
    earlier: Callable[..., Path],
    compose: Callable[..., dict[str, Any]],
    scored: dict[str, Any],
    problem: str,
) -> None:
    section = compose()["eval"]
    same = {
        "hyperparameters": section["hyperparameters"],
        "precision": "fp32",
        "threads_per_run": section["threads"],
    }
    score_run(earlier(), suite="embedded", change={"scoring": same | scored})
    with pytest.raises(UserError, match=problem):
        start()
    assert not calls
    start(glue=False)
    assert ran(calls)


WITHOUT_MODEL = {"diverged": {"ended": "diverged"}, "exhausted": {"steps": 0}}


@pytest.mark.parametrize("status", ["diverged", "exhausted"])
def test_a_run_without_a_model_has_no_score_and_is_not_repeated(
    calls: Calls, start: Start, tmp_path: Path, status: str
) -> None:
    variants = {"x-a-0": ["data/filters=gopher"], "x-b-0": []}
    for name, changes in variants.items():
        recipe = study.compose(["budget.hours=1", *changes])
        write_run(tmp_path / name, recipe=recipe, limit=1.0, **WITHOUT_MODEL[status])
    start(table={"a": ["data/filters=gopher"], "b": []}, seeds="0", glue=True)
    assert not calls
    table = (tmp_path / "x-data-study" / "study.md").read_text()
    assert f"| a | 1 (1 {status}) | 8,192 | – | – | – | – |" in table


@pytest.mark.parametrize("status", ["diverged", "exhausted"])
def test_a_run_that_ends_without_a_model_does_not_end_the_study(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    def run(command: list[str]) -> int:
        if "pretrain" not in command or "--check" in command:
            return 0
        name = next(word.partition("=")[2] for word in command if word.startswith("--name="))
        is_lost = name == "x-vocab512-0"
        facts: dict[str, Any] = WITHOUT_MODEL[status] if is_lost else {"scores": {}}
        write_run(tmp_path / name, **facts)
        return 2 if is_lost else 0

    monkeypatch.setattr(study, "run_process", run)
    start("model=tiny", glue=True)
    table = (tmp_path / "x-vocab-study" / "study.md").read_text()
    assert f"| vocab512 | 2 (1 {status}) | 8,192 | – | – | 7.500 | 10,000 |" in table
    assert "| vocab1024 | 2 |" in table


@pytest.fixture
def scored(tmp_path: Path) -> Callable[..., Run]:
    """`scored(name, corpus={...}, cola=50.0, ...)`: a run with these scores in percent, one seed each."""

    def make(name: str, corpus: dict[str, Any] | None = None, **scores: float | None) -> Run:
        values = {entry: [value / 100] for entry, value in scores.items() if value is not None}
        folder = write_run(
            tmp_path / "scored" / name,
            suite="embedded",
            loss=7.0,
            scores={"pretrained": values},
            seeds=[0],
            change={"setup": {"corpus": corpus or {}}},
        )
        return load_run(folder)

    return make


def test_mean_and_spread_over_seeds_of_the_entries_that_all_runs_have(
    tmp_path: Path, scored: Callable[..., Run]
) -> None:
    runs = [
        scored("a", cola=50.0, sst2=70.0, rte=60.0),
        scored("b", cola=58.0, sst2=70.0, rte=None),
    ]
    write(tmp_path, "data", {"v": runs, "w": [scored("c", cola=None)]})
    text = (tmp_path / "study.md").read_text()
    assert "| v | 2 | 8,192 | 62.0 | 2.83 | 7.000 | 10,000 |" in text and "SST-2, CoLA." in text
    assert "| w | 1 | 8,192 | – | – | 7.000 | 10,000 |" in text


def test_losses_on_one_text_compare(tmp_path: Path, scored: Callable[..., Run]) -> None:
    def on(folder: str, sha256: str) -> dict[str, Any]:
        return {"validation": {"folder": folder, "manifest_sha256": sha256}}

    first = scored("a", on("text", "1"))
    on_own_text = scored(
        "e", {"manifest_sha256": "9" * 64}
    )  # on the held-out text of its own corpus
    lost = Run(Path("f"), "f", Record(pretrain=Pretraining(status="diverged")))  # of no text
    others = [(scored("b", on("text", "1")), True), (scored("c", on("other", "2")), False)]
    others += [(scored("d"), False), (on_own_text, False)]
    for other, compare in others:
        write(tmp_path, "data", {"v": [first], "w": [other, lost]})
        text = (tmp_path / "study.md").read_text()
        assert ("Validation losses are all on one text." in text) == compare
    write(tmp_path, "masking", {"v": [on_own_text], "w": [on_own_text]})
    assert "Validation losses are all on one text." in (tmp_path / "study.md").read_text()


def test_a_variant_has_no_seed_of_its_own(calls: Calls, start: Start) -> None:
    with pytest.raises(UserError, match="variant b: seed=3 is an option, --seeds"):
        start(table={"a": [], "b": ["optim=sgd", "seed=3"]})
    assert not calls


@pytest.mark.parametrize("has_run", [False, True])
def test_a_variants_mistake_names_the_variant_before_anything_runs(
    calls: Calls,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_run: bool,
) -> None:
    monkeypatch.setattr(study, "compose", compose_by_hydra)
    if has_run:
        write_run(tmp_path / "x-b-0")
    with pytest.raises(UserError, match=r"^study data, variant b: optim\.rate=1: no such setting"):
        start(table={"b": ["optim.rate=1"]})
    assert not ran(calls)


@pytest.mark.parametrize("what", ["vocab", "pipelines"])
def test_what_the_study_decides_is_refused(calls: Calls, start: Start, what: str) -> None:
    with pytest.raises(UserError, match=r"seed=5: .*Give --seeds 5"):
        start("budget.hours=1", "seed=5", what=what)
    assert not calls


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"what": "nothing"}, "study nothing: no such study. Choose one of architectures"),
        ({"what": "nowhere.yaml"}, "nowhere.yaml"),
        ({"seeds": "0,0"}, "--seeds=0,0"),
        ({"seeds": ""}, "--seeds="),
        ({"vocab_sizes": "many"}, "--vocab-sizes=many"),
    ],
)
def test_mistakes_in_options_are_named(
    calls: Calls, start: Start, options: dict[str, Any], names: str
) -> None:
    with pytest.raises(UserError) as caught:
        start(**options)
    assert names in str(caught.value) and not calls


@pytest.mark.parametrize("content", [b"a: [", b"a: [x]\nb: \xff", b"- a", b"", b"a: x"])
def test_a_file_that_is_no_table_of_variants_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"mine\.yaml: not a table of variants"):
        variants_of(str(file), "1")


def test_a_study_that_is_ended_ends_its_training_in_order(tmp_path: Path) -> None:
    """SIGTERM, as from a job scheduler: the verb that runs hears of it and ends in its own way."""
    child = tmp_path / "python"
    end = f"touch {tmp_path / 'ended'}; exit 143"
    child.write_text(
        f"#!/bin/sh\ntrap '{end}' TERM\necho on\nfor _ in $(seq 600); do sleep 0.05; done\n"
    )
    child.chmod(0o755)
    code = (
        f"import sys; from eval.extras import study; sys.executable = {str(child)!r};"
        " study._verb('pretrain', study.Invocation())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert [process.stdout.readline() for _ in range(2)] == [
            b"cramming pretrain --name=default --runs=runs --corpora=corpora --device=auto\n",
            b"on\n",
        ]
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
    assert (tmp_path / "ended").exists()


def test_a_study_of_one_variant_end_to_end(tiny_overrides: list[str], tmp_path: Path) -> None:
    """Every verb the real one, in a process of its own. The same command again trains nothing, another is refused."""
    places = [
        f"--runs={tmp_path / 'runs'}",
        f"--corpora={tmp_path / 'corpora'}",
        *("--name", "x", "--no-glue", "--vocab-sizes", "300", "--seeds", "0"),
    ]
    overrides = [o for o in tiny_overrides if not o.startswith("data.corpus=")] + [
        "data=embedded",
        "data.size=20000",
    ]
    wanted = [*places, *overrides, "budget.steps=3"]
    command = [sys.executable, "-m", "cramming", "study", "vocab", *wanted]
    subprocess.run(command, check=True)
    record = json.loads((tmp_path / "runs/x-vocab300-0/record.json").read_text())
    assert record["pretrain"]["status"] == "finished" and record["corpus"]["vocab_size"] == 300
    loss, tokens = record["pretrain"]["validation"]["loss"], record["pretrain"]["tokens"]
    table = (tmp_path / "runs/x-vocab-study/study.md").read_text()
    assert f"| vocab300 | 1 | 300 | – | – | {loss:.3f} | {tokens:,} |" in table
    repeated = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert (
        "cramming pretrain" not in repeated
        and (tmp_path / "runs/x-vocab-study/study.md").read_text() == table
    )
    other = subprocess.run([*command, "optim.lr=0.5"], check=False, capture_output=True, text=True)
    assert (
        other.returncode == 2 and "x-vocab300-0: this run was made with optim.lr=" in other.stderr
    )


def test_a_figure_of_the_losses_stands_beside_the_table(
    tmp_path: Path, scored: Callable[..., Run]
) -> None:
    rows = [
        {"progress": step / 4, "tokens": 10 * step, "loss": 5.0 - step, "lr": 0.1}
        for step in range(4)
    ]
    runs = {
        name: [replace(scored(name), metrics=rows) for _ in range(3)] for name in ("one", "other")
    }
    write(tmp_path, "masking", runs)
    drawn = (tmp_path / "study.svg").read_text()
    assert drawn.startswith("<svg") and all(drawn.count(f">{name}<") == 1 for name in runs)
    assert drawn.count(">training loss<") == 2 and "MLM loss" not in drawn
    assert "![losses](study.svg)" in (tmp_path / "study.md").read_text()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, compose: Callable[..., dict[str, Any]]) -> None:
    """Variants are composed as `compose` does it, which has Hydra compose each choice of groups once."""
    monkeypatch.setattr(study, "compose", lambda overrides: compose(*overrides))


STUDIES = ("architectures", "batch", "data", "masking", "schedules")


def changes_of(what: str, words: Sequence[str]) -> dict[str, list[str]]:
    """The overrides of each variant of a study whose runs all have those of `given`."""
    shared = Invocation(overrides=tuple(words))
    made = Study(what, variants_of(what, "1"), [0], shared, False)
    return {variant: made.changes_of(variant) for variant in made.variants}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("what", STUDIES)
def test_every_variant_is_a_run_at_any_size(
    compose: Callable[..., dict[str, Any]], what: str
) -> None:
    """Names are of one study only: the runs of all studies with one name lie in one folder."""
    overrides = ["experiment=crammed-bert-day", "scale=30M"]
    variants = changes_of(what, overrides)
    others = [name for other in STUDIES if other != what for name in variants_of(other, "1")]
    assert len(variants) > 1 and not variants.keys() & set(others)
    seen = []
    for changes in variants.values():
        config = Config.of(composed := compose(*overrides, *changes))
        check(config, Hardware("cuda", "a GPU", "bf16", (9, 0)))
        seen.append(composed)
    assert all(first != other for i, first in enumerate(seen) for other in seen[:i])


@pytest.mark.usefixtures("quick")
def test_shapes_have_the_parameters_of_the_model(compose: Callable[..., dict[str, Any]]) -> None:
    for scale in ("scale=10M", "scale=30M", "scale=110M", "scale=350M"):
        variants, counts = changes_of("architectures", ["model=crammed-bert", scale]), {}
        for name in ("as-chosen", "deep-narrow", "shallow-wide", "plain-mlp"):
            model = compose("model=crammed-bert", scale, *variants[name])["model"] | {
                "vocab_size": 32768
            }
            counts[name] = count_parameters(build(ModelConfig, model, "")).without_embeddings
        assert {
            name: count
            for name, count in counts.items()
            if abs(count / counts["as-chosen"] - 1) > 0.07
        } == {}


def test_a_multiple_of_what_is_set() -> None:
    settings = {"train": {"batch_size": 10, "batch_ramp": None}, "optim": {"lr": 1e-3}}
    assert multiplied("train.batch_size*=0.25", settings) == "train.batch_size=2"
    assert float(multiplied("optim.lr*=0.5", settings).removeprefix("optim.lr=")) == 5e-4
    assert multiplied("train.batch_ramp.until*=0.5", settings) is None
    for name in ("train.batch_ramp", "train.rows", "lr", "train.batch_size.x", "optm.lr"):
        with pytest.raises(UserError, match=f"{name}=(None|nothing) is no number to multiply"):
            multiplied(f"{name}*=2", settings)
    for times in ("half", "", "nan", "inf"):
        with pytest.raises(
            UserError,
            match=rf"study: train\.batch_size\*={times}: {times} is no number to multiply with",
        ):
            multiplied(f"train.batch_size*={times}", settings)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["optim.lr*=0.5", "optim=lamb"], ["optim=lamb", "optim.lr=0.0003125"]),
        (["scale=30M", "model.num_layers*=0.5"], ["scale=30M", "model.num_layers=4"]),
        (
            ["train.batch_size*=2", "tokenizer.path='a*=b'"],
            ["tokenizer.path='a*=b'", "train.batch_size=64"],
        ),
    ],
)
def test_a_multiple_is_of_what_the_variant_has_otherwise(
    changes: list[str], expected: list[str]
) -> None:
    shared = Invocation(overrides=("train.batch_size=32",))
    assert Study("mine", {"a": changes}, [0], shared, False).changes_of("a") == expected


@pytest.mark.usefixtures("quick")
def test_learning_rates_follow_the_batch_by_the_square_root(
    compose: Callable[..., dict[str, Any]],
) -> None:
    """This holds for every optimizer, with or without a rule in `optim.lr_scale`."""
    for name in sorted(file.stem for file in (config_folder() / "optim").glob("*.yaml")):
        for batch in (16, 256):
            shared = [f"optim={name}", f"train.batch_size={batch}"]
            peaks = {
                variant: Config.of(compose(*shared, *changes)).peak_learning_rate
                for variant, changes in changes_of("batch", shared).items()
            }
            assert peaks["whole-batch"] == Config.of(compose(*shared)).peak_learning_rate, name
            shares = {variant: peak / peaks["whole-batch"] for variant, peak in peaks.items()}
            expected = {"quarter-batch": 0.25, "half-batch": 0.5, "double-batch": 2}
            assert shares == pytest.approx(
                {v: expected.get(v, 1) ** 0.5 for v in shares}, rel=1e-3
            ), (name, batch)


@pytest.mark.usefixtures("quick")
def test_masked_variants_are_masked_whatever_the_objective(
    compose: Callable[..., dict[str, Any]],
) -> None:
    shared = ["objective=causal-then-mlm"]
    variants = changes_of("masking", shared)
    assert {
        Config.of(compose(*shared, *changes)).objective.kind for changes in variants.values()
    } == {"mlm"}


@pytest.mark.usefixtures("quick")
def test_shapes_keep_late_layers(compose: Callable[..., dict[str, Any]]) -> None:
    for model, late in (("tiny", 3), ("tiny", 2), ("best", 1), ("best", 5)):
        shared = [f"model={model}", f"model.late_layers={late}"]
        for name, changes in changes_of("architectures", shared).items():
            shape = Config.of(compose(*shared, *changes)).model
            assert shape.late_layers == late or name == "shallow-wide"
