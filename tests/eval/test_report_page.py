"""The leaderboard's page in a headless Chromium: what a reader does with it, and what a browser or axe-core objects to.

Skipped without Playwright and axe-core (`pip install 'cramming[browser]'`) or without a Chromium in the PATH.
"""

import base64
import json
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eval.report.page_data import curve, packed

from cramming.record_schema import Record
from eval.report import plots
from eval.report.main import main
from tests.eval.runs import BEGAN, write_run

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SETTINGS = {
    "out": None,
    "each_run": True,
    "duels": "no duels",
    "repository": "https://example.org/cramming",
}
DEVICES = ("RTX A6000", "RTX 2080 Ti")
NAMES = [f"run{place}" for place in range(4)]

Page = Any  # of Playwright, which need not be there


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright: pip install 'cramming[browser]'"
    )
    if CHROMIUM is None:
        pytest.skip("needs a Chromium in the PATH")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def _write_runs(folder: Path, count: int) -> Path:
    """Write runs on two devices, five points apart in score, with two widths; every fourth is open."""
    for place in range(count):
        write_run(
            folder / f"run{place}",
            overrides=["model.hidden_size=256"] if place % 2 else [],
            learning_rate=1e-3 * (1 + place),
            steps=100 + place,
            limit=110 / 6000,
            division="open" if place % 4 == 3 else "closed",
            scores={"pretrained": 0.6 + 0.05 * (place % 4), "random": 0.5},
            began=BEGAN + 86400 * (place % 9),
            change={"setup": {"environment": {"device": {"name": DEVICES[place % 2]}}}},
        )
    return folder


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The leaderboard of four runs."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "training", lambda curves: None)
        main({"runs": str(_write_runs(folder, len(NAMES))), "report": SETTINGS})
    return folder / "report" / "leaderboard.html"


@pytest.fixture
def opened(browser: Any, page_file: Path) -> Iterator[Page]:
    """The page, ready; at the end nothing was reported to the console, and nothing was asked of the network."""
    page = browser.new_page(viewport={"width": 1600, "height": 900})
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: wrong.append(request.url) if request.url != page_file.as_uri() else None,
    )
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-ready=compared]")
    yield page
    page.close()
    assert wrong == []


def _names(page: Page, table: str = "table.scores") -> list[str]:
    """The runs in a table's visible rows, from top to bottom."""
    return list(
        page.eval_on_selector_all(
            f"{table} tbody tr:not([hidden]) > th a", "all => all.map(a => a.textContent)"
        )
    )


def test_tables_sort_within_their_groups_by_mouse_and_by_keyboard(opened: Page) -> None:
    assert _names(opened) == [
        "run1",
        "run2",
        "run0",
        "run3",
    ]  # the first has a track of its own, the last is open
    head = opened.locator("table.scores thead th", has_text="RTE")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending" and _names(opened) == [
        "run1",
        "run2",
        "run0",
        "run3",
    ]
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "ascending" and _names(opened) == [
        "run1",
        "run0",
        "run2",
        "run3",
    ]
    opened.locator("[aria-label=Recipes] thead button", has_text="Width").click()
    widths = opened.eval_on_selector_all(
        "[aria-label=Recipes] tbody td:nth-child(4)", "all => all.map(a => a.textContent)"
    )
    assert widths == sorted(widths, reverse=True) and set(widths) == {"128", "256"}


def test_filters_hide_rows_in_every_table_and_say_how_many_are_left(opened: Page) -> None:
    for name, value, left in (
        ("device", DEVICES[1], ["run1", "run3"]),
        ("division", "open", ["run3"]),
        ("since", "2030-01-03", ["run2", "run3"]),
        ("name", "N2", ["run2"]),
    ):
        field = opened.locator(f".filters [name={name}]")
        field.select_option(value) if name in ("device", "division") else field.fill(value)
        for table in ("table.scores", "[aria-label=Pretraining]", "[aria-label=Recipes]"):
            assert sorted(_names(opened, table)) == left
        assert opened.locator(".filters output").text_content() == f"{len(left)} of 4 runs"
        opened.locator(".filters button[type=reset]").click()
        opened.locator(".filters output", has_text="4 of 4 runs").wait_for()


