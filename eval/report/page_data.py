"""What the page's scripts work with (templates/*.js), as JSON, deflated, in base64: the page carries 500 runs in less
than 5 MB.

`facts` has a line for each run, to filter by and to plot scores against cost, and is read when the page opens.
`details` has what is shown on demand: curves, settings, the HTML of a run's own section.
"""

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cramming.record_schema import Record, number
from eval.report import plots
from eval.report.render import Data
from eval.report.run_page import RunPage
from eval.report.settings import differences
from eval.report.tracks import track_of

POINTS = 200  # of a curve


def packed(value: Any) -> str:
    """The value as the scripts unpack it."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return base64.b64encode(zlib.compress(text.encode(), 9, -zlib.MAX_WBITS)).decode()


def _facts(page: RunPage) -> dict[str, Any]:
    """What a run is filtered by, its costs and its scores."""
    record = page.run.record
    training, device = record.training, record.environment.device
    seconds = training.budget.spent_seconds
    return {
        "name": page.run.label,
        "division": page.run.verdict.division if page.rows else "not scored",
        "track": track.title if (track := track_of(record)) else "",
        "device": device.name or device.kind or "",
        "date": (record.created or "")[:10],
        "cost": {
            "hours": None if seconds is None else seconds / 3600,
            "exaFLOPs": training.exaflops,
            "tokens": training.tokens,
            "parameters": training.parameters,
        },
        "scores": {row.suite: row.main for row in page.rows if not row.baseline},
    }


@dataclass(frozen=True)
class Section:
    """A run's part of the page: `html` is what its row opens to, empty where the page shows it anyway."""

    page: RunPage
    curve: Mapping[str, Any]
    html: str = ""


def data_of(sections: Sequence[Section]) -> Data:
    """Of a page with these runs. Its details are the settings that most runs have, and for each run where it differs,
    its curve and its HTML."""
    usual, own = differences([section.page.run.record.config for section in sections])
    runs = {
        section.page.anchor: {"settings": settings, "curve": section.curve, "html": section.html}
        for section, settings in zip(sections, own)
    }
    facts = {section.page.anchor: _facts(section.page) for section in sections}
    return Data(packed(facts), packed({"settings": usual, "runs": runs}))


def curve(rows: Sequence[Mapping[str, Any]], record: Record) -> dict[str, Any]:
    """Columns of at most POINTS points each: `train` and `validation` have `tokens`, `hours` and `loss` (nats), `train`
    also `lr`; `flops` is exaFLOPs per token, on average over the run, None where that is not on record. The validation
    of the final weights is after the last step, and counts at that step's time."""
    flops, tokens = record.training.exaflops, record.training.tokens
    end = max(
        (seconds for row in rows if "loss" in row and (seconds := number(row.get("seconds")))),
        default=math.inf,
    )
    rows = [
        row if (number(row.get("seconds")) or 0.0) <= end else {**row, "seconds": end}
        for row in rows
    ]
    return {
        "train": _columns(
            rows, {"tokens": "tokens", "seconds": "hours", "loss": "loss", "lr": "lr"}
        ),
        "validation": _columns(
            rows, {"tokens": "tokens", "seconds": "hours", "validation_loss": "loss"}
        ),
        "flops": flops / tokens if flops and tokens else None,
    }


def _columns(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, list[float]]:
    """Of the rows that have all of `names`."""
    points = ([number(row[name]) for name in names] for row in rows if row.keys() >= names.keys())
    known = plots.thinned(
        [[p for p in point if p is not None] for point in points if None not in point], POINTS
    )
    scales = [1 / 3600 if name == "seconds" else 1.0 for name in names]
    columns = zip(*known) if known else [()] * len(names)
    return {
        title: [float(f"{value * scale:.4g}") for value in column]
        for title, scale, column in zip(names.values(), scales, columns)
    }
