"""The C interface: a library that does not fit this package is refused in one sentence when it is opened."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from varifocal.kernels.native import abi, library

built = pytest.mark.skipif(library.why_missing() is not None, reason="the native library was not built")
compiles = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
HEADER = Path(__file__).parents[2] / "csrc" / "varifocal.h"


def said_of(path: Path) -> str:
    """What a process that is told to use a library says about it; it must say it without a traceback."""
    code = "from varifocal.kernels.native import library; print(library.why_missing())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"VARIFOCAL_LIBRARY": str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    return run.stdout.strip()


def compiled(tmp_path: Path, source: str) -> Path:
    """A shared library made of a few lines of C."""
    text, made = tmp_path / "fake.c", tmp_path / "libfake.so"
    text.write_text(source, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(text)], check=True)
    return made


@built
def test_library_has_the_sizes_of_our_structs() -> None:
    assert abi.mismatch(library.library()) is None


def test_every_struct_and_function_of_the_header_is_known() -> None:
    header = HEADER.read_text(encoding="utf-8")
    assert set(re.findall(r"typedef struct (vf_\w+)", header)) == set(abi.STRUCTS)
    taken = dict(re.findall(r"VF_API int32_t (vf_\w+)\(int32_t target, const (vf_\w+) \*call\)", header))
    assert taken == {
        name: next(key for key, one in abi.STRUCTS.items() if one is s) for name, s in abi.FUNCTIONS.items()
    }
    (version,) = re.findall(r"#define VF_ABI_VERSION (\d+)", header)
    assert int(version) == abi.VERSION


def test_fields_have_the_names_of_the_header() -> None:
    header = HEADER.read_text(encoding="utf-8")
    for name, struct in abi.STRUCTS.items():
        (body,) = re.findall(rf"typedef struct {name} {{(.*?)\n}} {name};", header, re.DOTALL)
        plain = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
        declared = [
            re.sub(r"\[.*", "", part.split()[-1].lstrip("*"))
            for line in plain.split(";")
            if line.strip()
            for part in line.split(",")
        ]
        assert declared == [field[0] for field in struct._fields_], name


@compiles
def test_library_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    found = said_of(compiled(tmp_path, "int nothing(void) { return 0; }"))
    assert re.search(
        r"libfake\.so lacks a function of varifocal's C interface \(.*vf_\w+\); unset VARIFOCAL_LIBRARY$", found
    )


@compiles
def test_library_of_another_version_is_refused(tmp_path: Path) -> None:
    names = [*abi.FUNCTIONS, "vf_struct_size", "vf_status_text", "vf_norm_restorable"]
    names += ["vf_target_name", "vf_target_count", "vf_target_runs"]
    others = "".join(f"int {name}(void) {{ return 0; }}\n" for name in names)
    found = said_of(compiled(tmp_path, f"int vf_abi_version(void) {{ return 99; }}\n{others}"))
    assert found.endswith(
        f"has version 99 of the C interface, this package needs {abi.VERSION}; unset VARIFOCAL_LIBRARY"
    )


@built
def test_struct_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(ctypes.Structure):
        _fields_ = [("forward", abi.Swiglu), ("more", ctypes.c_int64 * 9)]

    monkeypatch.setitem(abi.STRUCTS, "vf_swiglu_grad", Longer)
    said = abi.mismatch(library.library())
    assert (
        said == f"has {ctypes.sizeof(abi.SwigluGrad)} bytes in vf_swiglu_grad, this package has {ctypes.sizeof(Longer)}"
    )


def test_file_that_is_not_a_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libtext.so").write_text("not a library", encoding="utf-8")
    assert "cannot be loaded" in said_of(tmp_path / "libtext.so")
