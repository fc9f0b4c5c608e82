"""Compiles the CUDA kernels with NVRTC, which needs neither a GPU nor a driver.

    python tools/build_kernels.py --nvrtc DIR             writes src/backend/cuda/kernels/*.ptx
    python tools/build_kernels.py --nvrtc DIR --check     fails where those are stale
    python tools/build_kernels.py --nvrtc DIR --cubins    compiles for every architecture; fails on spilled registers
    python tools/build_kernels.py --nvrtc DIR --cubins --table    and prints registers as Markdown

DIR is where `pip install --target DIR nvidia-cuda-nvrtc-cu12` put the library. The PTX comes from version 12.0, which
every driver from 525 on reads; cubins from 12.9, which knows all architectures.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KERNELS = Path(__file__).parents[1] / "src" / "backend" / "cuda" / "kernels"
ARCHITECTURES = ["75", "80", "86", "89", "90", "100", "120"]


class Nvrtc:
    """The few functions of NVRTC that are needed."""

    def __init__(self, folder: Path) -> None:
        """Load the library under `folder`."""
        found = sorted(p for p in folder.rglob("libnvrtc.so*"))
        if not found:
            sys.exit(f"{folder}: no libnvrtc.so; pip install --target {folder} nvidia-cuda-nvrtc-cu12")
        for builtins in folder.rglob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(str(found[0]))

    def compile(self, source: Path, options: list[str], result: str) -> tuple[bytes, str]:
        """The PTX or cubin (`result`) of `source`, and the compiler's log."""
        program = ctypes.c_void_p()
        headers = sorted(source.parent.glob("*.cuh"))
        texts = (ctypes.c_char_p * len(headers))(*(h.read_bytes() for h in headers))
        names = (ctypes.c_char_p * len(headers))(*(h.name.encode() for h in headers))
        create = self.lib.nvrtcCreateProgram(
            ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names
        )
        assert create == 0, create
        arguments = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        code = self.lib.nvrtcCompileProgram(program, len(options), arguments)
        log = self._bytes(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode()
        if code:
            sys.exit(f"{source.name}: {log}")
        out = self._bytes(program, f"nvrtcGet{result}Size", f"nvrtcGet{result}")
        self.lib.nvrtcDestroyProgram(ctypes.byref(program))
        return out, log

    def _bytes(self, program: ctypes.c_void_p, size_of: str, get: str) -> bytes:
        size = ctypes.c_size_t()
        assert getattr(self.lib, size_of)(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(self.lib, get)(program, buffer) == 0
        return buffer.raw[: size.value]


def options(architecture: str) -> list[str]:
    """What every compilation has in common."""
    return [f"--gpu-architecture={architecture}", "--std=c++17", "--fmad=true", "-default-device"]


def ptx(nvrtc: Nvrtc, source: Path) -> bytes:
    """The PTX of `source`, without the lines that name the compiler's build."""
    text, _ = nvrtc.compile(source, options("compute_75"), "PTX")
    lines = text.rstrip(b"\0").decode().splitlines()
    return "\n".join(line.rstrip() for line in lines if line and not line.startswith("//")).encode() + b"\n"


def build(nvrtc: Nvrtc, check: bool) -> int:
    """Writes the PTX files, or says which are stale."""
    stale = []
    for source in sorted(KERNELS.glob("*.cu")):
        path = source.with_suffix(".ptx")
        fresh = ptx(nvrtc, source)
        if check and (not path.exists() or path.read_bytes() != fresh):
            stale.append(path.name)
        elif not check:
            path.write_bytes(fresh)
    if stale:
        print(f"stale: {', '.join(stale)}; run tools/build_kernels.py", file=sys.stderr)
    return len(stale)


def cubins(nvrtc: Nvrtc, table: bool) -> int:
    """Compiles for every architecture; counts kernels that spill."""
    registers: dict[str, list[str]] = {}
    n_spilled = 0

    def log_of(job: tuple[str, Path]) -> tuple[str, str]:
        architecture, source = job
        flags = [*options(f"sm_{architecture}"), "--ptxas-options=-v"]
        return architecture, nvrtc.compile(source, flags, "CUBIN")[1]

    # The longest first: the others then fill the time of whoever is done early.
    sources = sorted(KERNELS.glob("*.cu"), key=lambda source: source.name != "ffn.cu")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        logs = list(pool.map(log_of, [(a, source) for source in sources for a in ARCHITECTURES]))
    for architecture, log in logs:
        for entry in re.split(r"Compiling entry function '", log)[1:]:
            name = entry.split("'")[0]
            used = re.search(r"Used (\d+) registers", entry)
            spills = [int(n) for n in re.findall(r"(\d+) bytes spill", entry)]
            assert used, entry
            if len(spills) < 2 or any(spills):
                print(f"sm_{architecture} {name}: spills {spills}", file=sys.stderr)
                n_spilled += 1
            registers.setdefault(name, []).append(used[1])
    short = [name for name, used in registers.items() if len(used) != len(ARCHITECTURES)]
    assert registers
    assert not short, short
    if table:
        print("| kernel | " + " | ".join(f"sm_{a}" for a in ARCHITECTURES) + " |")
        print("|---|" + "---|" * len(ARCHITECTURES))
        for name, used in sorted(registers.items()):
            print(f"| `{name}` | " + " | ".join(used) + " |")
    return n_spilled


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvrtc", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cubins", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    nvrtc = Nvrtc(args.nvrtc)
    sys.exit(bool(cubins(nvrtc, args.table) if args.cubins else build(nvrtc, args.check)))


if __name__ == "__main__":
    main()
