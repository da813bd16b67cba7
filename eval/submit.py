"""The verb `cramming submit <run folder>`: check a run by the rules, and write its archive for verifiers.

    cramming submit runs/first                      # -> runs/first/first.record.zip
    cramming verify runs/first/first.record.zip     # for the receiver

An invalid or unfinished run is refused. A run of the open division is not; the findings give the reasons for its
division.
"""

from pathlib import Path

from cramming.config import UserError
from cramming.data.manifest import MANIFEST
from cramming.progress import format_count, say
from cramming.record_schema import Record
from eval.archive import SUFFIX, pack
from eval.rules.load import Run, load_run, unscored


def main(*, path: Path, out: Path | None, weights_url: str | None) -> None:
    """Print the findings and write the archive `out`; raise UserError for a run that cannot be submitted.

    `weights_url` is the address of the published final weights.
    """
    folder = path.absolute()
    out = out or folder / f"{folder.name}{SUFFIX}"
    run = load_run(folder)
    if run.problem:
        raise UserError(run.problem)
    if not out.name.endswith(SUFFIX):
        raise UserError(f"--out={out}: not an archive's name. Let it end in {SUFFIX}.")
    for finding in run.verdict.findings:
        mark = "" if finding.ok else "BROKEN: "
        say(f"{finding.rule:<4}{mark}{finding.evidence}")
    _refuse(folder, run)
    manifest = _manifest(folder, run.record)
    listed = pack(folder, out, manifest=manifest, weights=weights_url)
    size = format_count(sum(file["bytes"] for file in listed["outside"].values()), "B")
    say(
        f"submit: {out}, {format_count(out.stat().st_size, 'B')}: {run.verdict.division} division,"
        f" {len(listed['files'])} files; {len(listed['outside'])} of {size} by SHA-256 only"
        f" (checkpoints and final weights); the run as a whole is {listed['sha256']}"
    )
    if weights_url is None:
        say(
            "The archive names no weights, which the closed division asks for."
            " Give --weights-url <address> once they are published."
        )


def _refuse(folder: Path, run: Run) -> None:
    """Raise UserError for a run that is invalid or not finished."""
    verdict = run.verdict
    if verdict.division == "unfinished":
        missing = unscored(folder, run.record)
        reason = "; ".join(finding.evidence for finding in verdict.broken_of("finished"))
        raise UserError(f"{folder}: not finished: {missing or reason}.")
    if verdict.division == "invalid":
        rules = ", ".join(finding.rule for finding in verdict.broken_of("both"))
        raise UserError(
            f"{folder}: invalid by {rules} (docs/reference/rules.md). Nothing to submit."
        )


def _manifest(folder: Path, record: Record) -> Path | None:
    """Return the manifest of the run's corpus, if it exists and the run folder does not hold it already."""
    if record.corpus.folder is None or (folder / MANIFEST).exists():
        return None
    manifest = Path(record.corpus.folder) / MANIFEST
    return manifest if manifest.is_file() else None
