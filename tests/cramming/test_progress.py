"""A table is whole in a window of any width."""

import io

import pytest
from rich.console import Console

from cramming import progress


@pytest.mark.parametrize("width", [20, 60, 200])
def test_no_cell_of_a_table_is_cut_short(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    window = Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False, soft_wrap=True)
    monkeypatch.setattr(progress, "_console", window)
    rows = [[f"{row}{column}" * 3 for column in range(12)] for row in range(3)]
    progress.show_table("sizes", [f"column {n}" for n in range(12)], rows)
    shown = window.file.getvalue()  # type: ignore[attr-defined]
    assert all(cell in shown for row in rows for cell in row) and "column 11" in shown
    assert ("│" in shown) == (width == 200)
