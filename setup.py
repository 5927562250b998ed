"""Package description of megazero; exact versions of everything are in scripts/constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def version() -> str:
    """The version string of megazero/__init__.py, read without importing it (torch is not there yet)."""
    text = (ROOT / "megazero" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('megazero/__init__.py has no line __version__ = "..."')
    return found.group(1)


# What reading Parquet files and cleaning text take besides.
CORPORA = ["datasketch>=1.6", "ftfy>=6.1", "py3langid>=0.3", "pyarrow>=15"]
# What tests compare megazero with; without one of these its tests are skipped.  Where Megatron's
# core has no wheels, a compiler would have to build it.
MEGATRON = "megatron-core>=0.16; platform_system == 'Linux' and python_version < '3.14'"
BITSANDBYTES = "bitsandbytes>=0.50"  # kernels of moments in 8 bits
COMPARED = [MEGATRON, f"{BITSANDBYTES}; platform_system == 'Linux'", "tiktoken>=0.7", "transformers>=4.41"]

setup(
    name="megazero",
    version=version(),
    description="GPT pretraining with tensor parallelism and ZeRO data parallelism",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The authors of megazero",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["GPT", "pretraining", "ZeRO", "tensor parallelism", "pipeline parallelism", "PyTorch"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["megazero", "megazero.*"]),
    package_data={"megazero": ["py.typed"], "megazero.planner.page": ["page.css", "what_if.js"]},
    entry_points={"console_scripts": ["megazero = megazero.command:run"]},
    install_requires=[
        "torch>=2.11",
        "fsspec>=2024.2",
        "gigatoken>=0.10; platform_machine in 'x86_64 aarch64 arm64'",
        "numpy>=1.26",
        "orjson>=3.10",
        "protobuf>=4",
        "pydantic>=2.7,<3",
        "pyyaml>=6",
        "rich>=13",
        "safetensors>=0.4.3",
        "sentencepiece>=0.2",
        "tensorboard>=2.16",
        "tokenizers>=0.19",
        "xxhash>=3.4",
        "zstandard>=0.22",
    ],
    extras_require={
        "bitsandbytes": [BITSANDBYTES],  # for megazero/optim/eight_bit.py
        "corpora": CORPORA,
        "lm-eval": ["lm-eval>=0.4.13,<0.5"],  # for megazero/evaluate/harness.py
        "mlflow": ["mlflow-skinny>=3.0", "sqlalchemy>=2.0", "alembic>=1.13"],  # the others for its database
        "wandb": ["wandb>=0.19"],
        "ray": ["ray[train]>=2.60"],  # for megazero/train/on_ray.py
        "test": [
            *CORPORA,
            *COMPARED,
            "hypothesis>=6.100",
            "mypy>=1.10",
            "pytest>=8.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.5",
            "types-PyYAML>=6",
        ],
    },
)
