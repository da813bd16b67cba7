"""List of rules, generated from the docstrings of the checks.

python -m eval.rules.page        # prints it; the site's page of rules shows the same
"""

from collections.abc import Sequence

from eval.rules.table import PLAUSIBILITY_RULES, RECORD_RULES, Kind, Rule

# kind of a rule -> heading of its list
TITLES: dict[Kind, str] = {
    "finished": "Finished runs",
    "both": "Both divisions",
    "closed": "Closed division",
    "remark": "Remarks",
}


def rules_list() -> str:
    """Return the numbered sentences of all rules as Markdown, one list for each kind."""
    lines: list[str] = []
    for kind, title in TITLES.items():
        lines += _list(title, _of_kind(RECORD_RULES, kind))
        if kind == "both":
            title = "Both divisions: plausibility of the log"
        lines += _list(title, _of_kind(PLAUSIBILITY_RULES, kind))
    return "\n".join(lines)


def _of_kind(rules: Sequence[Rule], kind: Kind) -> list[Rule]:
    return [rule for rule in rules if rule.kind == kind]


def _list(title: str, rules: list[Rule]) -> list[str]:
    if not rules:
        return []
    sentences = [f"- **{rule.number}** {rule.sentence}" for rule in rules]
    return [f"## {title}", "", *sentences, ""]


if __name__ == "__main__":
    print(rules_list())
