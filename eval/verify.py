"""`cramming verify <folder or archive>`: is a run, or a corpus, what it says it is?

Of a run all rules are asked, with their evidence; R27 compares the folder's files with each other. Where the folder has
a list of its files (eval/archive.py), each that was changed is named. Then what takes more than the folder: the scores
are computed again from the predictions and the tasks' labels (eval/rescore.py), and the corpus is searched again for
the tasks' text (data_prep/again.py), where both are there. What all this cannot prove is said each time (docs/rules.md,
"What no check here can show").
"""

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cramming.config import NotNegative, UserError, build, file_sha256, require
from cramming.data import inspect
from cramming.data.corpus import Corpus
from cramming.data.manifest import MANIFEST, corpus_folder
from cramming.journal import JOURNAL, read_journal
from cramming.progress import say, use_stderr
from cramming.record_schema import Record
from eval.archive import LIST, altered_since, is_archive, opened
from eval.finetune.config import EvalConfig
from eval.rescore import rescore, suite_of
from eval.rules.evidence import NO_SCORES
from eval.rules.load import has_traces, load_run, not_judged, unscored
from eval.rules.table import RULES, Finding, Verdict

UNPROVEN = (
    "This shows that the run agrees with itself, not that the training took place: who writes all files anew, hashes"
    " included, is found only by doing the work again (cramming replay)."
)
GIVE_TASKS = "give eval.data_dir=<folder with CoLA/, SST-2/, ...>"
CHECKPOINT = re.compile(r"checkpoints/(?:step|kept)-(\d+)\.pt")
MakeTasks = Callable[[Path, int, str], bool]  # data_prep.again.embedded_tasks
Search = Callable[[Path, Path, float], tuple[list[str], str]]  # data_prep.again.overlap


@dataclass(frozen=True)
class VerifyConfig:
    """Section `verify`. `json`: for programs, one line of JSON in place of the text."""

    json: bool
    corpus: Path | None
    overlap_seconds: NotNegative


@dataclass(frozen=True)
class Means:
    """What a verifier has besides the run: the tasks' files, its corpus (None: where the record says), and how long to
    search that; and what makes the embedded tasks and searches."""

    make_tasks: MakeTasks
    search: Search
    tasks: Path | None = None
    corpus: Path | None = None
    seconds: float = 60.0


@dataclass(frozen=True)
class Verification:
    """Of a run: what is wrong with its files, what the rules find, and what was looked at besides, and what not.

    `verdict` is None where the record cannot be read.
    """

    problems: list[str]
    verdict: Verdict | None
    looked_at: list[str]

    @property
    def in_order(self) -> bool:
        """Whether its numbers can be trusted as far as the folder shows, in whichever division."""
        return not self.problems and self.division not in (None, "invalid")

    @property
    def only_unscored(self) -> bool:
        """Whether scores are all that a run lacks to be in order."""
        invalid = [
            finding
            for rule, finding in zip(RULES, self.findings)
            if rule.division == "both" and not finding.ok
        ]
        return not self.problems and [finding.evidence for finding in invalid] == [NO_SCORES]

    @property
    def division(self) -> str | None:
        return self.verdict and self.verdict.division

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.verdict.findings if self.verdict else ()


def verify_run(folder: Path, means: Means) -> Verification:
    """Judge the run in `folder` by the list of its files, by all rules, and by what the verifier has besides."""
    run, problems, looked_at = load_run(folder), list[str](), list[str]()
    with _problem_of(LIST, problems):
        problems += altered_since(folder)
    if run.problem:
        return Verification([*problems, run.problem], None, [])
    for name, check in {"scores": _scores, "corpus": _corpus}.items():
        with _problem_of(name, problems):
            found, told = check(folder, run.record, means)
            problems += [f"{name}: {problem}" for problem in found]
            looked_at.append(f"{name}: {told}")
    with _problem_of("checkpoints", problems):
        problems += _other_checkpoints(folder)
    return Verification(problems, run.verdict, looked_at)


