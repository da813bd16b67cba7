"""`cramming export --as <family>`: a stock model made of a run whose architecture only this suite has.

The student has the teacher's sizes with the choices that the stock class fixes, and the teacher's recipe with another
objective, start and budget (cramming/objectives/distill.py). It is a run by itself, `<name>-<family>`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cramming import verbs
from cramming.children import run_or_exit
from cramming.config import UserError, build, require, unknown_choice
from cramming.data.corpus import Corpus
from cramming.device import select
from cramming.invocation import Call, Invocation
from cramming.model.config import ModelConfig
from cramming.model.load import load_masked_lm, load_masked_lm_config
from cramming.model.stock import families, stock_family
from cramming.overrides import in_words, name_of, setting
from cramming.progress import duration, say
from cramming.record import is_run, refuse_finished_run
from eval.adapt.measure import Comparison, compare
from eval.adapt.page import change, cost_rows
from eval.rules.load import Run, load_run

BUDGET_SHARE = 0.1  # of the teacher's training time, where no budget is typed
BUDGETS = {f"budget.{unit}" for unit in ("hours", "minutes", "exaflops", "tokens", "steps")}
# Sections that the teacher's recipe decides, and groups whose choices have settings of their own
SECTIONS = ("train", "precision", "attention", "memory", "runtime")
CHOICES = ("optim", "schedule")
MASKING = ("rate", "mask_share", "random_share")
TOKEN_TYPES = 2  # BERT's


@dataclass(frozen=True)
class Teacher:
    """Finished run, its model folder, and the configuration of the model."""

    run: Run
    folder: Path
    config: ModelConfig

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Recipe that the run was trained by."""
        return self.run.record.config


def teacher_of(folder: Path, run: Run, family: str) -> Teacher:
    """Return the teacher for a student of this family; raise UserError for a model that needs or has no student."""
    # Types that are written under the name of another have its classes.
    names = {each.architecture: name for name, each in reversed(families().items())}
    if family not in names.values():
        raise UserError(unknown_choice("--as", family, reversed(names.values())))
    config = load_masked_lm_config(folder, dropout=0.0, attention_dropout=0.0)
    require(
        stock_family(config) != family,
        f"--as={family}: the model already is transformers' {family}. Leave --as out.",
    )
    return Teacher(run, folder, config)


def student_config(teacher: ModelConfig, name: str, pad_id: int) -> ModelConfig:
    """Return the configuration of a stock family that is most like the teacher's.

    `pad_id` is the padding's id, behind which RoBERTa's positions begin. Those of MPNet begin behind 1, whatever it is.
    """
    family = families()[name]
    offset = family.fixed.get("position_offset", pad_id + 1)
    require(
        offset in (0, pad_id + 1),
        f"--as={name}: its class takes token {offset - 1} for padding, which is {pad_id} in this corpus. Choose"
        " another model type.",
    )
    fields = asdict(teacher) | family.fixed
    if "token_types" not in family.fixed:
        fields["token_types"] = teacher.token_types or TOKEN_TYPES
    fields["position_offset"] = offset
    if fields["local_window"] is None:
        fields["global_every"] = 1
    try:
        config = ModelConfig(**fields)
    except ValueError as error:
        raise UserError(f"--as={name}: not with the teacher's sizes: {error}") from None
    assert stock_family(config) == name
    return config


def student_of(teacher: Teacher, invocation: Invocation, family: str) -> Invocation:
    """Return the invocation that trains the student; that of a run that is resumed has its own recipe.

    Raises UserError for overrides with which the model is not of the family.
    """
    student = replace(invocation, name=f"{invocation.name}-{family}")
    if invocation.resume and is_run(student.run_folder):
        return student
    student = replace(student, overrides=tuple(_words(teacher, invocation.overrides, family)))
    model = build(ModelConfig, verbs.recipe_of(Call("pretrain", student))["model"], "model")
    typed = [word for word in invocation.overrides if name_of(word).startswith("model")]
    require(
        stock_family(model) == family,
        f"{' '.join(typed)}: with it the student is not transformers' {family}. Leave it out.",
    )
    require(
        model.vocab_size == teacher.config.vocab_size,
        f"model.vocab_size={model.vocab_size}: the teacher has {teacher.config.vocab_size}. Leave it out.",
    )
    return student


