"""A user's session in a browser, by real clicks, starting from an empty store: checks that each step works, and takes pictures.

    pip install playwright
    PYTHONPATH=.pkg python tests/benchmarks/browser.py --json [--pictures FOLDER] [--sample FOLDER]

Starts `puna up` on a new store and drives Chromium (`--chromium`: the system's binary; nothing is downloaded). The steps: run `curate` from
its form, follow the run and open its funnel; run a stage on a picked artifact with a changed number; enter wrong values; stop a training
and resume it; approve a round; evaluate and compare two models; set a schedule in Prefect's UI that survives a restart and fires; create a
project by running a form with its name; move a threshold; search; list documents similar to one; ask a question in SQL; open every page at
390 px and in dark mode. Each failing step is reported with its reason. `--sample`: the pages of `puna demo-pages`, fetched if the option is
missing. `--store` and `--steps` continue in an existing store.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]
LONG = 900.0
"""Maximum seconds of a run on a loaded machine."""
PAGES = {
    "home": "/puna/", "start": "/puna/start", "curate": "/puna/start/curate", "artifacts": "/puna/artifacts", "documents": "/puna/documents?q=the",
    "rules": "/puna/rules", "benchmarks": "/puna/benchmarks", "rounds": "/puna/rounds", "sql": "/puna/sql?q=select+kind,+count(*)+from+artifacts+group+by+1", "chat": "/puna/chat",
}  # fmt: skip
SMALL_ROUND = (
    "gate.decision=person\nround_prompts=24\nreward_model=null\nchosen=null\nrejection_sample={pick: random}\ndpo=null\ngrpo=null\naverage=null\n"
    "sft.training.steps=30\nsample.answers=4\nevaluate.answers.prompts_per_task=40"
)
TRAINING = (
    "pretrain.phases.0.steps=60\npretrain.phases.0.schedule.warmup_steps=5\npretrain.phases.0.schedule.anneal_steps=10\n"
    "pretrain.checkpoint_every=5\npretrain.validation_tokens=2000\nevaluate_base=null"
)


class Tour:
    """A running `puna up`, a browser connected to it, and the results so far."""

    def __init__(self, store: Path, browser: Browser, pictures: Path) -> None:
        self.store, self.browser, self.pictures = store, browser, pictures
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.page: Page = self.opened()
        self.found: dict[str, Any] = {}

    def opened(self, **more: Any) -> Page:
        """Open a new window whose requests to other hosts fail, as they do offline."""
        page = self.browser.new_context(viewport={"width": 1280, "height": 900}, **more).new_page()
        page.route("**/*", lambda route: route.continue_() if "127.0.0.1" in route.request.url else route.abort())
        page.set_default_timeout(30_000)
        return page

    def start(self) -> float:
        """Start `puna up`; return the seconds until its first page loads."""
        began = time.perf_counter()
        log = self.store.parent / "up.log"
        with log.open("w") as file:
            words = [sys.executable, "-m", "puna.flows.cli.main", "up", "--port", "0", "--store", str(self.store)]
            self.process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT / ".pkg")})
        self.until(lambda: re.search(r"(http\S+)/puna", log.read_text()), 300)
        self.url = re.search(r"(http\S+)/puna", log.read_text())[1]  # type: ignore[index]
        self.page.goto(self.url + "/puna/")
        taken = time.perf_counter() - began
        self.until(lambda: "are published at" in log.read_text(), 300)
        return taken

    def stop(self) -> None:
        """Stop `puna up` as Ctrl-C does."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(120)

    def until(self, what: Callable[[], Any], seconds: float = LONG) -> Any:
        """Return the first true value of `what`, which is polled."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := what():
                return value
            time.sleep(0.5)
        raise TimeoutError(f"not within {seconds:.0f} s")

    def shot(self, name: str, **more: Any) -> None:
        """Save a picture of the window."""
        self.page.screenshot(path=str(self.pictures / f"{name}.png"), **more)

    def follow(self, seconds: float = LONG) -> str:
        """Wait until the started run's page, which updates itself, says how the run ended; return that."""
        self.page.wait_for_url("**/puna/run/**", timeout=120_000)
        state = self.page.locator(".tile .tag").first
        self.until(lambda: state.inner_text() != "at work", seconds)
        return state.inner_text()

    def go(self, *links: str) -> None:
        """Click links one after another, starting from the first page."""
        self.page.goto(self.url + "/puna/")
        for link in links:
            self.page.get_by_role("link", name=link, exact=True).first.click()