@contextmanager
def _problem_of(what: str, problems: list[str]) -> Iterator[None]:
    """A check that fails inside is one of the run's problems; a UserError, a full disk, memory or rights are the
    verifier's own. A run can only name a file that no system has."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        problems.append(not_judged(what, error))
    except Exception as error:
        problems.append(not_judged(what, error))


def _scores(folder: Path, record: Record, means: Means) -> tuple[list[str], str]:
    """Each score against the predictions that it was made of."""
    suite = suite_of(record)
    if suite is None:
        return [], unscored(folder, record) or "none on record"
    if suite == "embedded":
        with TemporaryDirectory(prefix="cramming-") as place:
            source, seed = (
                next((one for one in record.corpus.sources if one.kind == "embedded"), None),
                _seed(record),
            )
            if source is None or seed is None:
                return (
                    [],
                    "not computed again: the record does not say with which seed their tasks were generated",
                )
            if not means.make_tasks(Path(place), seed, source.sha256 or ""):
                return [], "not computed again: another version of this suite generated their tasks"
            return rescore(folder, record, suite, Path(place), "generated anew")
    if means.tasks is None:
        return [], f"not computed again from the predictions; {GIVE_TASKS}"
    return rescore(folder, record, suite, means.tasks, f"in {means.tasks}")


def _seed(record: Record) -> int | None:
    """Of the generated corpus, whose tasks were scored; None where the record does not say."""
    found: Any = record.raw
    for name in ("corpus", "settings", "data", "seed"):
        found = found.get(name) if isinstance(found, Mapping) else None
    tasks_of = {section.tasks_corpus_sha256 for section in record.glue.values()} - {None}
    is_seed = (
        isinstance(found, int)
        and 0 <= found < 2**63
        and tasks_of <= {record.corpus.manifest_sha256}
    )
    return found if is_seed else None


def _corpus(folder: Path, record: Record, means: Means) -> tuple[list[str], str]:
    """What the record says of its corpus, against the corpus; and the tasks' text in it."""
    place, wanted = means.corpus or record.corpus.folder, "verify.corpus=<folder>"
    if place is None:
        return [], "none on record"
    if not os.access(Path(place) / MANIFEST, os.R_OK):
        return [], f"not looked at, nor searched for the tasks' text: not in {place}; give {wanted}"
    problems: list[str] = []
    try:
        corpus = Corpus.open(Path(place))
        same = corpus.manifest_sha256 == record.corpus.manifest_sha256
        require(
            same, f"{place} is not the corpus of this run (its manifest differs); give {wanted}"
        )
        own, told = json.loads(json.dumps(corpus.describe())), record.raw["corpus"]
        problems = [
            f"{key} is not what the record has"
            for key in told.keys() & own.keys() - {"folder"}
            if own[key] != told[key]
        ]
        if means.tasks is None:
            as_told = "not as on record" if problems else "as on record"
            return problems, f"{as_told}; not searched again for the tasks' text; {GIVE_TASKS}"
        found, words = means.search(corpus.folder, means.tasks, means.seconds)
        return [*problems, *found], words
    except UserError as error:
        return problems, f"not looked at, nor searched for the tasks' text: {error}"


def _other_checkpoints(folder: Path) -> Iterator[str]:
    """Checkpoints, in the folder or in the list of its files, that the journal does not have."""
    try:
        events = read_journal(folder / JOURNAL)
        listed = (
            json.loads((folder / LIST).read_text(encoding="utf-8"))["outside"]
            if (folder / LIST).exists()
            else {}
        )
        found = {
            name: {entry["sha256"]} for name, entry in listed.items() if CHECKPOINT.fullmatch(name)
        }
    except (UserError, ValueError, LookupError, TypeError, AttributeError):
        return  # said by R5, or of the list
    for file in sorted(folder.glob("checkpoints/*.pt")):
        found.setdefault(f"checkpoints/{file.name}", set()).add(file_sha256(file))
    saved = {
        (event["steps"], event.get("sha256")) for event in events if event["event"] == "checkpoint"
    }
    for name, hashes in found.items() if saved else ():
        match = CHECKPOINT.fullmatch(name)
        if match and not all((int(match[1]), sha256) in saved for sha256 in hashes):
            yield f"{name} is not the file that budget.jsonl has (by SHA-256)"


def main(config: Mapping[str, Any], make_tasks: MakeTasks, search: Search) -> None:
    """The verb: what is found of a run or of a corpus, exit code 1 where it is not in order."""
    settings, place = build(VerifyConfig, config["verify"], "verify"), corpus_folder(config)
    if settings.json:
        use_stderr()
    if is_archive(place) or has_traces(place):
        tasks = build(EvalConfig, config["eval"], "eval").data_dir
        require(
            tasks is None or tasks.is_dir(), f"eval.data_dir={tasks}: no such folder; {GIVE_TASKS}"
        )
        summary = _of_run(
            place, Means(make_tasks, search, tasks, settings.corpus, settings.overlap_seconds)
        )
    else:
        problems = inspect.verify(place)
        summary = {"corpus": str(place), "in_order": not problems, "problems": problems}
    if settings.json:
        print(json.dumps(summary))
    if not summary["in_order"]:
        raise SystemExit(1)


def _of_run(place: Path, means: Means) -> dict[str, Any]:
    """What is found of a run, in JSON; says it too."""
    with opened(place) as folder:
        found = verify_run(folder, means)
    for line in (
        *(f"{place}: {problem}" for problem in found.problems),
        *_in_words(found.findings),
        *found.looked_at,
    ):
        say(line)
    if found.in_order:
        say(UNPROVEN)
        say(f"{place}: in order, {found.division} division")
    else:
        say(
            f"{place}: {'not scored yet; nothing else makes it invalid' if found.only_unscored else 'NOT in order'}"
        )
    findings = [finding._asdict() for finding in found.findings]
    summary = {"run": str(place), "in_order": found.in_order, "only_unscored": found.only_unscored}
    more = {"division": found.division, "findings": findings, "looked_at": found.looked_at}
    return {**summary, "problems": found.problems, **more, "unproven": UNPROVEN}


def _in_words(findings: Sequence[Finding]) -> Iterator[str]:
    """A line for each rule; one for all those that ask for scores, where there are none yet."""
    waiting = [
        finding.rule for finding in findings if not finding.ok and finding.evidence == NO_SCORES
    ]
    for rule, ok, evidence in findings:
        if rule not in waiting:
            yield f"{rule:<4}{'' if ok else 'BROKEN: '}{evidence}"
        elif rule == waiting[0]:
            yield f"{rule:<4}{evidence}, which {', '.join(waiting[1:])} need too"
