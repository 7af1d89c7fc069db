"""What a wheel of this project puts on a user's import path."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent.parent
TOP_LEVEL = {"memreclaim", "memreclaim_kernels"}
HAS_SOURCES = (ROOT / "memreclaim" / "__init__.py").exists()
from_sources = pytest.mark.skipif(
    not HAS_SOURCES, reason="the tests run against an installed wheel, without the sources"
)
from_wheel = pytest.mark.skipif(HAS_SOURCES, reason="the tests run against the sources")


@from_sources
def test_kernels_is_no_package() -> None:
    """`kernels` is the import name of a package that SGLang needs; a file here would shadow it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


@from_sources
def test_wheel_holds_the_two_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """The wheel's top-level names are exactly the two packages."""
    names = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == TOP_LEVEL


@from_sources
def test_wheel_holds_every_source_file(wheel: zipfile.ZipFile) -> None:
    """Sources, tables, type markers and other data files are all shipped."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "memreclaim", "kernels/memreclaim_kernels"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("the sources are no git checkout")
    tracked = {name.removeprefix("kernels/") for name in listed.stdout.split() if (ROOT / name).exists()}
    assert tracked - set(wheel.namelist()) == set()


@from_sources
def test_wheel_names_its_licence(wheel: zipfile.ZipFile) -> None:
    """The licence's text and its SPDX name travel with the wheel."""
    prefix = next(name.split("/")[0] for name in wheel.namelist() if name.endswith("METADATA"))
    about = wheel.read(f"{prefix}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in about
    assert "Apache License" in wheel.read(f"{prefix}/licenses/LICENSE").decode()


@from_wheel
def test_installed_top_level_names() -> None:
    """The installed distribution brings exactly the two packages, from where packages are installed."""
    brought = {name for name, owners in metadata.packages_distributions().items() if "memreclaim" in owners}
    assert brought == TOP_LEVEL


@from_wheel
def test_installed_packages_are_what_is_tested() -> None:
    """Nothing is imported from a source tree."""
    import memreclaim
    import memreclaim_kernels

    assert all("site-packages" in str(module.__file__) for module in (memreclaim, memreclaim_kernels))


def test_command_is_installed() -> None:
    """The program is on the path of the environment and of `python -m` alike."""
    program = Path(sys.executable).parent / "memreclaim"
    if not program.exists():
        pytest.skip("the sources are on the path, but the distribution is not installed")
    by_name = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True)
    by_module = subprocess.run(
        [sys.executable, "-m", "memreclaim", "--version"], capture_output=True, text=True, check=True
    )
    assert by_name.stdout == by_module.stdout != ""
