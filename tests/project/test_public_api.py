"""What importing memreclaim costs and brings."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import memreclaim

pytestmark = pytest.mark.cpu

EXPORTED = {
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "FreedBytes",
    "IntegrityError",
    "KVPool",
    "LayerReport",
    "MemreclaimError",
    "Mismatch",
    "NotExact",
    "Phase",
    "PoolChange",
    "PoolError",
    "Proof",
    "Reason",
    "Reclaimer",
    "Report",
    "Settings",
    "State",
    "SwapError",
    "Tag",
    "TagAccessError",
    "Twin",
    "__version__",
    "build_twin",
    "grouped_projection",
    "is_tag",
    "prove",
    "twin_of",
}
IMPORT_MILLISECONDS = 30


def _python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_exported_names() -> None:
    """The public names are these, no more and no fewer, and each one is there."""
    assert set(memreclaim.__all__) == EXPORTED
    assert set(dir(memreclaim)) == EXPORTED
    assert [name for name in EXPORTED if getattr(memreclaim, name, None) is None] == []


def test_unknown_names_raise_attribute_error() -> None:
    """A misspelt name fails as in any module."""
    with pytest.raises(AttributeError, match="no attribute 'Reclaimers'"):
        memreclaim.Reclaimers  # noqa: B018


def test_every_error_is_a_memreclaim_error() -> None:
    """One except clause catches all that is raised on purpose."""
    errors = [getattr(memreclaim, name) for name in EXPORTED if name.endswith("Error") or name == "NotExact"]
    assert all(issubclass(error, memreclaim.MemreclaimError) for error in errors)


def test_version_is_that_of_the_distribution() -> None:
    """The version is written in one place."""
    try:
        installed = metadata.version("memreclaim")
    except metadata.PackageNotFoundError:
        pytest.skip("the sources are on the path, but the distribution is not installed")
    assert memreclaim.__version__ == installed


@pytest.mark.parametrize("module", ["memreclaim", "memreclaim_kernels", "memreclaim.engines"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    """No Triton, metrics, engine or server is imported, and no CUDA context is made."""
    heavy = {
        "triton",
        "prometheus_client",
        "sglang",
        "vllm",
        "starlette",
        "uvicorn",
        "structlog",
        "rich",
        "safetensors",
    }
    loaded = _python(f"import sys, {module}; print(*sorted(set(sys.modules) & {heavy!r}))")
    assert loaded == ""


def test_importing_memreclaim_does_not_import_torch() -> None:
    """Torch takes seconds to import; names that need it are looked up when they are used."""
    assert _python("import sys, memreclaim; print('torch' in sys.modules)") == "False"


def test_public_names_start_no_cuda() -> None:
    """Using every public name loads torch but neither Triton nor a CUDA context."""
    program = (
        "import sys, memreclaim, torch; [getattr(memreclaim, name) for name in memreclaim.__all__]; "
        "print('triton' in sys.modules, 'prometheus_client' in sys.modules, torch.cuda.is_initialized())"
    )
    assert _python(program) == "False False False"


def test_import_time() -> None:
    """`import memreclaim` takes less than 30 ms beyond torch's own import; best of five, others use the machine."""
    program = (
        "import torch, sys, time, importlib\n"
        "best = 1e9\n"
        "for _ in range(5):\n"
        "    for name in [name for name in sys.modules if name.split('.')[0] == 'memreclaim']: del sys.modules[name]\n"
        "    start = time.perf_counter(); import memreclaim; best = min(best, time.perf_counter() - start)\n"
        "print(best * 1000)"
    )
    assert float(_python(program)) < IMPORT_MILLISECONDS
