"""The leaderboard as LaTeX, a table per suite for the package booktabs, with the published rows beneath GLUE's."""

from collections.abc import Sequence

from eval.report.leaderboard import Board
from eval.report.render import Cell, Group
from eval.report.wording import DASH, SUBSET

LEFT = 3  # columns of words; those behind them have numbers
SPECIAL = str.maketrans(
    {
        **{c: f"\\{c}" for c in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        DASH: "--",
        "±": r"$\pm$",
        "×": r"$\times$",
        SUBSET: r"$^\dagger$",
    }
)
EMPHASIS = {"best": r"\textbf{%s}", "main": r"\textbf{%s}"}


def latex(boards: Sequence[Board]) -> str:
    """The text of leaderboard.tex."""
    head = "% Needs \\usepackage{booktabs}, and \\usepackage{graphicx} for the width.\n"
    return head + "\n".join(map(_table, boards))


def _table(board: Board) -> str:
    groups = [group for group in (*board.groups, board.published) if group.rows]
    columns = board.columns
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_escaped(board.title)}}}",
            r"\resizebox{\textwidth}{!}{%",
            rf"\begin{{tabular}}{{{'l' * LEFT}{'r' * (len(columns) - LEFT)}}}",
            r"\toprule",
            " & ".join(map(_escaped, columns)) + r" \\",
            *(line for group in groups for line in _lines(group, len(columns))),
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


def _lines(group: Group, columns: int) -> list[str]:
    title = rf"\multicolumn{{{columns}}}{{l}}{{\textit{{{_escaped(group.title)}}}}} \\"
    return [
        r"\midrule",
        title,
        *(" & ".join(map(_cell, row, range(columns))) + r" \\" for row in group.rows),
    ]


def _cell(cell: Cell, place: int) -> str:
    """A number with its spread; of words the first line only."""
    text = EMPHASIS.get(cell.tone, "%s") % _escaped(cell.text) if cell.text else ""
    return text + (
        rf" {{\scriptsize {_escaped(cell.small)}}}" if cell.small and place >= LEFT else ""
    )


def _escaped(text: str) -> str:
    return " ".join(text.split()).translate(SPECIAL)
