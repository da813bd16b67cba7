"""The site: its generated parts say what the code says, and every page is complete.

`mkdocs build --strict` in .ci/run checks the links.
"""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from cramming import verbs
from cramming.settings_reference import SECTIONS
from eval.report.log_page import duel_events, run_events
from eval.rules.table import RULES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GENERATED_PAGES = ("settings", "verbs", "rules", "run_log")


def load_hooks() -> ModuleType:
    """Return docs/hooks.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = load_hooks()


def page(name: str) -> str:
    """Return a page of the reference as mkdocs gets it from the hook."""
    text = (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")
    return str(HOOKS.on_page_markdown(text))


@pytest.mark.parametrize("name", GENERATED_PAGES)
def test_every_marker_of_a_page_is_replaced(name: str) -> None:
    text = (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")
    assert "<!-- generated: " in text
    assert "<!--" not in page(name)


def test_the_page_of_rules_has_every_sentence_once() -> None:
    lines = page("rules").splitlines()
    for rule in RULES:
        assert lines.count(f"- **{rule.number}** {rule.sentence}") == 1


def test_the_page_of_settings_has_every_section_and_its_choices() -> None:
    text = page("settings")
    for section in SECTIONS:
        assert f"\n## {section}\n" in text
    assert "- `budget.minutes`: " in text and "normuon" in text


def test_the_page_of_verbs_has_every_verb_with_its_options() -> None:
    text = page("verbs")
    headings = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert sorted(headings) == sorted(["run", *verbs.MODULES])
    duel = text[text.index("### duel\n") : text.index("### ladder\n")]
    assert "| `--error` | Probability of a wrong verdict. | `0.05` |" in duel
    assert duel.count("`SETTING=VALUE`") == 1


def test_the_page_of_the_run_log_has_all_events() -> None:
    text = page("run_log")
    assert run_events() in text and duel_events() in text


def test_code_stays_and_the_rest_is_no_markup() -> None:
    escaped = HOOKS.escape("`a<b>` is <runs>/*_x_*")
    assert escaped == r"`a<b>` is &lt;runs&gt;/\*\_x\_\*"


def test_the_navigation_has_every_page_once() -> None:
    def pages_of(entries: object) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        values = entries.values() if isinstance(entries, dict) else entries
        assert not isinstance(values, str)
        return [name for value in values for name in pages_of(value)]  # type: ignore[attr-defined]

    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    files = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(pages_of(settings["nav"])) == files


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(DOCS.rglob("*.md"))], ids=str
)
def test_a_linked_file_exists(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    borrowed = {f"{DOCS}/{site_path}" for site_path in HOOKS.PICTURES}
    for link in links:
        file = path.parent / link.partition("#")[0]
        if "://" not in link and str(file) not in borrowed:
            assert file.exists(), link


def test_the_readme_and_the_architecture_are_short() -> None:
    for name, limit in (("README.md", 160), ("ARCHITECTURE.md", 80)):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= limit, name
