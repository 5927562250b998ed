"""Pages as headless Chromium shows them, where it is installed."""

import shutil
import subprocess
from pathlib import Path

from support.plan_page import Reader

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-extensions"),
)


def opened(page: str, folder: Path, fragment: str) -> Reader:
    """Return the page as it is once its scripts have run, at a fragment."""
    file = folder / "plan.html"
    file.write_text(page)
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={folder / fragment}", "--dump-dom", f"file://{file}#{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return Reader(done.stdout)
