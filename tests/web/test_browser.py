"""The page in a real Chromium: a training watched, saved, stopped and resumed by clicking; accessibility; a narrow screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import lived_in
import pytest
from harness import wait_until

AXE = Path(__file__).parent / "axe" / "axe.min.js"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver"),
    pytest.mark.slow,
]
PAGES = ("", "/metrics", "/system", "/checkpoints", "/logs", "/plan")


@contextmanager
def chromium(width: int = 1280, height: int = 900, *, dark: bool = False):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(240)  # axe takes some seconds, on a busy machine more than the usual 30
    try:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        yield driver
    finally:
        driver.quit()


@contextmanager
def serving(home: Path, env: dict[str, str]):
    """`kgorch web` as a process; yields the address that it prints."""
    command = [sys.executable, "-m", "kgorch.cli", "web", "--no-open", "--port", "0"]
    process = subprocess.Popen(
        command, env={**env, "KGORCH_HOME": str(home)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/login\?token=\S+", line)
        assert found, process.stderr.read()
        yield found[0]
        process.terminate()
        assert process.wait(timeout=30) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def shown(driver, css: str) -> str:
    return next(iter(texts(driver, css)), "")


def texts(driver, css: str, of: str = "innerText") -> list[str]:
    """The visible text of each such element; `of` names another property. One script: the page replaces its elements meanwhile."""
    script = "return [...document.querySelectorAll(arguments[0])].map(item => item[arguments[1]] ?? '')"
    return [text.strip() for text in driver.execute_script(script, css, of)]


def click(driver, css: str) -> None:
    wait_until(lambda: shown(driver, css), what=f"{css} to appear", within_s=90)
    driver.execute_script("document.querySelector(arguments[0]).click()", css)


def act(driver, name: str, ending: str, *, within_s: float = 120) -> str:
    """Press a button and its confirmation; wait for what the dialog says at the end."""
    click(driver, f"#action-{name}")
    assert driver.execute_script("return document.getElementById('dialog').open")
    click(driver, "#dialog-ok")
    wait_until(
        lambda: re.search(ending, shown(driver, "#dialog-progress")),
        within_s=within_s,
        what=lambda: shown(driver, "#dialog-progress"),
    )
    told = shown(driver, "#dialog-progress")
    click(driver, "#dialog-cancel")
    return told


def test_a_training_is_watched_saved_stopped_and_resumed_by_clicking(kgorch):
    plan = kgorch.plan(args={"epochs": 400, "sleep": 0.3}, every="600s")
    supervisor = kgorch.background("start", str(plan))
    with serving(kgorch.home, kgorch.env()) as url, chromium() as driver:
        driver.get(url)
        # the list learns of the run without a reload
        wait_until(lambda: "test" in shown(driver, "#runs"), within_s=120)
        click(driver, "#runs a")
        wait_until(lambda: "training" in shown(driver, "#part-head h1"), within_s=120)
        step = lambda: int((re.search(r"step ([\d,]+)", shown(driver, "#part-head")) or ["", "0"])[1].replace(",", ""))  # noqa: E731
        before = wait_until(step, within_s=120)
        wait_until(lambda: step() > before, within_s=60, what="the step to move without a reload")

        told = act(driver, "save", "verified|error|failed")
        assert re.match(r"step \d+ is saved and verified", told)
        assert any("step" in path.name for path in kgorch.checkpoints())

        act(driver, "stop", "suspended")
        assert supervisor.wait(timeout=60) == 10
        stopped_at = kgorch.status()["step"]
        wait_until(lambda: shown(driver, "#action-resume"), within_s=30, what="the button to resume")

        told = act(driver, "resume", "a session is open|error")
        assert "a session is open" in told
        wait_until(lambda: "training" in shown(driver, "#part-head h1"), within_s=120)
        assert [entry["number"] for entry in kgorch.history()] == [1, 2]
        kgorch.wait_for_step(stopped_at + 1, within_s=120)
        assert kgorch.history()[1]["attempts"][0]["first_step"] == stopped_at
        act(driver, "stop", "suspended")
        assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    import os

    home = tmp_path_factory.mktemp("browser") / "home"
    lived_in.furnish(home).dispose()
    with serving(home, dict(os.environ)) as url:
        yield url


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_no_page_has_a_violation_of_accessibility_or_is_wider_than_the_screen(furnished, width, dark):
    with chromium(width, dark=dark) as driver:
        driver.get(furnished)
        base = furnished.split("/login")[0]
        for path in ("/", *(f"/runs/surface-unet3d/1{page}" for page in PAGES), "/runs/vqa-student/1", "/nothing"):
            driver.get(base + path)
            wait_until(lambda: driver.execute_script("return document.readyState") == "complete")
            if path.endswith(("/1", "/metrics", "/system")):
                wait_until(lambda: driver.find_elements("css selector", "canvas"), what=f"a chart in {path}")
            driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text()})
            found = driver.execute_async_script("axe.run().then(arguments[0])")
            assert [
                (item["id"], [node["html"][:200] for node in item["nodes"]]) for item in found["violations"]
            ] == [], path
            assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth"), path
        bad = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert [text for text in bad if "404" not in text] == []


def test_the_page_is_worked_by_keyboard_alone(furnished):
    from selenium.webdriver import ActionChains, Keys

    with chromium() as driver:
        driver.get(furnished)
        base = furnished.split("/login")[0]
        driver.get(f"{base}/runs/surface-unet3d/1")
        wait_until(lambda: driver.find_elements("css selector", "#timeline svg"))
        press = lambda *keys: [ActionChains(driver).send_keys(key).perform() for key in keys]  # noqa: E731
        focus = lambda: driver.execute_script("return document.activeElement.id || document.activeElement.className")  # noqa: E731

        driver.execute_script("document.getElementById('timeline').focus()")
        press("n")
        assert "session 1" in shown(driver, "#timeline-tip")
        labels = lambda: len(driver.find_elements("css selector", "#timeline .session"))  # noqa: E731
        assert labels() == 4
        press("+", "+", "+")
        assert labels() < 4
        press("0")
        assert labels() == 4

        driver.execute_script("document.getElementById('action-stop').focus()")
        press(Keys.ENTER)
        assert driver.execute_script("return document.getElementById('dialog').open")
        press(Keys.ESCAPE)
        assert not driver.execute_script("return document.getElementById('dialog').open")
        assert focus() == "action-stop"  # and it stays there while parts are replaced

        wait_until(lambda: driver.find_elements("css selector", ".plot"))
        driver.execute_script("document.querySelector('.plot').focus()")
        press(Keys.HOME, Keys.ARROW_RIGHT)
        label = "".join(texts(driver, ".plot", "ariaLabel"))
        assert label.startswith("step 1,200: dice"), label


def test_no_request_leaves_the_machine(furnished):
    with chromium() as driver:
        driver.get(furnished)
        base = furnished.split("/login")[0]
        for page in ("", "/metrics", "/system"):
            driver.get(f"{base}/runs/surface-unet3d/1{page}")
            wait_until(lambda: driver.find_elements("css selector", "canvas"))
            names = driver.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
            assert names and all(name.startswith(base + "/") for name in names), names


def test_html_in_the_name_of_a_metric_is_not_run(tmp_path):
    import os

    home = lived_in.Home(tmp_path / "home")
    lived_in.surface(home)
    evil = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
    file = max(home.home.glob("runs/*/*/attempts/4.1/metrics.jsonl"))
    records = [{"s": step, "e": 1, "t": home.now.timestamp(), "v": {evil: step / 9}} for step in range(16_000, 16_040)]
    file.write_text(file.read_text() + "".join(json.dumps(record) + "\n" for record in records))
    with serving(home.home, dict(os.environ)) as url, chromium() as driver:
        driver.get(url)
        driver.get(url.split("/login")[0] + "/runs/surface-unet3d/1/metrics")
        wait_until(lambda: "<img src=x" in shown(driver, "#metric-table"))
        assert driver.title == "surface-unet3d · kgorch"
        assert not driver.find_elements("css selector", "img[src=x]")


class Measured:
    """A run with the metrics that a test writes, in a page that has the cookie."""

    def __init__(self, folder: Path) -> None:
        self.home = lived_in.Home(folder)
        run = self.home.run("ink", age=timedelta(hours=2))
        began = self.home.now - timedelta(hours=1)
        self.home.attempt(run, self.home.session("ink-1", 1, began, None, 0, 500), "1.1", began, None, 0, 500)
        self.file = max(self.home.home.glob("runs/*/*/attempts/1.1/metrics.jsonl"))
        self.write(0, {})

    def write(self, steps: int, values: dict[str, float]) -> None:
        """So many records, each with these values and the step added."""
        records = [
            {"s": step, "e": 1, "t": self.home.now.timestamp(), "v": {name: at + step for name, at in values.items()}}
            for step in range(1, steps + 1)
        ]
        self.file.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def measured(tmp_path):
    import os

    run = Measured(tmp_path / "home")
    with serving(run.home.home, dict(os.environ)) as url, chromium() as driver:
        driver.get(url)
        driver.base = url.split("/login")[0] + "/runs/ink/1"
        yield run, driver
        bad = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert bad == []


def charts(driver) -> list[str]:
    return texts(driver, "figure.chart :is(h2, h3)")


def fill_in(driver, css: str, value: str) -> None:
    script = "const box = document.querySelector(arguments[0]); box.value = arguments[1]; box.dispatchEvent(new Event('input'))"
    driver.execute_script(script, css, value)


def test_the_curve_of_the_overview_is_made_anew_under_the_name_of_another_metric(measured):
    run, driver = measured
    driver.get(driver.base)
    wait_until(lambda: shown(driver, "#headline") == "No metrics yet.")
    update = "document.dispatchEvent(new CustomEvent('kgorch:update'))"
    for values, title in (({"loss": 5.0}, "loss"), ({"loss": 5.0, "dice": 0.1}, "dice")):
        run.write(20, values)
        wait_until(
            lambda title=title: driver.execute_script(update) or any(title in text for text in charts(driver)),
            what=f"the chart of {title}",
        )
        assert len(charts(driver)) == 1 and "No metrics yet." not in shown(driver, "#headline")
    assert "dice" in "".join(texts(driver, ".plot", "ariaLabel"))
    run.write(0, {})
    wait_until(lambda: driver.execute_script(update) or shown(driver, "#headline") == "No metrics yet.")
    run.write(20, {"loss": 5.0})
    wait_until(lambda: driver.execute_script(update) or charts(driver) == ["loss"])


def test_metrics_beyond_those_that_are_drawn_are_counted_and_found_by_name(measured):
    run, driver = measured
    run.write(5, {**{f"layer{number:03}/norm": 1.0 for number in range(150)}, "zeta": 2.0})
    driver.get(driver.base + "/metrics")
    wait_until(lambda: len(charts(driver)) == 60)
    assert shown(driver, "#metric-count") == "60 of 151 metrics are shown. Filter by name to see the others."
    fill_in(driver, "#metric-filter", "zeta")
    wait_until(lambda: charts(driver) == ["zeta"])
    wait_until(lambda: "zeta" in shown(driver, "#metric-table"))
    assert shown(driver, "#metric-count") == ""
    fill_in(driver, "#metric-filter", "layer norm")
    wait_until(lambda: len(charts(driver)) == 60)
    assert shown(driver, "#metric-count") == "60 of 150 metrics are shown. Filter by name to see the others."
    fill_in(driver, "#metric-filter", "no such")
    wait_until(lambda: charts(driver) == [])
    assert shown(driver, "#metric-count") == "No metric has such a name."
    fill_in(driver, "#metric-filter", "")
    wait_until(lambda: len(charts(driver)) == 60 and "layer000" in charts(driver)[0])


def test_values_that_a_logarithmic_chart_cannot_draw_are_there_again_in_a_linear_one(measured):
    run, driver = measured
    run.write(5, {"elbo": -9.0})
    driver.get(driver.base + "/metrics")
    label = lambda: "".join(texts(driver, ".plot", "ariaLabel"))  # noqa: E731
    wait_until(lambda: charts(driver) and "last -4, lowest -8, highest -4" in label())
    for _ in range(2):
        driver.execute_script("document.getElementById('log').click()")
        assert "last -4, lowest -8, highest -4" in label()


def test_a_stop_of_the_server_is_told_and_the_page_goes_on_when_it_is_back(tmp_path):
    import os

    lived_in.furnish(tmp_path / "home").dispose()
    with chromium() as driver:
        with serving(tmp_path / "home", dict(os.environ)) as url:
            driver.get(url)
            wait_until(lambda: shown(driver, "#link") == "live")
            with urllib.request.urlopen(url) as answer:
                assert answer.status == 200
        wait_until(lambda: "not connected" in shown(driver, "#link"))
