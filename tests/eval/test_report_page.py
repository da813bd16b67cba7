"""The leaderboard's page in a headless Chromium: what a reader does with it, and what a browser or axe-core objects to.

Skipped without Playwright and axe-core (`pip install 'cramming[browser]'`) or without a Chromium in the PATH.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cramming.data.task_files import ENTRIES
from eval.report.main import main
from eval.report.run_page import curve_of
from eval.rules.load import Run
from tests.eval.runs import BEGAN, add_measures, score_checkpoint, write_run

BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
CHROMIUM = next(filter(None, BROWSERS), None)
SETTINGS: dict[str, Any] = {
    "out": None,
    "each_run": True,
    "duels": Path("no duels"),
    "repository": "https://example.org/cramming",
}
DEVICES = ("RTX A6000", "RTX 2080 Ti")
NAMES = "table.runs tbody .more"

Page = Any  # of Playwright, which need not be there
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright: pip install 'cramming[browser]'"
    )
    if CHROMIUM is None:
        pytest.skip("needs a Chromium in the PATH")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


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
    """Leaderboard of four runs, and of a fifth that is not scored."""
    folder = _write_runs(tmp_path_factory.mktemp("page"), 4)
    write_run(folder / "young", ended=None)
    main(runs=folder, **SETTINGS)
    return folder / "report" / "leaderboard.html"


@pytest.fixture
def open_page(browser: Any, page_file: Path) -> Iterator[Open]:
    """`open_page(fragment, width, file)`: the page, ready.

    At the end nothing was reported to the console, and nothing was asked of the network.
    """
    wrong: list[str] = []
    pages: list[Page] = []

    def open_one(fragment: str = "", width: int = 1400, file: Path = page_file) -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        address = file.as_uri()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: asked.url == address or wrong.append(asked.url))
        page.goto(f"{address}{fragment}")
        page.wait_for_selector("html[data-ready=complete]")
        return page

    yield open_one
    for page in pages:
        page.close()
    assert [each for each in wrong if not each.startswith(page_file.as_uri())] == []


def _texts(page: Page, selector: str = NAMES) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_text_contents()]


def test_tables_sort_within_their_groups_by_mouse_and_by_keyboard(open_page: Open) -> None:
    """The first run has a track of its own, the last but one is open, the last is not scored."""
    page = open_page()
    assert _texts(page) == ["run1", "run2", "run0", "run3", "young"]
    head = page.locator("table.runs thead th", has_text="RTE").first
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert _texts(page) == ["run1", "run0", "run2", "run3", "young"]
    page.locator(".view", has_text="Recipe").click()
    page.locator("thead button", has_text="Width").first.click()
    assert "3" in _texts(page, "tbody td")  # layers


@pytest.mark.parametrize(
    ("name", "value", "left"),
    [
        ("device", DEVICES[1], ["run1", "run3"]),
        ("division", "open", ["run3"]),
        ("since", "2030-01-03", ["run2", "run3"]),
        ("name", "N2", ["run2"]),
    ],
)
def test_filters_hide_rows_and_say_how_many_are_left(
    open_page: Open, name: str, value: str, left: list[str]
) -> None:
    page = open_page()
    field = page.locator(f".filters [name={name}]")
    field.select_option(value) if name in ("device", "division") else field.fill(value)
    assert sorted(_texts(page)) == left
    assert _texts(page, ".filters output") == [f"{len(left)} of 5 rows"]
    page.locator(".filters button", has_text="All runs").click()
    assert len(_texts(page)) == 5


def test_a_row_opens_to_tasks_rules_curves_and_files(open_page: Open) -> None:
    page = open_page()
    more = page.locator(".more", has_text="run2")
    more.press("Enter")
    panel = page.locator("tr.detail .panel")
    panel.locator("canvas").wait_for()
    text = panel.text_content()
    assert "MNLI-mm" in text and "every rule holds" in text
    targets = {a.text_content(): a.get_attribute("href") for a in panel.locator("a").all()}
    assert targets["run log"] == "../run2/run.jsonl"
    assert targets["report"] == "../run2/report/report.html"
    commit = "0123456789abcdef0123"
    assert targets[f"commit {commit[:12]}"] == f"https://example.org/cramming/commit/{commit}"
    more.click()
    assert panel.count() == 0


def test_curves_tell_their_values_and_the_comparison_what_differs(open_page: Open) -> None:
    page = open_page("#runs=run0+run1")
    compared = page.locator("#compare")
    assert "model.hidden_size128256" in _texts(page, "#compare tbody tr")
    for axis in ("step", "tokens", "hours", "exaflops"):
        compared.locator("select").nth(1).select_option(axis)
        compared.locator(".u-over").hover(position={"x": 200, "y": 100})
        values = _texts(page, "#compare .u-legend .u-value")
        assert len(values) == 5 and "–" not in values
    compared.locator(".plot").press("ArrowRight")
    assert _texts(page, "#compare .u-legend .u-value")[0] != values[0]
    compared.locator("[type=range]").fill("0.9")
    assert compared.locator(".u-legend .u-series").count() == 7  # and both lines as logged
    page.locator("[aria-label='Compare run1']").uncheck()
    assert not any("model.hidden_size" in row for row in _texts(page, "#compare tbody tr"))


def test_score_against_cost_names_the_run_and_opens_it(open_page: Open) -> None:
    page = open_page("#cost=tokens")
    plot = page.locator(".cost .u-over")
    plot.hover()  # scrolls there; the plot knows its new place some frames later
    page.wait_for_timeout(200)
    corner = {"x": plot.bounding_box()["width"] - 4, "y": 4}
    plot.hover(position=corner)
    page.locator(".cost .u-legend", has_text="79.2 run3").wait_for()
    plot.click(position=corner)
    page.locator("tr.detail section[aria-label=run3]").wait_for()
    page.locator(".cost select").nth(1).select_option("money")
    price = page.locator(".cost [type=number]")
    price.fill("7")
    address = page.evaluate("location.hash")
    assert "price=7" in address and "cost=money" in address


def test_scores_along_the_way_are_a_line_of_the_run(open_page: Open, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, change={"checkpoint": {"retained": True}})
    score_checkpoint(tmp_path / "a")
    main(runs=tmp_path, **SETTINGS)
    page = open_page("#cost=hours", file=tmp_path / "report" / "leaderboard.html")
    page.locator(".cost .u-legend", has_text="a, along the way").wait_for()
    plot = page.locator(".cost .u-over")
    plot.hover()
    page.wait_for_timeout(200)
    plot.hover(position={"x": 4, "y": plot.bounding_box()["height"] - 4})
    page.locator(".cost .u-legend", has_text="a, 30.8 % of the budget").wait_for()
    for cost in ("tokens", "money", "exaflops"):
        page.locator(".cost select").nth(1).select_option(cost)
        assert page.locator(".cost .u-legend", has_text="a, along the way").count() == 1
    page.locator(".cost select").nth(1).select_option("parameters")
    assert page.locator(".cost .u-legend", has_text="along the way").count() == 0
    own = open_page(file=tmp_path / "a" / "report" / "report.html")
    assert "30.8 %" in _texts(own, "tbody th")


def test_the_second_table_has_the_averages_and_the_measures_that_some_run_has(
    open_page: Open, tmp_path: Path
) -> None:
    for name, rate in {"a": 1e-3, "b": 2e-3}.items():
        write_run(tmp_path / name, learning_rate=rate)
    add_measures(tmp_path / "a")
    main(runs=tmp_path, **SETTINGS | {"each_run": False})
    page = open_page("#view=measures", file=tmp_path / "report" / "leaderboard.html")
    averages = ["#", "Model", "avg-9", "over baseline", "avg-8"]
    measures = ["Bits/byte", "Pseudo-perplexity", "Minimal pairs", "Minimal pairs, by word"]
    heads = [*averages, *measures, "Inference tokens/s", "Inference memory"]
    assert _texts(page, "table.runs thead button") == heads
    cells = _texts(page, "table.runs tbody td.n")
    measured = ["12.5", "71.5", "68.3", "54.32K", "1.07 GB"]
    rows = [cells[start + 4 : start + 9] for start in (0, 9)]
    assert sorted(rows) == sorted([measured, ["–"] * 5])


def test_the_address_shows_the_same_again(open_page: Open) -> None:
    page = open_page()
    page.locator(".view", has_text="Training").click()
    page.locator("thead button", has_text="Validation").first.click()
    page.locator("[aria-label='Compare run3']").check()
    page.locator(".filters [name=name]").fill("run")
    page.locator("#compare select").nth(1).select_option("hours")
    other = open_page("#" + page.url.partition("#")[2])
    for selector in (NAMES, "thead th", ".view[aria-pressed=true]", "#compare tbody tr"):
        assert _texts(other, selector) == _texts(page, selector)
    assert other.locator("#compare select").nth(1).input_value() == "hours"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 800, 1400])
def test_no_overflow_and_nothing_serious_for_axe(open_page: Open, width: int, scheme: str) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs axe: pip install 'cramming[browser]'"
    )
    page = open_page("#open=run1", width)
    page.emulate_media(color_scheme=scheme)
    page.locator("tr.detail canvas").wait_for()
    page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    score = page.locator("table.runs tbody .n").first.bounding_box()
    assert score["x"] + score["width"] < width
    name = page.locator("table.runs tbody th.model").first
    before = name.bounding_box()["x"]
    page.locator("[aria-label=GLUE]").evaluate("one => { one.scrollLeft = 300; }")
    assert before - 60 < name.bounding_box()["x"] <= before  # the name stays in sight
    violations = axe.Axe().run(page).response["violations"]
    serious = [each for each in violations if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"]) for each in serious] == []


def test_a_page_of_two_tasks_has_no_empty_column(open_page: Open, tmp_path: Path) -> None:
    for name in ("a", "b"):
        scores: Any = {"pretrained": {task: [0.7] * 3 for task in ("cola", "sst2")}}
        write_run(tmp_path / name, scores=scores)
    main(runs=tmp_path, **SETTINGS | {"each_run": False})
    page = open_page(file=tmp_path / "report" / "leaderboard.html")
    assert _texts(page, "thead button")[:5] == ["Model", "task mean‡", "SST-2", "CoLA", "Division"]
    assert len(ENTRIES) > 5


def test_a_recipe_of_several_seeds_is_one_row_that_opens_to_all_its_runs(
    open_page: Open, tmp_path: Path
) -> None:
    for seed in (0, 1):
        name, scores = f"mine-seed{seed}", {"pretrained": 0.6 + seed / 100}
        write_run(tmp_path / f"mine{seed}", name=name, seed=seed, scores=scores)  # type: ignore[arg-type]
    main(runs=tmp_path, **SETTINGS | {"each_run": False})
    page = open_page("#name=seed1", file=tmp_path / "report" / "leaderboard.html")
    assert _texts(page) == ["mine"]
    page.locator(".more").click()
    page.locator("tr.detail section").nth(1).wait_for()
    sections = page.locator("tr.detail section").all()
    labels = sorted(section.get_attribute("aria-label") for section in sections)
    assert labels == ["mine-seed0", "mine-seed1"]


def test_without_scripts_the_entries_and_their_headlines_stand(
    browser: Any, page_file: Path
) -> None:
    context = browser.new_context(java_script_enabled=False, viewport={"width": 400, "height": 900})
    page = context.new_page()
    page.goto(page_file.as_uri())
    heads = ["#", "Model", "avg-9", "over baseline", "Hours", "Hardware", "Division"]
    assert _texts(page, "thead th") == heads
    rows = [line.split("\t") for line in page.locator("tbody").inner_text().splitlines()]
    values = {row[1]: row for row in rows}
    assert {"run0", "run1", "run2", "run3"} <= values.keys()
    assert values["run3"][5:] == [DEVICES[1], "open"] and values["run3"][2] == "79.2 ±0.2"
    assert float(values["run3"][4]) > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.goto((page_file.parents[1] / "run2" / "report" / "report.html").as_uri())
    assert {"avg-9", "RTE"} <= set(_texts(page, "tbody td:first-child"))
    context.close()


def test_a_runs_own_page_shows_its_report(open_page: Open, page_file: Path) -> None:
    page = open_page(file=page_file.parents[1] / "run2" / "report" / "report.html")
    page.locator("canvas").wait_for()
    assert _texts(page, "h1") == ["run2 (closed)"]
    assert "every rule holds" in page.text_content("main")


def test_names_are_text_in_the_page(open_page: Open, tmp_path: Path) -> None:
    write_run(tmp_path / "ungefähr 长名", name="<b>长|$x$</b>")
    main(runs=tmp_path, **SETTINGS)
    page = open_page(file=tmp_path / "report" / "leaderboard.html")
    assert _texts(page) == ["<b>长|$x$</b>"] and page.locator("main b").count() == 0


def test_a_page_of_500_runs_stays_below_5_megabytes(tmp_path: Path) -> None:
    sizes = {}
    for count in (2, 8):
        runs = _write_runs(tmp_path / str(count), count)
        main(runs=runs, **SETTINGS | {"each_run": False})
        sizes[count] = (runs / "report" / "leaderboard.html").stat().st_size
    assert sizes[8] + 492 * (sizes[8] - sizes[2]) / 6 < 5e6


def test_curves_are_means_of_steps_and_what_is_missing_is_null() -> None:
    steps: list[dict[str, Any]] = [
        {"step": k, "tokens": 10 * k, "seconds": 1.0 * k, "loss": float(k), "lr": 0.1}
        for k in range(1, 401)
    ]
    validation = {"step": 400, "tokens": 4000, "seconds": 400.0, "validation_loss": 2.0}
    curve = curve_of(Run(Path("a"), "a", metrics=[*steps, validation]))
    assert len(curve["train"]["loss"]) == 200 and curve["train"]["loss"][:2] == [1.5, 3.5]
    assert set(curve["train"]["grad_norm"]) == {None}
    assert curve["validation"]["validation_loss"] == [2.0] and curve["flops"] is None