def usable(tour: Tour) -> dict[str, Any]:
    """Open the first page."""
    seconds = tour.start()
    tour.shot("empty")
    return {"seconds": round(seconds, 1)}


def curate(tour: Tour) -> dict[str, Any]:
    """Run `curate` from its form, follow the run and open its funnel."""
    tour.go("curate")
    tour.page.get_by_text("no earlier run to estimate").first.wait_for()
    tour.shot("form")
    began = time.perf_counter()
    tour.page.get_by_role("button", name="Start").click()
    tour.page.wait_for_url("**/puna/run/**", timeout=120_000)
    begun = time.perf_counter() - began
    tour.until(lambda: tour.page.locator("#steps tbody tr").count() >= 3)
    tour.shot("at-work")
    state = tour.follow()
    tour.shot("run")
    tour.page.get_by_role("link", name="Funnel").click()
    tour.page.get_by_role("heading", name="Funnel of curate").wait_for()
    tour.shot("funnel")
    assert state == "finished", state
    return {"click_to_start_seconds": round(begun, 1)}


def again(tour: Tour) -> dict[str, Any]:
    """Run the same form again: every step is reused."""
    tour.go("curate")
    tour.page.locator("#outcome", has_text="reused").wait_for()
    began = time.perf_counter()
    tour.page.get_by_role("button", name="Start").click()
    assert tour.follow() == "finished"
    return {"click_to_end_seconds": round(time.perf_counter() - began, 1), "steps": tour.page.locator("#steps tbody tr").count()}


def stage(tour: Tour) -> dict[str, Any]:
    """Run a stage on a picked artifact with a changed number; the plan follows the form."""
    tour.go("Artifacts", "documents")
    tour.page.locator("tr", has_text="line_dedup").locator("a.id").first.click()
    tour.page.get_by_text("Use in …").click()
    tour.page.get_by_role("link", name="minhash_dedup").click()
    tour.page.locator("#outcome h2").wait_for()
    box = tour.page.locator("[name='set.bands']")
    box.fill("9")
    tour.page.locator("#outcome code", has_text="bands=9").wait_for()
    said = tour.page.locator("#outcome h2").inner_text()
    tour.shot("stage-form")
    tour.page.get_by_role("button", name="Start").click()
    assert tour.follow() == "finished"
    tour.shot("stage-run")
    return {"plan_said": said}


def wrong(tour: Tour) -> dict[str, Any]:
    """Enter a wrong value: the form, the click and Prefect's own form refuse it."""
    tour.page.goto(tour.url + "/puna/start/minhash_dedup?documents=documents@latest")
    tour.page.locator("[name='set.bands']").fill("-3")
    refusal = tour.page.locator("#outcome .alarm", has_text="bands")
    refusal.wait_for()
    said = refusal.inner_text()
    tour.shot("refused")
    tour.page.get_by_role("button", name="Start").click()
    tour.page.locator(".alarm").wait_for()
    assert "/puna/start/" in tour.page.url
    return {"said": said}


def training(tour: Tour) -> dict[str, Any]:
    """Stop a training with a click, and resume it from its last checkpoint with another."""
    tour.go("pretrain")
    tour.page.locator("[name=changes]").fill(TRAINING)
    tour.page.locator("#outcome h2").wait_for()
    tour.page.get_by_role("button", name="Start").click()
    tour.page.wait_for_url("**/puna/run/**", timeout=120_000)

    def share() -> int:
        text = tour.page.locator(".working").inner_text() if tour.page.locator(".working").count() else ""
        found = re.search(r"^pretrain: (\d+) %", text, re.M)
        return int(found[1]) if found else 0

    tour.until(lambda: share() >= 30)
    before = share()
    tour.shot("training")
    began = time.perf_counter()
    tour.page.get_by_role("button", name="Stop").click()
    state = tour.follow(120)
    ended = time.perf_counter() - began
    tour.page.get_by_role("button", name="Go on").click()
    tour.page.wait_for_url("**/puna/started/**")
    tour.page.wait_for_url("**/puna/run/**", timeout=120_000)
    first = tour.until(share)
    assert tour.follow() == "finished"
    tour.shot("trained")
    assert state == "stopped", state
    return {"stopped_at_percent": before, "seconds_to_stop": round(ended, 1), "went_on_at_percent": first}


