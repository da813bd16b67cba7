"""`cramming submit <run folder>`: a run judged by the rules, and the archive of it that others check.

    cramming submit runs/first                      # -> runs/first/first.record.zip
    cramming verify runs/first/first.record.zip     # what whoever receives it does

What the archive holds is in eval/archive.py. An invalid run is refused: its numbers cannot be trusted. One of the open
division is not, and the findings say which rules keep it there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cramming.config import build, require
from cramming.progress import format_count, say
from cramming.record import run_folder
from eval.archive import SUFFIX, pack
from eval.rules.load import load_run, unscored

INVALID = (
    "invalid by the rules marked BROKEN and `both` in docs/rules.md, so there is nothing to submit"
)


@dataclass(frozen=True)
class SubmitConfig:
    """The folder of the run, where it is not the one that `name` says; and where its archive goes."""

    run: Path | None
    out: Path | None


def main(config: dict[str, Any]) -> None:
    """Judge the run, say what the rules find and write its archive; UserError for a run that is invalid or no run."""
    settings = build(SubmitConfig, config["submit"], "submit")
    folder = (settings.run or run_folder(config)).absolute()
    run, out = load_run(folder), settings.out or folder / f"{folder.name}{SUFFIX}"
    require(not run.problem, str(run.problem))
    require(
        out.name.endswith(SUFFIX),
        f"submit.out={out}: not an archive's name; let it end in {SUFFIX}",
    )
    for finding in run.verdict.findings:
        say(f"{finding.rule:<4}{'' if finding.ok else 'BROKEN: '}{finding.evidence}")
    require(
        run.verdict.division != "invalid",
        f"{folder}: {unscored(folder, run.record) or INVALID}",
    )
    files = pack(folder, out)
    inside, outside = files["files"], files["outside"]
    weights = format_count(sum(file["bytes"] for file in outside.values()), "B")
    say(
        f"submit: {out}, {format_count(out.stat().st_size, 'B')}: {run.verdict.division} division, {len(inside)} files;"
        f" {len(outside)} of {weights} by SHA-256 only (checkpoints and final weights); the run as a whole is"
        f" {files['sha256']}"
    )
