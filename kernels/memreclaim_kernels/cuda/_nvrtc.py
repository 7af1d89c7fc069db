"""Compilation of the CUDA sources of this package with NVRTC, cached on disk.

Nothing is compiled or loaded at import. A cubin is cached under the user's cache directory, keyed by source text,
options and NVRTC version, and written atomically, so that several ranks may compile at once.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import importlib.util
import os
import tempfile
from functools import lru_cache
from pathlib import Path

SOURCES = Path(__file__).parent
_NVRTC_SUCCESS = 0


class CompileError(RuntimeError):
    """NVRTC is missing or refused a source; the message holds its log."""


def cache_dir() -> Path:
    """Where cubins are kept: ``$MEMRECLAIM_CACHE_DIR``, else our part of ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    chosen = os.environ.get("MEMRECLAIM_CACHE_DIR")
    if chosen:
        return Path(chosen) / "cuda"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "memreclaim" / "cuda"


def _candidates() -> list[str]:
    """Paths and names of NVRTC to try: beside torch's own CUDA wheels, then CUDA_HOME, then the loader's path."""
    found: list[str] = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        # CUDA 13 wheels install to nvidia/cu13/lib, CUDA 12 wheels to nvidia/cuda_nvrtc/lib.
        found += sorted(str(p) for p in Path(root).glob("*/lib/libnvrtc.so.*"))
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec and torch_spec.origin:
        bundled = (Path(torch_spec.origin).parent / "lib").glob("libnvrtc-*.so*")
        found += sorted(str(p) for p in bundled if "builtins" not in p.name)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        found += sorted(str(p) for p in Path(home).glob("lib*/libnvrtc.so*")) if home else []
    found += sorted(str(p) for p in Path("/usr/local/cuda").glob("lib*/libnvrtc.so*"))
    found += [name for name in (ctypes.util.find_library("nvrtc"),) if name]
    return found


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The NVRTC library, loaded on first use."""
    tried = []
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            tried.append(f"{path}: {error}")
    message = "libnvrtc was not found; install the nvidia-cuda-nvrtc wheel of torch's CUDA version or set CUDA_HOME"
    raise CompileError("; ".join([message, *tried]))


def version() -> tuple[int, int]:
    """NVRTC's (major, minor)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


@lru_cache(maxsize=1)
def supported_archs() -> tuple[int, ...]:
    """Virtual architectures NVRTC can compile for, ascending, such as ``(75, 80, ..., 121)``."""
    count = ctypes.c_int()
    _check(library().nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
    archs = (ctypes.c_int * count.value)()
    _check(library().nvrtcGetSupportedArchs(archs), "nvrtcGetSupportedArchs")
    return tuple(sorted(archs))


def architecture(capability: tuple[int, int]) -> str:
    """``--gpu-architecture`` of a device: its own machine code, or PTX of the newest older architecture known."""
    wanted = capability[0] * 10 + capability[1]
    if wanted == 90:  # noqa: PLR2004 - Hopper: wgmma exists only in the architecture-specific target
        return "sm_90a"
    known = [arch for arch in supported_archs() if arch <= wanted]
    if not known:
        msg = f"NVRTC {version()} knows no architecture that runs on compute capability {capability}"
        raise CompileError(msg)
    return f"sm_{wanted}" if known[-1] == wanted else f"compute_{known[-1]}"


def compile_source(
    name: str,
    defines: tuple[tuple[str, int], ...],
    capability: tuple[int, int],
    generated: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """Machine code (or PTX) of ``name``.cu with the given macros, from the cache or compiled now (1 to 4 s).

    ``generated`` are headers made at run time, as pairs of name and text.
    """
    arch = architecture(capability)
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{key}={value}" for key, value in defines)]
    sources = {path.name: path.read_bytes() for path in sorted(SOURCES.glob("*.cuh"))}
    sources |= {header: text.encode() for header, text in generated}
    text = (SOURCES / f"{name}.cu").read_bytes()
    digest = hashlib.sha256(repr((options, version(), sorted(sources.items()), text)).encode()).hexdigest()
    path = cache_dir() / f"{name}-{arch}-{digest[:24]}.bin"
    if path.is_file():
        return path.read_bytes()
    image = _compile(f"{name}.cu", text, sources, options, ptx=arch.startswith("compute_"))
    _store(path, image)
    return image


def _compile(name: str, text: bytes, headers: dict[str, bytes], options: list[str], *, ptx: bool) -> bytes:
    nvrtc = library()
    program = ctypes.c_void_p()
    names = (ctypes.c_char_p * len(headers))(*(key.encode() for key in headers))
    bodies = (ctypes.c_char_p * len(headers))(*headers.values())
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), len(headers), bodies, names)
    _check(created, "nvrtcCreateProgram")
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), flags)
        if status != _NVRTC_SUCCESS:
            log = _text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode(errors="replace")
            msg = f"NVRTC refused {name} with {options}:\n{log}"
            raise CompileError(msg)
        kind = "PTX" if ptx else "CUBIN"
        return _text(program, f"nvrtcGet{kind}Size", f"nvrtcGet{kind}")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, size_call: str, text_call: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(library(), size_call)(program, ctypes.byref(size)), size_call)
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library(), text_call)(program, buffer), text_call)
    return buffer.raw


def _store(path: Path, image: bytes) -> None:
    """Write atomically; a cache that cannot be written costs a compilation at the next start, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(image)
        Path(file.name).replace(path)
    except OSError:
        return


def _check(status: int, call: str) -> None:
    if status != _NVRTC_SUCCESS:
        library().nvrtcGetErrorString.restype = ctypes.c_char_p
        msg = f"{call}: {library().nvrtcGetErrorString(status).decode()}"
        raise CompileError(msg)