def approve(tour: Tour) -> dict[str, Any]:
    """Run a round up to its gate, where it waits for approval without a process; a click on Approve moves the alias."""
    tour.go("round")
    tour.page.locator("[name=changes]").fill(SMALL_ROUND)
    tour.page.locator("[name=policy]").select_option("base@latest")
    tour.page.locator("#outcome h2").wait_for()
    tour.page.get_by_role("button", name="Start").click()
    assert tour.follow() == "finished"
    tour.go("Rounds")
    tour.page.get_by_role("heading", name="waits for your decision").wait_for()
    tour.shot("round-waits")
    tour.page.locator("[name=by]").fill("Ada")
    tour.page.locator("[name=reason]").fill("its answers are right more often")
    tour.page.get_by_role("button", name="Approve").click()
    tour.page.locator("#rounds .tag.right", has_text="passed").wait_for()
    tour.shot("round-approved")
    tour.go("Runs")
    tour.page.locator("#aliases", has_text="policy@latest").wait_for()
    return {}


def benchmarks(tour: Tour) -> dict[str, Any]:
    """Evaluate two models on a task file from its form, compare them, and open one question with both answers."""
    folder = tour.store.parent / "tasks"
    folder.mkdir(exist_ok=True)
    rows = [{"q": f"{a} + {b} =", "options": [str(a + b), str(a + b + 1), "a tree"], "right": 0} for a in range(5) for b in range(5)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\ndataset_kwargs: {data_files: {test: sums.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: options\ndoc_to_target: right\n"
    )
    for number in (1, 2):
        tour.go("Benchmarks", "Evaluate a model")
        tour.page.locator("[name=tasks]").fill(str(folder))
        tour.page.locator("[name=model]").select_option(index=number)
        tour.page.locator("#outcome h2").wait_for()
        tour.page.get_by_role("button", name="Start").click()
        assert tour.follow() == "finished"
    tour.go("Benchmarks")
    for number in (0, 1):
        tour.page.locator("[name=model]").nth(number).check()
    tour.shot("leaderboard")
    tour.page.get_by_role("button", name="Compare two").click()
    tour.page.get_by_role("heading", name="Calibration").wait_for()
    tour.shot("two-models", full_page=True)
    tour.page.get_by_role("link", name="sums").first.click()
    tour.page.locator(".pairs summary").first.click()
    tour.page.locator(".pairs .sides table").nth(1).wait_for()
    tour.shot("question")
    return {"questions": tour.page.locator(".pairs summary").count()}


def judge(tour: Tour) -> dict[str, Any]:
    """Let the approved policy answer prompts, and judge a pair of its answers with the keyboard."""
    tour.go("Start", "sample")
    tour.page.locator("[name=models]").select_option("policy@latest")
    box = tour.page.locator("[name=prompts]")
    named = box.evaluate("s => [...s.options].map(o => [o.value, o.text])")
    box.select_option(next(value for value, words in named if "new_prompts · 72 rows" in words))  # not the prompts of the development set
    tour.page.locator("[name='set.answers']").fill("4")
    tour.page.locator("#outcome code", has_text="answers=4").wait_for()
    tour.page.get_by_role("button", name="Start").click()
    assert tour.follow() == "finished"
    tour.go("Rounds")
    tour.page.locator("#judge a").first.click()
    tour.page.locator("#by").fill("Ada")
    tour.page.locator("#by").press("Enter")
    tour.page.locator("#left").wait_for()
    for number, key in enumerate(("1", "0"), 1):
        tour.page.keyboard.press(key)
        tour.page.keyboard.press("Enter")
        tour.page.get_by_text(f"{number} judged").wait_for()
    tour.shot("judge")
    tour.page.keyboard.press("w")
    tour.page.get_by_text("judged@latest").wait_for()
    tour.page.get_by_role("link", name="Rounds").click()
    tour.page.wait_for_url("**/puna/rounds**")
    return {}


def schedule(tour: Tour) -> dict[str, Any]:
    """Set a schedule in Prefect's UI; it survives a restart of `puna up` and fires."""
    tour.page.goto(tour.url + "/puna/deployment/prompts")
    tour.page.get_by_role("button", name="Schedule", exact=True).click()
    dialog = tour.page.get_by_role("dialog")
    dialog.get_by_role("tab", name="Interval").click()
    dialog.get_by_label("Value").fill("1")
    tour.shot("schedule-dialog")
    dialog.get_by_role("button", name="Save").click()
    tour.page.get_by_text("Every 1 minute").first.wait_for()
    tour.shot("schedule")
    tour.stop()
    seconds = tour.start()
    tour.page.goto(tour.url + "/puna/deployment/prompts")
    tour.page.get_by_text("Every 1 minute").first.wait_for()
    before = len(list((tour.store / "runs").glob("*prompts*")))
    began = time.perf_counter()
    tour.until(lambda: len(list((tour.store / "runs").glob("*prompts*"))) > before, 180)
    fired = time.perf_counter() - began
    tour.shot("schedule-after")
    return {"restart_seconds": round(seconds, 1), "fired_after_seconds": round(fired)}


def late(tour: Tour) -> dict[str, Any]:
    """Fill in a form before its script has loaded."""
    held: list[Any] = []
    tour.page.route("**/*.js*", lambda route: held.append(route))
    tour.page.goto(tour.url + "/puna/start/url_filter", wait_until="commit")
    box = tour.page.locator("[name=documents]")
    box.select_option(index=1)
    assert held, "the script was there before the form"
    for script in held:
        script.continue_()
    tour.page.unroute("**/*.js*")
    tour.page.locator("#outcome code").first.wait_for()
    return {}


def threshold(tour: Tour) -> dict[str, Any]:
    """Move a slider, which shows how many documents the new threshold would drop."""
    tour.go("Rules")
    slider = tour.page.locator(".slider", has_text="gopher_quality.min_words").locator("[type=range]").first
    slider.focus()
    began = time.perf_counter()
    for _ in range(20):
        tour.page.keyboard.press("ArrowRight")
    more = tour.page.get_by_text("more would go").first
    more.wait_for()
    taken = time.perf_counter() - began
    tour.page.evaluate("scrollTo(0, 0)")
    tour.shot("rules")
    return {"said": more.inner_text(), "seconds": round(taken, 1)}


def search(tour: Tour) -> dict[str, Any]:
    """Search documents that a rule dropped, and look at what happened to one of them."""
    tour.go("Documents")
    box = tour.page.locator("[name=artifact]").first
    box.select_option(value=next(v for v in box.evaluate("s => [...s.options].map(o => [o.value, o.text])") if "select" in v[1])[0])
    tour.page.get_by_role("button", name="Search").click()
    tour.page.locator("[name=rule]").select_option("any rule")
    tour.page.locator("[name=q]").fill("the")
    tour.page.locator("[name=q]").press("Enter")
    tour.page.locator("#found .card .tag.wrong").first.wait_for()
    tour.shot("documents")
    said = tour.page.locator("#found h2").inner_text()
    tour.page.locator("#found .card a").first.click()
    tour.page.get_by_role("heading", name="Outcome in each stage").wait_for()
    tour.shot("document")
    whole = tour.page.locator("#text .said")
    if whole.count():
        copied = whole.inner_text()
        tour.go("Documents")
        tour.page.get_by_text("Find documents similar to a text").click()
        tour.page.locator("[name=text]").fill(copied)
        tour.page.get_by_role("button", name="Compare", exact=True).click()
        tour.page.locator("#near h2").wait_for()
        tour.shot("near")
    return {"said": said}


def question(tour: Tour) -> dict[str, Any]:
    """Ask a question in SQL."""
    tour.go("SQL")
    tour.page.get_by_role("link", name="Dropped documents by rule").click()
    tour.page.locator("[role=status]").wait_for()
    tour.page.wait_for_load_state()  # the script handles the page's keys
    tour.page.locator("#q").fill("select rule, count(*) as documents from dropped group by rule order by documents desc limit 12")
    with tour.page.expect_navigation():
        tour.page.locator("#q").press("Control+Enter")
    answer = tour.page.locator("[role=status]")
    answer.wait_for()
    tour.shot("sql")
    return {"said": answer.inner_text()}


def projects(tour: Tour) -> dict[str, Any]:
    """Create a project by running a form with its name; lists and forms then have a switch, and each project shows only its own entries."""
    tour.go("Start", "prompts")
    tour.page.locator("[name=project]").fill("news")
    tour.page.locator("[name='set.train']").fill("7")
    tour.page.locator("#outcome code", has_text="--project news").wait_for()
    tour.page.get_by_role("button", name="Start").click()
    assert tour.follow() == "finished"
    tour.go("Artifacts")
    switch = tour.page.get_by_label("Projects")
    switch.get_by_role("link", name="news").click()
    tour.page.wait_for_url("**/artifacts?project=news")
    listed = tour.page.locator("tbody tr").count()
    tour.shot("project")
    tour.go("Start")
    switch.get_by_role("link", name="news").click()
    tour.page.get_by_role("link", name="prompts", exact=True).first.click()
    assert tour.page.locator("[name=project]").input_value() == "news"
    switch.get_by_role("link", name="default").click()
    tour.page.wait_for_url("**/start/prompts?project=default")
    assert listed == 1 and tour.page.locator("[name=project]").input_value() == "default"
    return {}


def looks(tour: Tour) -> dict[str, Any]:
    """Open every page at a phone's width and in dark mode; none may scroll sideways."""
    wide, errors = {}, []
    for name, more in (("phone", {"viewport": {"width": 390, "height": 844}}), ("dark", {"color_scheme": "dark"})):
        page = tour.opened(**more) if name == "dark" else tour.browser.new_context(**more).new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        for place, path in PAGES.items():
            page.goto(tour.url + path)
            over = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            if over > 0:
                wide[f"{place}-{name}"] = over
            page.screenshot(path=str(tour.pictures / f"{place}-{name}.png"))
    assert not wide and not errors, f"{wide} {errors[:3]}"
    return {"pages": len(PAGES)}


STEPS = (usable, curate, stage, wrong, late, threshold, search, question, again, training, approve, benchmarks, judge, schedule, projects, looks)


def main() -> None:
    """Run all steps and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--chromium", default=shutil.which("chromium") or "/usr/bin/chromium")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--sample", type=Path)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--steps", default=",".join(step.__name__ for step in STEPS))
    asked = parser.parse_args()
    from playwright.sync_api import Error, sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        store = asked.store or Path(folder) / "store"
        pictures = asked.pictures or Path(folder) / "pictures"
        pictures.mkdir(parents=True, exist_ok=True)
        if asked.sample and not (store / "sample").exists():
            shutil.copytree(asked.sample, store / "sample")
        tour = Tour(store, playwright.chromium.launch(executable_path=asked.chromium, args=["--no-sandbox"]), pictures)
        found: dict[str, Any] = {"load": round(os.getloadavg()[0], 1)}
        names = asked.steps.split(",")
        try:
            for step in STEPS:
                if step.__name__ not in names and step is not usable:
                    continue
                began = time.perf_counter()
                try:
                    found[step.__name__] = {**step(tour), "took": round(time.perf_counter() - began, 1)}
                except (Error, AssertionError, OSError, LookupError, StopIteration) as error:  # later steps may still work
                    tour.shot(f"failed-{step.__name__}")
                    shutil.copy(tour.store.parent / "up.log", tour.pictures / f"failed-{step.__name__}.log")
                    found[step.__name__] = {"failed": f"{type(error).__name__}: {str(error)[:400]}", "at": tour.page.url}
                if not asked.json:
                    print(step.__name__, found[step.__name__], flush=True)
        finally:
            tour.stop()
    found["failed"] = [name for name, value in found.items() if isinstance(value, dict) and "failed" in value]
    if asked.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
