"""The table of facts on a run's page: the model, its budget, its corpus, and the machine and code that made it."""

from eval.report.leaderboard import compact, duration
from eval.report.render import Cell, Group, Table
from eval.rules.reading import Record, at, entries, names_of, number

# What a run's facts are made of: a title, and for each part its path in the record and its wording. {n} is a number in
# short form, {p} a share in percent, {b} bytes in GB, {s} a text, {h} the start of a hash. What is not on record is
# left out.
_FACTS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Scored model", (("glue.pretrained.model", "{s}"),)),
    (
        "Parameters",
        (("pretrain.parameters", "{n}"), ("pretrain.parameters_without_embeddings", "{n} without embeddings")),
    ),
    (
        "Training",
        (
            ("pretrain.steps", "{n} steps"),
            ("pretrain.tokens", "{n} tokens"),
            ("pretrain.sequences", "{n} sequences"),
            ("pretrain.exaflops", "{n} exaFLOPs"),
            ("pretrain.corpus_epochs", "{n} passes over the corpus"),
            ("pretrain.skipped_steps", "{n} steps skipped"),
            ("pretrain.seed", "seed {s}"),
        ),
    ),
    (
        "Speed",
        (
            ("pretrain.tokens_per_second", "{n} tokens/s"),
            ("pretrain.model_flops_utilization", "{p} of the peak FLOP/s"),
            ("pretrain.data_wait_share", "{p} waiting for data"),
            ("pretrain.peak_memory_bytes", "{b} GB peak memory"),
        ),
    ),
    ("Energy of the GPU", (("pretrain.energy_kwh", "{n} kWh"), ("pretrain.energy_source", "{s}"))),
    (
        "Loss",
        (
            ("pretrain.train_loss", "{n} training"),
            ("pretrain.validation.loss", "{n} validation"),
            ("pretrain.validation.accuracy", "{p} of masked tokens right"),
            ("pretrain.validation.all_mask_loss", "{n} validation with all targets behind [MASK]"),
            ("pretrain.validation.bits_per_byte", "{n} bits per byte"),
        ),
    ),
    (
        "Corpus",
        (
            ("corpus.tokens", "{n} tokens"),
            ("corpus.documents", "{n} documents"),
            ("corpus.tokenizer.kind", "{s}"),
            ("corpus.vocab_size", "vocabulary {n}"),
            ("corpus.manifest_sha256", "manifest {h}"),
            ("corpus.validation.manifest_sha256", "validated on manifest {h}"),
        ),
    ),
    (
        "Machine",
        (
            ("environment.device.name", "{s}"),
            ("environment.cpu_count", "{n} CPU cores"),
            ("environment.platform", "{s}"),
        ),
    ),
    (
        "Versions",
        (
            ("suite_version", "cramming {s}"),
            ("environment.python", "Python {s}"),
            ("environment.torch", "torch {s}"),
            ("environment.transformers", "transformers {s}"),
            ("rules_version", "rules {s}"),
        ),
    ),
    ("Code", (("environment.git.commit", "commit {h}"),)),
    ("Weights", (("pretrain.final_sha256", "SHA-256 {h}"),)),
    ("Created", (("created", "{s}"),)),
)


def facts(record: Record) -> Table:
    """The lines of which something is on record."""
    lines = [(title, ", ".join(filter(None, (_words(record, *part) for part in parts)))) for title, parts in _FACTS]
    sources = entries(at(record, "corpus.sources"))
    licences = dict.fromkeys(str(at(s, "license") or "no licence given") for s in sources)
    origin = f"{names_of(sources)} ({', '.join(licences)})" if sources else ""
    lines = [lines[0], ("Budget", _budget(record)), *lines[1:], ("Sources", origin)]
    return Table(["", ""], [Group([[Cell(title, "", "main"), Cell(value)] for title, value in lines if value])], left=2)


def _budget(record: Record) -> str:
    limit, spent = number(record, "pretrain.budget.limit"), number(record, "pretrain.budget.spent")
    seconds, overrun = (number(record, f"pretrain.budget.{key}") for key in ("spent_seconds", "overrun_seconds"))
    processes = len(entries(at(record, "pretrain.budget.processes")))
    parts = [
        "" if limit is None or spent is None else f"{spent:.6g} of {limit:.6g} {at(record, 'pretrain.budget.unit')}",
        "" if seconds is None else f"{duration(seconds)} in {processes} process(es)",
        "" if overrun is None else f"overrun {overrun:g} s",
    ]
    return ", ".join(filter(None, parts))


def _words(record: Record, path: str, form: str) -> str:
    found, value = at(record, path), number(record, path)
    if found is None or found == "" or (value is None and any(sign in form for sign in ("{n}", "{p}", "{b}"))):
        return ""
    known = value if value is not None else 0.0  # only forms without a number get here without one
    return form.format(s=found, h=str(found)[:12], n=compact(known), p=f"{100 * known:.1f}%", b=f"{known / 1e9:.2f}")
