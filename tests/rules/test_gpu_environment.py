"""Variables of the environment that CUDA, NCCL, the allocator and the compiler read are set in one module alone."""

import ast
import re
from collections.abc import Iterator

from support.source_tree import PROGRAMS, ROOT, sources, walk

PLACE = "megazero/comm/gpu_environment.py"
NAME = r"(?:CUDA|CUBLAS|CUBLASLT|NCCL|TORCH_NCCL|TORCHINDUCTOR)_[A-Z0-9_]+|PYTORCH_(?:[A-Z]+_)?ALLOC[A-Z_]*"
READ = {"megazero/comm/startup.py": {"CUDA_VISIBLE_DEVICES"}}  # which devices a process may see is its launcher's say
# Programs that measure, build or test set what only they need, in the processes that they start.
ELSEWHERE = {
    # Allocators are what it compares.
    "benchmarks/fragmentation.py": {"PYTORCH_CUDA_ALLOC_CONF"},
    # Phases share a machine's cores, and a cache of compiled code that is gone with the examination.
    "benchmarks/gpu_examination.py": {"TORCHINDUCTOR_COMPILE_THREADS"},
    "benchmarks/gpu_examination.sh": {
        *("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE")
    },
    # Bytes are counted while code is compiled, so it must not come from a cache.
    "benchmarks/null_gpu.py": {
        *("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_FORCE_DISABLE_CACHES")
    },
    # The null GPU's driver has no virtual memory.
    "scripts/null_gpu.sh": {"PYTORCH_ALLOC_CONF"},
    # The test of the nodes waits on the host for each collective; training must not.
    "scripts/slurm/job.sh": {"TORCH_NCCL_BLOCKING_WAIT"},
}


def named(tree: ast.Module) -> Iterator[str]:
    """Yield the variables that a module names: as a text of its own, with or without a value, or as an argument."""
    for node in walk(tree):
        words = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value
        elif isinstance(node, ast.keyword):
            words = node.arg or ""
        if found := re.fullmatch(rf"({NAME})(=\S*)?", words):
            yield found[1]


def test_one_module_sets_the_variables_of_gpus() -> None:
    found = {source.name: set(named(source.tree)) for source in sources("megazero", *PROGRAMS)}
    assert {name: names for name, names in found.items() if names and name != PLACE} == READ
    assert len(found[PLACE]) > 5


def test_who_else_sets_them_is_named_with_the_reason() -> None:
    found = {source.name: set(named(source.tree)) for source in sources("benchmarks", "examples")}
    for path in (path for folder in ("scripts", "benchmarks") for path in (ROOT / folder).rglob("*")):
        if path.suffix in (".sh", ".sbatch", ".yaml"):
            lines = "\n".join(line.partition("# ")[0] for line in path.read_text(encoding="utf-8").splitlines())
            found[path.relative_to(ROOT).as_posix()] = set(re.findall(rf"\b({NAME})(?=[=:])(?!:-)", lines))
    assert {name: names for name, names in found.items() if names} == ELSEWHERE


def test_every_way_of_setting_one_is_seen() -> None:
    ways = (
        'os.environ["NCCL_DEBUG"] = "INFO"',
        'os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")',
        'os.environ.update(TORCHINDUCTOR_MAX_AUTOTUNE="1")',
        '{**os.environ, "PYTORCH_ALLOC_CONF": "x"}',
        'os.putenv("TORCH_NCCL_BLOCKING_WAIT", "1")',
        '["env", "CUBLAS_WORKSPACE_CONFIG=:16:8"]',
    )
    assert all(len(list(named(ast.parse(way)))) == 1 for way in ways)
    assert list(named(ast.parse('"set CUDA_VISIBLE_DEVICES, or leave it"'))) == []
