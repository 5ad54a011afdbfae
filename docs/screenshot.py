"""Takes the picture of the dashboard, `docs/images/dashboard.png`: `python docs/screenshot.py [--seconds 60]`.

The embedded pair serves its sample prompts to four clients meanwhile. Needs the `dev` extra and Chromium
(`apt-get install chromium`), or another one that SLIPSTREAM_CHROMIUM names.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import threading
import time
from pathlib import Path

import httpx2
from PIL import Image
from playwright.sync_api import sync_playwright

from slipstream import AsyncEngine
from slipstream.assets import sample_prompts
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.lifecycle import DrainingServer
from slipstream.serve.network.listening import bind

PICTURE = Path(__file__).parent / "images/dashboard.png"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="of traffic before the picture")
    seconds = parser.parse_args().seconds
    chromium = os.environ.get("SLIPSTREAM_CHROMIUM") or shutil.which("chromium")
    draft = {"method": "draft_model", "model": "embedded", "num_speculative_tokens": 6}
    auto = {"method": "auto", "drafters": [{"method": "suffix"}, draft]}
    engine = AsyncEngine(speculative_config=auto, max_num_seqs=8, num_threads=1)
    server = DrainingServer(create_app(engine, ServeConfig(dashboard_texts=True), "embedded-pair"))
    listening = bind("127.0.0.1", 0)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    serving = threading.Thread(target=server.run, args=([listening],))
    serving.start()
    while not server.started:
        time.sleep(0.05)
    end_s = time.monotonic() + seconds + 10
    clients = [threading.Thread(target=client, args=(address, number, end_s)) for number in range(4)]
    for thread in clients:
        thread.start()
    time.sleep(seconds)
    PICTURE.parent.mkdir(exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1120, "height": 1520}, color_scheme="light")
        page.goto(f"{address}/dashboard")
        page.wait_for_selector("#recent .answer")
        time.sleep(3)
        page.screenshot(path=PICTURE)
        browser.close()
    with Image.open(PICTURE) as picture:
        picture.quantize(128).save(PICTURE, optimize=True)
    for thread in clients:
        thread.join()
    server.should_exit = True
    serving.join()
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


def client(address: str, number: int, end_s: float) -> None:
    """Asks one thing after the other, with little pauses."""
    draw = random.Random(number)
    while time.monotonic() < end_s:
        prompt = draw.choice(sample_prompts())
        messages = list(prompt["messages"])
        while messages[-1]["role"] == "assistant":
            messages.pop()
        body = {"messages": messages, "task": prompt["task"], "max_tokens": 100, "temperature": 0.7}
        httpx2.post(f"{address}/v1/chat/completions", json=body, timeout=600).raise_for_status()
        time.sleep(draw.random() / 2)


if __name__ == "__main__":
    main()
