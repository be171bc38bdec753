"""The report in a browser: no script errors, no empty plots, working switches."""

import json
import shutil
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedaccord.experiments.analysis import plots, report
from fedaccord.experiments.analysis.figures import curve
from fedaccord.experiments.analysis.groups import groups_of
from fedaccord.experiments.analysis.ranking import ranked
from fedaccord.runs import reader
from tests.cli.shell import invoke, run, success
from tests.experiments.analysis.made import write

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
in_browser = pytest.mark.skipif(
    not (BROWSER and DRIVER),
    reason="needs chromium and chromedriver (Debian's chromium and chromium-driver)",
)
PLOTS = ("curves", "cost", "consensus", "classes", "clients", "sensitivity")
SECTIONS = ("setup", "summary", "methods", *PLOTS, "settings", "origin")
MODEL = "const of = (name) => Bokeh.documents[0].get_model_by_name(name);"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of real runs: two methods, two seeds, two rates, and one without a server."""
    folder = tmp_path_factory.mktemp("report")
    for words in (
        *(("algo=fedavg", f"seed={seed}", f"lr={lr}") for seed in (0, 1) for lr in (0.05, 0.1)),
        ("algo=scaffold", "lr=0.1", "eval-train=true"),
        ("algo=dfedavg", "lr=0.1", "gossip.topology=ring"),
    ):
        result = success(run(folder, "name=" + "-".join(words[:3]), *words))
    out = folder / "report.html"
    result = success(invoke("report", folder / "runs", "--out", out))
    assert result.stdout == f"report: {out}\n"
    return out


def test_a_page_has_every_section_and_the_origin_of_its_numbers(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<script src=" not in text
    assert [part for part in SECTIONS if f'<section id="{part}">' not in text] == []
    assert "fedavg lr=0.05" in text
    assert "<td>commit</td>" in text
    assert page.stat().st_size < 3_000_000


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator[Any]:
    with opened(page) as driver:
        yield driver


@contextmanager
def opened(page: Path) -> Iterator[Any]:
    """Chromium with the page, and without a network."""
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1200,1000"):
        options.add_argument(f"--{flag}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.get(page.as_uri())
        wait_for_plots(driver)
        yield driver
    finally:
        driver.quit()


def wait_for_plots(driver: Any) -> None:
    support = pytest.importorskip("selenium.webdriver.support.ui")
    wait = "return window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle"
    support.WebDriverWait(driver, 60).until(lambda d: d.execute_script(wait))


@in_browser
def test_a_browser_shows_it_without_errors_and_every_plot_has_colours(browser: Any) -> None:
    for name in PLOTS:
        section = browser.find_element("id", name)
        browser.execute_script("arguments[0].scrollIntoView()", section)
        pixels = np.asarray(Image.open(BytesIO(section.screenshot_as_png)).convert("RGB"), int)
        coloured = (pixels.max(axis=2) - pixels.min(axis=2) > 60).sum()
        assert coloured > 200, f"{name}: {coloured} coloured pixels"
    problems = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    assert problems == []
    requests = "return performance.getEntriesByType('resource').map((each) => each.name)"
    names = browser.execute_script(requests)
    assert [name for name in names if name.startswith(("http", "ws"))] == []


@pytest.mark.slow
@in_browser
@pytest.mark.parametrize("number", [3, 30, 300])
def test_many_runs_fit_a_phone_and_paper(tmp_path: Path, number: int) -> None:
    for i in range(number):
        algo, lr = ("fedavg", "fedinit", "scaffold")[i % 3], 0.01 * (1 + i // 9)
        write(tmp_path, [0.1, 0.3 + 0.001 * i], algo=algo, lr=lr, seed=i // 3 % 3, name=str(i))
    success(invoke("report", tmp_path, "--out", tmp_path / "r.html"))
    with opened(tmp_path / "r.html") as browser:
        length = "return of('lines test-accuracy round').data.xs.length"
        rows = 3 * -(-number // 9)
        assert browser.execute_script(MODEL + length) == 2 * (rows if rows <= 20 else 3)
        size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.refresh()
        wait_for_plots(browser)
        wide = "return document.documentElement.scrollWidth"
        assert browser.execute_script(wide) <= 390
        wide = "return ['methods', 'curves', 'cost'].filter((id) => { const part = "
        wide += "document.querySelector(`#${id} .wide`); return part.scrollWidth > part.clientWidth"
        assert browser.execute_script(wide + "})") == []
        pdf = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
        assert b64decode(pdf["data"]).count(b"/Type /Page\n") >= 2
        problems = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
        assert problems == []


@in_browser
def test_the_switches_choose_lines_metrics_and_axes(browser: Any, page: Path) -> None:
    def lines() -> Any:
        code = "const {xs, ys, color} = of('lines test-accuracy round').data;"
        plain = "return JSON.stringify([xs, ys].map((v) => v.map((line) => [...line])));"
        return json.loads(browser.execute_script(MODEL + code + plain))

    def axes() -> Any:
        code = "const plot = of('plot test-accuracy round'); return ['x', 'y'].map((way) => "
        code += "[plot[way + '_scale'].type, plot[way + '_range'].start, plot[way + '_range'].end])"
        return browser.execute_script(MODEL + code)

    first = lines()
    groups = groups_of([reader.read(run) for run in reader.find([page.parent / "runs"])])
    groups = ranked(groups, "test-accuracy")
    assert len(first[0]) == 2 * len(groups) == 8  # raw and smoothed
    for i, group in enumerate(groups):
        line = curve(group, "test-accuracy")
        assert first[1][2 * i + 1] == pytest.approx(line["raw"].tolist(), rel=1e-6)
        assert first[1][2 * i] == pytest.approx(line["smooth"].tolist(), rel=1e-6)
    (x, y), raw = axes(), [value for line in first[1] for value in line[1:]]
    assert (x[0], y[0]) == ("LinearScale", "LinearScale")
    assert (x[1] < 0, x[2] > 1, y[1] < min(raw), y[2] > max(raw)) == (True,) * 4
    assert y[1] > max(line[0] for line in first[1])  # the untrained model is below the picture
    browser.execute_script(MODEL + "of('axes test-accuracy round').active = 3")
    x, y = axes()
    assert (x[0], y[0], 0 < x[1] < 1, y[1] > 0) == ("LogScale", "LogScale", True, True)
    browser.execute_script(MODEL + "of('axes test-accuracy round').active = 0")
    browser.execute_script(MODEL + "of('groups').active = [0]")
    assert len(lines()[0]) == 2
    browser.execute_script(MODEL + "of('groups').active = [0, 1, 2, 3]")
    assert lines() == first
    browser.execute_script(MODEL + "of('measure test-accuracy round').value = 'test-loss'")
    assert lines()[0] == first[0]
    assert lines()[1] != first[1]
    browser.execute_script(MODEL + "of('measure test-accuracy round').value = 'generalisation-gap'")
    assert len(lines()[0]) == 2  # of the only run that has it


@in_browser
def test_at_1400_pixels_nothing_is_cut_off_and_every_plot_has_a_legend(browser: Any) -> None:
    browser.set_window_size(1400, 1000)
    wide = "return [...document.querySelectorAll('section table')].filter((t) => "
    wide += "t.getBoundingClientRect().right > window.innerWidth).length"
    assert browser.execute_script(wide) == 0
    legends = "return [...Bokeh.documents[0]._all_models.values()].filter((m) => "
    legends += "m.type == 'Figure').map((f) => [...f.center, ...f.below, ...f.above, ...f.right]"
    legends += ".filter((part) => ['Legend', 'ColorBar'].includes(part.type)).length)"
    counts = browser.execute_script(legends)
    assert len(counts) >= 7
    assert {*counts} == {1}
    links = "return [...document.querySelectorAll('nav a')].map((a) => "
    links += "document.querySelector(a.hash + ' h2').getBoundingClientRect().height)"
    assert min(browser.execute_script(links)) > 10
    sort = "document.querySelectorAll('table.sorted th')[arguments[0]].click();"
    sort += "return [...document.querySelectorAll('table.sorted tr')].slice(1).map((r) => "
    sort += "r.cells[arguments[0]].textContent)"
    accuracies = [float(text.split()[0].rstrip("%")) for text in browser.execute_script(sort, 1)]
    assert accuracies == sorted(accuracies)
    names = browser.execute_script(sort, 0)
    assert names == sorted(names)


def test_the_best_row_is_first_and_the_setup_is_at_the_top(tmp_path: Path) -> None:
    for algo, last in (("a", 0.3), ("b", 0.9), ("c", 0.5)):
        write(tmp_path, [0.1, last], algo=algo, model="cnn")
    shutil.copytree(tmp_path / "b-0.1-0", tmp_path / "copy")
    file = tmp_path / "a-0.1-0" / "summary.json"
    file.write_text(file.read_text().replace('"completed"', '"interrupted"'))
    result = invoke("report", tmp_path, "--out", tmp_path / "r.html")
    assert "1 of 4 runs repeat" in result.stderr
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    table = text[text.index('<table class="sorted">') :]
    assert table.index("<td>b</td>") < table.index("<td>c</td>") < table.index("<td>a</td>")
    assert ">90.00%</td>" in table
    setup, rest = text[: text.index('id="summary"')], text[text.index('id="settings"') :]
    cells = [
        [part.partition("<")[0] for part in setup.split(f"<{cell}>")[1:]] for cell in ("th", "td")
    ]
    facts = dict(zip(*cells, strict=True))
    assert (facts["model"], facts["data set"]) == ("cnn", "digits")
    assert "<td>model</td>" not in rest
    assert "<h1>a, b, c on digits: 4 runs</h1>" in setup
    assert rest.count("no, a repeat") == 1
    assert [rest.count(f"<td>{word}</td>") for word in ("completed", "interrupted")] == [3, 1]


def test_of_many_rows_the_best_of_each_method_and_partition_are_shown(tmp_path: Path) -> None:
    for i, (algo, alpha, lr) in enumerate(product("ab", (0.1, 0.6), range(6))):
        keys = {"partition": "dirichlet", "dirichlet_alpha": alpha, "seed": i}
        write(tmp_path, [0.1, 0.2 + 0.01 * lr + 0.3 * (algo == "b")], algo=algo, lr=lr, **keys)
    success(invoke("report", tmp_path, "--out", tmp_path / "r.html"))
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    rows = [line.partition("</td>")[0] for line in text.split("<tr class=lead><td>")[1:]]
    labels = [f"{algo} dirichlet-alpha={alpha} lr=5" for algo in "ba" for alpha in (0.1, 0.6)]
    assert sorted(rows) == sorted(labels)
    assert "show all 24<" in text
    assert "<h1>a, b by dirichlet-alpha and lr on digits: 24 runs</h1>" in text
    assert "<td>dirichlet 0.1, dirichlet 0.6</td>" in text


def test_of_many_methods_the_baseline_is_shown(tmp_path: Path) -> None:
    names = [*"abcdefghijklmnopqrstuv", "fedavg"]
    for i, algo in enumerate(names):
        write(tmp_path, [0.1, 0.9 - 0.01 * i], algo=algo)
    success(invoke("report", tmp_path, "--out", tmp_path / "r.html"))
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    rows = [line.partition("</td>")[0] for line in text.split("<tr class=lead><td>")[1:]]
    assert rows == [*names[:19], "fedavg"]


def test_a_sweep_shows_its_tested_runs_and_its_trials_as_sensitivity(tmp_path: Path) -> None:
    for lr in (0.05, 0.1):
        trial = write(tmp_path / "sweep" / "runs", [0.1, 0.5 + lr], lr=lr, validation=0.1)
        (tmp_path / "sweep" / "defaults.json").write_text("{}")
        table = trial / "metrics.csv"
        table.write_text(table.read_text().replace("test-", "validation-"))
    write(tmp_path / "tests", [0.1, 0.6], lr=0.1, validation=0.0)
    success(invoke("report", tmp_path, "--out", tmp_path / "r.html"))
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<h1>fedavg on digits: 1 run</h1>" in text
    assert text.count("<tr class=lead>") == 1
    assert "By the metric that the sweep was tuned on." in text
    assert text[text.index('id="origin"') :].count("<td>completed</td>") == 3


@pytest.mark.parametrize("status", ["stopped", "completed"])
def test_the_trials_of_a_ladder_are_compared_after_equal_rounds(
    status: str, tmp_path: Path
) -> None:
    """Rounds that a sweep varies itself are a setting."""
    for lr, accuracies in ((0.05, [0.1, 0.2]), (0.1, [0.1, 0.3, 0.9])):
        rounds = len(accuracies) - 1
        write(tmp_path / "runs", accuracies, lr=lr, num_server_rounds=rounds)
    (tmp_path / "table.csv").write_text(f"trial,stage,algo,status\na,tune,fedavg,{status}\n")
    text = report.html(groups_of([reader.read(path) for path in reader.find([tmp_path])]))
    note = "Of every trial after 1 rounds, where the sweep stopped some."
    assert (note in text) == ("after 1 rounds" in text) == (status == "stopped")
    assert ('"axis_label":"num-server-rounds"' in text) == (status == "completed")


def test_bars_count_good_and_dropped_replies(tmp_path: Path) -> None:
    rows = reader.read(write(tmp_path, [0.1, 0.2, 0.3, 0.4])).clients
    whole, end = plots._per_client([rows, rows[rows["round"] > 2]])
    assert whole.to_dict("split")["data"] == [[0, 3, 0, 3, 1, 2, 3], [1, 2, 1, 3, 2, 3, 4]]
    assert [*whole] == ["client", "good", "dropped", "asked", "min", "median", "max"]
    assert end["good"].tolist() == [1, 1]


def test_runs_of_an_earlier_version_have_bars_without_seconds(tmp_path: Path) -> None:
    path = write(tmp_path, [0.1, 0.2])
    old = [line.rpartition(",")[0] for line in (path / "clients.csv").read_text().splitlines()]
    (path / "clients.csv").write_text("\n".join(old) + "\n")
    success(invoke("report", path, "--out", tmp_path / "r.html"))
    assert "seconds of a local round" not in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_labels_are_not_read_as_html(tmp_path: Path) -> None:
    for seed, model in enumerate(("<b>x</b>", "y")):
        write(tmp_path, [0.1, 0.5], model=model, seed=seed)
    success(invoke("report", tmp_path, "--out", tmp_path / "r.html"))
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert ("<td>&lt;b&gt;x&lt;/b&gt;</td>" in text, "<td><b>x" in text) == (True, False)


def test_a_run_before_its_first_evaluation_has_a_report(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.2])
    only = "round,client,status\n0,1,evaluated\n"  # whose clients have only evaluated
    (write(tmp_path, [None], seed=2) / "clients.csv").write_text(only)
    success(invoke("report", tmp_path, "--out", tmp_path / "r.html"))
    missing = invoke("report", tmp_path, "--out", tmp_path / "no" / "r.html")
    assert (missing.exit_code, missing.stdout, missing.stderr.count("\n")) == (2, "", 1)
    assert "--out: expected a file in an existing folder" in missing.stderr