def test_a_row_opens_to_tasks_rules_curves_and_files(opened: Page) -> None:
    row = opened.locator("table.scores tr", has=opened.locator("a", has_text="run2"))
    row.locator("button.more").press("Enter")
    panel = opened.locator("tr.detail .panel")
    panel.locator("canvas").wait_for()
    text = panel.text_content()
    assert (
        "MNLI-mm" in text
        and "Closed division. Every rule holds." in text
        and "layers 3, width 128" in text
    )
    targets = {a.text_content(): a.get_attribute("href") for a in panel.locator("a").all()}
    assert (
        targets["run log"] == "../run2/run.jsonl"
        and targets["report"] == "../run2/report/report.html"
    )
    assert (
        targets["commit 0123456789ab"] == "https://example.org/cramming/commit/0123456789abcdef0123"
    )
    row.locator("button.more").click()
    assert panel.count() == 0


def test_curves_tell_their_values_and_the_comparison_what_differs(opened: Page) -> None:
    compared = opened.locator("#compare")
    rows = compared.locator("table.differences tbody tr")
    assert "model.hidden_size256128128" in rows.all_text_contents()
    opened.locator("[aria-label='Compare run1']").first.uncheck()
    assert not [row for row in rows.all_text_contents() if "model.hidden_size" in row]
    for axis in ("tokens", "hours", "exaFLOPs"):
        compared.locator("select").nth(1).select_option(axis)
        plot = compared.locator(".u-over")
        plot.hover(position={"x": 200, "y": 100})
        values = compared.locator(".u-legend .u-value").all_text_contents()
        assert len(values) == 5 and "–" not in values
    compared.locator(".plot").press("ArrowRight")
    assert compared.locator(".u-legend .u-value").first.text_content() != values[0]


def test_score_against_cost_names_the_run_and_opens_it(opened: Page) -> None:
    opened.locator(".cost select").select_option("exaFLOPs")
    plot = opened.locator(".cost .u-over")
    plot.hover()  # scrolls there; the plot knows its new place some frames later
    plot.hover(position={"x": plot.bounding_box()["width"] - 4, "y": 4})
    assert opened.locator(".cost .u-legend").text_content().count("79.2 run3") == 1
    plot.click(position={"x": plot.bounding_box()["width"] - 4, "y": 4})
    opened.locator("tr.detail section[aria-label=run3]").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_no_overflow_and_nothing_serious_for_axe(opened: Page, width: int, scheme: str) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs axe: pip install 'cramming[browser]'"
    )
    opened.set_viewport_size({"width": width, "height": 900})
    opened.emulate_media(color_scheme=scheme)
    opened.locator("button.more").first.click()
    opened.locator("tr.detail canvas").wait_for()
    opened.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    drawn = opened.locator("figure svg").first
    units = float(drawn.get_attribute("viewBox").split()[2])
    assert drawn.bounding_box()["width"] >= units, "words of 9 units are 9 pixels at least"
    first = opened.locator("table.scores tbody tr:not(.group) > th").first
    before = first.bounding_box()["x"]
    opened.locator("[aria-label=GLUE]").evaluate("one => { one.scrollLeft = 300; }")
    assert before - 60 < first.bounding_box()["x"] <= before  # the name stays in sight
    found = axe.Axe().run(opened).response["violations"]
    assert [
        (one["id"], one["nodes"][0]["html"])
        for one in found
        if one["impact"] in ("serious", "critical")
    ] == []


def test_a_recipe_of_several_seeds_is_one_row_that_opens_to_all_its_runs(
    browser: Any, tmp_path: Path
) -> None:
    for seed in (0, 1):
        write_run(
            tmp_path / f"mine{seed}",
            name=f"mine-seed{seed}",
            seed=seed,
            scores={"pretrained": 0.6 + seed / 100},
        )
    main({"runs": str(tmp_path), "report": SETTINGS | {"each_run": False}})
    page = browser.new_page()
    page.goto((tmp_path / "report" / "leaderboard.html").as_uri())
    page.wait_for_selector("html[data-ready=compared]")
    page.locator(".filters [name=name]").fill("seed1")
    assert _names(page) == ["mine"]
    page.locator("table.scores button.more").click()
    page.locator("tr.detail section").nth(1).wait_for()
    sections = page.locator("tr.detail section").all()
    assert sorted(one.get_attribute("aria-label") for one in sections) == [
        "mine-seed0",
        "mine-seed1",
    ]
    page.close()


def test_without_scripts_the_tables_stand_and_lead_to_each_runs_report(
    browser: Any, page_file: Path
) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert (
        page.locator("table.scores tbody th a").count() == 4
        and page.locator(".controls").count() == 0
    )
    page.locator("table.scores a", has_text="run2").click()
    page.locator("li:target a").click()
    assert page.title() == "run2" and "Every rule holds" in page.text_content("main")
    context.close()


