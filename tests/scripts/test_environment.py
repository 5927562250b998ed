"""What scripts/environment.sh makes of what it finds."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_an_environment_without_pip_is_completed(tmp_path: Path) -> None:
    """Debian's python without python3-venv leaves such a one behind; the install itself is left out here."""
    root = tmp_path / "my project"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "setup.py", root)
    python = sys._base_executable  # type: ignore[attr-defined]  # an environment's own python makes its copies
    subprocess.run([python, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    install = "install_torch() { .venv/bin/python -m pip --version; false; }"
    program = f"source scripts/environment.sh; {install}; ensure_environment"
    done = subprocess.run(
        ["bash", "-c", program], cwd=root, env={"PATH": "/usr/bin:/bin", "PYTHON": python},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "pip " in done.stdout and "No module named pip" not in done.stderr
