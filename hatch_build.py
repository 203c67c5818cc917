"""Compiles `recording/c/` to `_native`. Where that can't be done the wheel is pure Python, and works the same,
but for what only C can follow (convolutions, functions of torch that wait)."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if sysconfig.get_config_var("Py_GIL_DISABLED") or sys.byteorder != "little":
            return  # importing it would switch the GIL on; it writes status pages as they lie in memory
        folder = Path("src", "otel_dl", "recording", "c")
        for stale in Path(self.root, folder.parent).glob("_native.*.so"):
            stale.unlink()
        try:
            compile_extension(Path(self.root), "otel_dl.recording._native", folder)
        except Exception as error:
            self.app.display_warning(f"{folder} was not compiled, recording is slower: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def compile_extension(root: Path, name: str, folder: Path) -> None:
    """Beside the folder of its sources, as an editable installation wants it; a wheel takes it from there."""
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    files = sorted((root / folder).glob("*.[ch]"))
    sources = [str(file) for file in files if file.suffix == ".c"]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    macros = [("SOURCE", f'"{digest}"')]
    extension = Extension(name, sources, define_macros=macros, extra_compile_args=["-O2"])
    packages = {"": str(root / "src")}
    command = build_ext(Distribution({"name": "otel-dl", "ext_modules": [extension], "package_dir": packages}))
    command.inplace = command.force = True  # else what was built before a header changed would be taken again
    with tempfile.TemporaryDirectory() as objects:
        command.build_temp = command.build_lib = objects
        command.ensure_finalized()
        command.run()