def _written_again(page: str, count: int) -> str:
    """The page with its runs' rows and data written again under other names, until it has so many of each."""

    def rows(found: re.Match[str]) -> str:
        name = f"run{found[1]}"
        return "".join(
            found[0].replace(name, f"run{place}")
            for place in range(int(found[1]), count, len(NAMES))
        )

    def data(found: re.Match[str]) -> str:
        value = json.loads(zlib.decompress(base64.b64decode(found[2]), -zlib.MAX_WBITS))
        runs = value["runs"] if found[1] == "details" else value
        for place in range(len(NAMES), count):
            runs[f"run-run{place}"] = runs[f"run-run{place % len(NAMES)}"] | {"name": f"run{place}"}
        return f'id="{found[1]}">{packed(value)}<'

    page = re.sub(
        r'<tr>(?:(?!</tr>).)*?data-runs="run-run(\d)".*?</tr>', rows, page, flags=re.DOTALL
    )
    return re.sub(r'id="(facts|details)">([^<]+)<', data, page)


def test_of_500_entries_the_first_are_laid_out_and_all_are_found(
    browser: Any, page_file: Path
) -> None:
    """However busy the browser is: it is never idle here until the end."""
    many, shown = (
        page_file.with_name("many.html"),
        "row => row.checkVisibility({contentVisibilityAuto: true})",
    )
    many.write_text(_written_again(page_file.read_text(encoding="utf-8"), 500), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1600, "height": 900})
    page.add_init_script("window.idle = []; window.requestIdleCallback = (work) => idle.push(work)")
    page.goto(many.as_uri())
    page.wait_for_selector("html[data-ready=compared]")

    def visible(table: str = "table.scores") -> list[str]:
        rows = page.locator(f"{table} tbody tr:has([data-runs])")
        return list(
            rows.evaluate_all(
                f"all => all.filter({shown}).map(row => row.querySelector('a').textContent)"
            )
        )

    names = [f"run{place}" for place in range(500)]
    assert (
        page.evaluate(
            f"[...document.querySelectorAll('table.runs tbody tr')].filter({shown}).length"
        )
        <= 150
    )
    assert page.locator("table.scores tbody [data-runs]").count() == 500
    page.locator("table.scores thead button", has_text="Model").click()
    assert visible()[:3] == ["run1", "run5", "run9"] and len(visible()) < 100  # the first track
    page.locator(".filters [name=division]").select_option("open")
    assert visible()[:3] == ["run3", "run7", "run11"] and len(visible()) < 100
    page.locator(".filters [name=name]").fill("run499")
    assert (
        visible() == ["run499"]
        and page.locator(".filters output").text_content() == "1 of 500 runs"
    )
    page.locator(".filters button[type=reset]").click()
    page.locator(".filters output", has_text="500 of 500 runs").wait_for()
    page.emulate_media(media="print")
    for table in ("table.scores", "[aria-label=Pretraining]", "[aria-label=Recipes]"):
        assert sorted(visible(table)) == sorted(names)
    page.emulate_media(media="screen")
    page.evaluate("while (idle.length) idle.shift()()")
    assert sorted(visible()) == sorted(names)
    page.locator("[aria-label=Recipes] tbody tr").last.scroll_into_view_if_needed()
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert sorted(visible("[aria-label=Recipes]")) == sorted(names)
    page.close()


def test_a_page_of_500_runs_stays_below_5_megabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "training", lambda curves: None)
    monkeypatch.setattr(plots, "scores", lambda bars, title: None)
    sizes = {}
    for count in (2, 8):
        runs = _write_runs(tmp_path / str(count), count)
        main({"runs": str(runs), "report": SETTINGS | {"each_run": False}})
        sizes[count] = (runs / "report" / "leaderboard.html").stat().st_size
    assert sizes[8] + 492 * (sizes[8] - sizes[2]) / 6 < 5e6


def test_no_point_of_a_curve_is_beyond_the_last_step() -> None:
    """The validation of the final weights is off the clock, which goes on."""
    rows = [{"tokens": 10 * k, "seconds": 36.0 * k, "loss": 3.0, "lr": 0.1} for k in (1, 2)]
    ends = [
        {"tokens": 10, "seconds": 40.0, "validation_loss": 3.0},
        {"tokens": 20, "seconds": 720.0, "validation_loss": 2.0},
    ]
    found = curve([*rows, *ends], Record())
    assert found["train"]["hours"] == [0.01, 0.02]
    assert found["validation"] == {
        "tokens": [10.0, 20.0],
        "hours": [0.01111, 0.02],
        "loss": [3.0, 2.0],
    }
