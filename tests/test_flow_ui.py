"""A person looks at a finished and at a refused run in the Prefect UI, with a real browser.

``CKPTFLOW_UPDATE_IMAGES=1`` writes the pictures of the README anew; otherwise they go to a temporary directory.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import torch

from checkpoints import write_fsdp_step
from flowcases import wait_for
from flowruns import FlowLab, finish
from published_run import RUN, WEIGHT_FILES, Published
from servers.proxy import Request, running_proxy
from servers.seaweed import S3Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.service, pytest.mark.browser]

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
PATIENCE_MILLISECONDS = 15_000
FILES_BEFORE_PAUSE = 5
Shoot = Callable[[str], None]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without calls of its own."""
    from playwright.sync_api import sync_playwright

    if not Path(CHROMIUM).exists():
        pytest.skip(f"no {CHROMIUM}: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh tab."""
    tab = browser.new_page(viewport={"width": 1440, "height": 900})
    tab.set_default_timeout(PATIENCE_MILLISECONDS)
    yield tab
    tab.close()


@pytest.fixture
def shoot(page: Page, tmp_path: Path) -> Shoot:
    """Takes a picture of the tab, in few colors so that it is small."""
    from PIL import Image

    directory = IMAGES if os.environ.get("CKPTFLOW_UPDATE_IMAGES") else tmp_path
    directory.mkdir(parents=True, exist_ok=True)

    def take(name: str) -> None:
        page.mouse.move(0, 0)
        page.wait_for_timeout(700)  # drawings move to their places
        page.screenshot(path=directory / name)
        with Image.open(directory / name) as picture:
            picture.convert("RGB").quantize(128).save(directory / name, optimize=True)

    return take


def artifact_id(lab: FlowLab, run: Any, key: str) -> str:
    (found,) = [each["id"] for each in lab.artifacts(run) if each["key"] == key]
    return str(found)


def test_a_run_is_found_by_its_name_and_its_graph_shows_the_steps(
    lab: FlowLab, published: Published, page: Page, shoot: Shoot
) -> None:
    page.goto(f"{lab.server.ui_url}/v2/runs")
    page.get_by_role("link", name=f"post-training {RUN} step-120").first.wait_for()
    page.goto(f"{lab.server.ui_url}/v2/runs/flow-run/{published.run['id']}")
    page.get_by_text("Completed", exact=True).first.wait_for()
    page.get_by_text(f"{8 + WEIGHT_FILES + 3} Task runs").wait_for()
    page.locator("canvas").first.wait_for()
    page.get_by_role("tab", name="Task Runs", exact=True).click()
    for step in ("inspect", "shrink", "cast", "finish", "validate"):
        page.get_by_text(f"{step} {RUN} step-120", exact=True).first.wait_for()
    place = published.uri
    for step in (f"upload {RUN} step-120 to {place}", f"ask {place} about {RUN} step-120"):
        page.get_by_text(step, exact=True).first.wait_for()
    page.get_by_text(f"announce {RUN} step-120 at {place}", exact=True).first.wait_for()
    page.get_by_text(f"merge {RUN} step-120 file 2 of {WEIGHT_FILES}", exact=True).first.wait_for()
    page.get_by_role("tab", name="Logs", exact=True).click()
    page.set_viewport_size({"width": 1440, "height": 1100})
    # Only the lines in sight are in the page; the last one is the first one then.
    page.get_by_role("combobox").filter(has_text="Oldest to newest").click()
    page.get_by_role("option", name="Newest to oldest").click()
    page.get_by_text(f"{RUN} step-120 is published at {published.destination}", exact=True).wait_for()
    shoot("ui-run.png")


def test_the_artifacts_of_a_run_are_cards_that_lead_to_tables_with_rows(
    lab: FlowLab, published: Published, page: Page, shoot: Shoot
) -> None:
    page.goto(f"{lab.server.ui_url}/v2/runs/flow-run/{published.run['id']}")
    page.get_by_role("tab", name="Artifacts", exact=True).click()
    for description in ("What", "Bytes of", "Dtypes of", "Weight files of", "Checks of", "Files of"):
        page.get_by_text(re.compile(f"^{description} {RUN} step-120")).first.wait_for()
    page.set_viewport_size({"width": 1440, "height": 1500})
    shoot("ui-artifacts.png")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.get_by_text(f"What {RUN} step-120 holds").click()
    page.get_by_role("cell", name="2 (fsdp)").wait_for()
    rows = {"shrink": "files with weights", "cast": "bfloat16", "merge": "model-00001-of-00003.safetensors"}
    for key, cell in {**rows, "published-files": "ckptflow.json"}.items():
        page.goto(f"{lab.server.ui_url}/v2/artifacts/artifact/{artifact_id(lab, published.run, key)}")
        page.get_by_role("cell", name=cell).first.wait_for()


def test_the_proof_is_a_table_of_checks_and_pictures_that_are_drawn(
    lab: FlowLab, published: Published, page: Page, shoot: Shoot
) -> None:
    page.goto(f"{lab.server.ui_url}/v2/artifacts/artifact/{artifact_id(lab, published.run, 'validate')}")
    page.get_by_role("cell", name="weight files and index").wait_for()
    page.get_by_role("cell", name="passed").first.wait_for()
    shoot("ui-checks.png")
    page.set_viewport_size({"width": 1440, "height": 1520})
    page.goto(f"{lab.server.ui_url}/v2/artifacts/artifact/{artifact_id(lab, published.run, 'validate-picture')}")
    page.get_by_role("heading", name=f"{RUN} step-120: validation passed").wait_for()
    drawings = page.locator("svg[id^=mermaid], pre svg, .mermaid svg")
    drawings.nth(1).wait_for()
    said = " ".join(drawings.all_text_contents())
    assert "Relative rounding error" in said
    assert "Bytes by dtype" in said
    assert "0.39 %" in said
    page.get_by_role("cell", name="forward pass").wait_for()
    assert "yntax error" not in page.content()
    shoot("ui-validate.png")


def test_the_link_and_the_parameters_say_where_it_went(lab: FlowLab, published: Published, page: Page) -> None:
    page.goto(f"{lab.server.ui_url}/v2/artifacts/artifact/{artifact_id(lab, published.run, 'upload')}")
    page.get_by_text(published.destination).first.wait_for()
    page.goto(f"{lab.server.ui_url}/v2/runs/flow-run/{published.run['id']}")
    page.get_by_role("tab", name="Parameters", exact=True).click()
    page.get_by_text(published.uri).first.wait_for()
    page.get_by_text("keep_dtype").first.wait_for()


def test_the_progress_of_an_upload_moves_while_one_looks(
    lab: FlowLab, s3_server: S3Server, s3_bucket_name: str, page: Page, tmp_path: Path
) -> None:
    path = write_fsdp_step(tmp_path / "slow-store", 60)
    released = threading.Event()
    sent: list[Request] = []

    def be_slow(request: Request) -> None:
        sent.append(request)
        time.sleep(0.7 if request.is_content else 0)
        if len([each for each in sent if each.is_content]) > FILES_BEFORE_PAUSE:
            released.wait(60)

    with running_proxy(s3_server.endpoint_url) as store:
        store.interfere = be_slow
        options = ("--no-forward", "--max-shard-size", "3KB")
        process = lab.start(path, f"s3://{s3_bucket_name}/slow", *options, AWS_ENDPOINT_URL=store.endpoint_url)
        wait_for(lambda: progress_of(lab, "slow-store step-60") != [])
        (identifier,) = progress_of(lab, "slow-store step-60")
        page.goto(f"{lab.server.ui_url}/v2/artifacts/artifact/{identifier}")
        page.get_by_text(re.compile(r"^upload: [\d.]+ kB of [\d.]+ kB at [\d.]+ .?B/s, \d+ s left$")).wait_for()
        before = percent(page)
        released.set()
        done = finish(process)
    assert done.status == 0, done.stderr
    page.reload()
    page.get_by_text(re.compile(r"^upload: [\d.]+ kB at [\d.]+ .?B/s$")).wait_for()
    assert 0 < before < percent(page) == 100


def percent(page: Page) -> float:
    """What the page of a progress artifact says."""
    said = page.get_by_text(re.compile(r"^Progress: [\d.]+%$")).inner_text()
    return float(said.removeprefix("Progress: ").removesuffix("%"))


def progress_of(lab: FlowLab, label: str) -> list[str]:
    """The progress artifacts of a run."""
    runs = lab.runs(f"post-training {label}")
    return [each["id"] for run in runs for each in lab.artifacts(run) if each["type"] == "progress"]


def test_the_reason_of_a_refusal_is_read_without_opening_logs(
    lab: FlowLab, published: Published, page: Page, shoot: Shoot
) -> None:
    norm = "model.layers.1.post_attention_layernorm.weight"
    broken = {norm: lambda tensor: torch.full_like(tensor, float("nan"))}
    with TemporaryDirectory(prefix="runs-") as runs:  # the path is in the picture
        path = write_fsdp_step(Path(runs) / "diverged-sft", 40, changes=broken)
        finished = lab.run(path, published.uri, "--no-forward")
    assert finished.status == 1
    assert finished.outcomes[0]["state"] == "refused"
    (run,) = lab.runs("post-training diverged-sft step-40")
    page.goto(f"{lab.server.ui_url}/v2/runs/flow-run/{run['id']}")
    page.get_by_text("Refused", exact=True).first.wait_for()
    page.get_by_role("tab", name="Details", exact=True).click()
    page.get_by_text("State Message").wait_for()
    page.set_viewport_size({"width": 1440, "height": 1000})
    reason = page.get_by_text(re.compile(f"NaN.*; tensor: {norm}; .*what to do: ", re.DOTALL)).first
    reason.wait_for()
    shoot("ui-refused.png")