def _words(teacher: Teacher, typed: tuple[str, ...], family: str) -> Iterator[str]:
    """Yield the overrides of the student's recipe; those that were typed come last."""
    recipe, record = teacher.recipe, teacher.run.record
    groups = {name_of(word) for word in typed}
    yield from ("objective=distill", "start=teacher", "division=open")
    yield setting("objective.teacher", str(teacher.folder.absolute()))
    yield f"objective.teacher_sha256={in_words(record.training.final_sha256)}"
    yield setting("data.corpus", str(Path(str(record.corpus.folder)).absolute()))
    yield f"seed={recipe['seed']}"
    for key in MASKING:
        yield f"objective.{key}={recipe['objective'][key]}"
    pad_id = json.loads((teacher.folder / "config.json").read_text())["pad_token_id"]
    sections = {name: recipe[name] for name in (*SECTIONS, *CHOICES)}
    sections["model"] = asdict(student_config(teacher.config, family, pad_id))
    for name, section in sections.items():
        if name in groups:  # single settings would outdo it
            continue
        if name in CHOICES:
            yield f"{name}={section['name']}"
        for key, value in section.items():
            if key != "name":
                yield f"{name}.{key}={in_words(value)}"
    if not groups & BUDGETS:
        hours = BUDGET_SHARE * _spent(teacher.run) / 3600
        say(f"budget: none is set, so {BUDGET_SHARE:.0%} of the teacher's time is taken")
        yield f"budget.clock={record.training.budget.clock or 'wall'}"
        yield f"budget.hours={hours:.3g}"
    yield from typed


def _spent(run: Run) -> float:
    """Return the seconds that a training took."""
    return run.record.training.budget.spent_seconds or 0.0


def check(teacher: Teacher, student: Invocation) -> Iterator[str]:
    """Yield what would be trained; raise UserError for a mistake that shows before training. Nothing is written."""
    folder = student.run_folder
    require(
        student.resume or not is_run(folder),
        f"{folder}: the student of this name was begun before. Add --resume to continue and export it, or rename"
        " its folder.",
    )
    refuse_finished_run(student)
    recipe = verbs.recipe_of(Call("pretrain", student))
    model = asdict(teacher.config)
    changes = []
    for key, value in recipe["model"].items():
        if model[key] != value:
            changes.append(f"{key}={in_words(value)}")
    yield f"student: {student.name}, the teacher's model with {', '.join(changes)}"
    budget = recipe["budget"]
    limits = [f"{unit}={budget[unit.partition('.')[2]]}" for unit in sorted(BUDGETS)]
    stated = [limit for limit in limits if not limit.endswith("=None")]
    yield f"budget: {', '.join(stated)}; the teacher's training took {duration(_spent(teacher.run))}"
    yield from verbs.check("pretrain", recipe, student)


def train(teacher: Teacher, student: Invocation) -> list[tuple[str, str]]:
    """Train the student, compare it with its teacher, and return the rows of the model card about both."""
    for line in check(teacher, student):
        say(line)
    run_or_exit(["pretrain", *student.arguments(*verbs.OPTIONS["pretrain"])])
    run = load_run(student.run_folder)
    loss = change(_compare(teacher, run.record.config, student))
    share = f"{_spent(run) / max(_spent(teacher.run), 1e-9):.0%}"
    say(
        f"distilled: {student.name} in {duration(_spent(run))}, {share} of the time of {teacher.run.label};"
        f" the masked-LM loss on held-out text {loss}"
    )
    sha256 = teacher.run.record.training.final_sha256
    return [
        ("Distilled from", f"{teacher.run.label}, whose weights have the SHA-256 {sha256}"),
        ("Masked-LM loss on held-out text, from the teacher's", loss),
        *cost_rows(run.record),
        ("Share of the teacher's training time", share),
    ]


def _compare(teacher: Teacher, recipe: Mapping[str, Any], student: Invocation) -> Comparison:
    """Measure teacher and student on the held-out text that the run was validated on."""
    device = select(student.device)
    folder = recipe["train"]["validation_corpus"] or recipe["data"]["corpus"]
    before = load_masked_lm(teacher.folder, dropout=0.0, attention_dropout=0.0)
    after = load_masked_lm(student.run_folder / "final", dropout=0.0, attention_dropout=0.0)
    return compare(
        before.to(device).eval(),
        after.to(device).eval(),
        Corpus.open(Path(folder), verify=False),
        "held-out text",
        recipe["train"]["sequence_length"],
        recipe["train"]["validation_tokens"],
    )
