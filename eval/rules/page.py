"""List of rules in docs/rules.md, generated from the docstrings of the checks.

python -m eval.rules.page        # writes docs/rules.md anew
"""

import re
from pathlib import Path

from eval.rules.table import PLAUSIBILITY_RULES, RECORD_RULES, Kind, Rule

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rules.md"
# kind of a rule -> heading of its list
TITLES: dict[Kind, str] = {
    "finished": "Finished runs",
    "both": "Both divisions",
    "closed": "Closed division",
    "remark": "Remarks",
}
_GENERATED = re.compile(r"(<!-- rules: begin -->\n).*(<!-- rules: end -->)", re.DOTALL)


def rules_page(page: str) -> str:
    """Return the page with a newly generated list of rules and the other text unchanged."""
    lists: list[str] = []
    for kind, title in TITLES.items():
        rules = [rule for rule in RECORD_RULES if rule.kind == kind]
        lists += _list(title, rules)
        if kind == "both":
            rules = [rule for rule in PLAUSIBILITY_RULES if rule.kind == kind]
            lists += _list("Both divisions: plausibility of the log", rules)
        if kind == "remark":
            lists += _list(title, [rule for rule in PLAUSIBILITY_RULES if rule.kind == kind])
    text = "\n".join(lists)
    return _GENERATED.sub(lambda match: f"{match[1]}\n{text}\n{match[2]}", page)


def _list(title: str, rules: list[Rule]) -> list[str]:
    if not rules:
        return []
    sentences = [f"- **{rule.number}** {rule.sentence}" for rule in rules]
    return [f"## {title}", "", *sentences, ""]


if __name__ == "__main__":
    PAGE.write_text(rules_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
