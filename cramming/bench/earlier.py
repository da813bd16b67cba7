"""What earlier calls of `cramming bench tricks` measured, so that a call for some rows adds to them.

A row stays as long as all that its numbers depend on is the same: device, settings, versions, number of threads. Of two
rows with one name the later counts. Not compared is the code: below the table stands which commit made which rows.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cramming.bench import tables
from cramming.bench.gate import Floor
from cramming.device import DeviceInfo
from cramming.progress import say

Row = dict[str, Any]


@dataclass(frozen=True)
class Earlier:
    """Rows of the table and floors of the gate."""

    rows: list[Row] = field(default_factory=list)
    floors: list[Floor] = field(default_factory=list)

    @classmethod
    def read(cls, raw: Path, device: DeviceInfo, settings: dict[str, Any]) -> "Earlier":
        """Of the newest raw file of this device; nothing where that was measured under other conditions."""
        files = sorted(raw.glob(f"tricks_{tables.slug(device)}_????-??-??.json"))
        if not files:
            return cls()
        content = json.loads(files[-1].read_text(encoding="utf-8"))
        now, then = tables.conditions(settings), content.get("conditions", {})
        if other := [name for name in now if now[name] != then.get(name)]:
            say(f"{files[-1]}: its rows were measured with another {', '.join(other)}; the table begins anew")
            return cls()
        return cls(content["rows"], [Floor(floor["rounding"], floor["strays"]) for floor in content["floors"]])

    def and_rows(self, rows: Sequence[Row], order: Sequence[str]) -> list[Row]:
        """With these, in the order of the table; what it has no more goes."""
        known = {row["name"]: row for row in (*self.rows, *rows)}
        return [known[name] for name in order if name in known]

    def and_floors(self, floors: Sequence[Floor]) -> list[Floor]:
        """With these, which take the place of earlier ones of their kind."""
        return list({floor.rounding: floor for floor in (*self.floors, *floors)}.values())
