"""Build of the compiled part: CMake makes one static library of native/, then one Cython extension links it.

A few modules of Python that polling programs run through all the time are compiled by Cython too, as they are.

Everything else is in pyproject.toml. Read at build time, all optional:
  ASYNCFABRIC_SANITIZE   address,undefined or thread
  ASYNCFABRIC_DEBUG      1: assertions, no optimisation
  ASYNCFABRIC_JOBS       compile jobs, default: all cores
  ASYNCFABRIC_WERROR     ON: warnings stop the build; off, since a newer compiler's must not stop an installation
  ASYNCFABRIC_COMMIT     what `asyncfabric --version` reports of a wheel, default: that of a checkout
Repeated builds are incremental: CMake, Cython and setuptools each look at what changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
SANITIZE = os.environ.get("ASYNCFABRIC_SANITIZE", "")
DEBUG = os.environ.get("ASYNCFABRIC_DEBUG", "") not in ("", "0")
JOBS = os.environ.get("ASYNCFABRIC_JOBS", str(os.cpu_count() or 1))
WERROR = os.environ.get("ASYNCFABRIC_WERROR", "OFF")
FLAVOURS = {"": "release", "address,undefined": "asan", "thread": "tsan"}
if SANITIZE not in FLAVOURS:
    sys.exit(f"ASYNCFABRIC_SANITIZE must be one of {sorted(FLAVOURS)}, got {SANITIZE!r}")
FLAVOUR = FLAVOURS[SANITIZE] + ("-debug" if DEBUG else "")
LIBRARY = "libasyncfabric_native.a"
ENGINE = "asyncfabric._native._engine"
COMPILED_PYTHON = [
    "asyncfabric.integrations.nixl.agent",
    "asyncfabric.integrations.nixl.early_notes",
    "asyncfabric.integrations.nixl.handles",
    "asyncfabric.integrations.nixl.note_exchange",
    "asyncfabric.integrations.nixl.note_slots",
    "asyncfabric.integrations.nixl.notes",
    "asyncfabric.integrations.nixl.plan",
    "asyncfabric.integrations.nixl.remotes",
    "asyncfabric.integrations.nixl.request",
]
"""Their interpretation was a third of the time of a small noted transfer. Python imports what is compiled, beside
the sources, which stay for readers and tracebacks: after an edit, build again. A .pxd beside a module gives its classes
C types: attributes are then fields of a struct, which halves what is left."""


def tool(name: str) -> str:
    """Return the path of a build tool: beside this Python first, so that an unactivated environment works."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        sys.exit(f"asyncfabric: {name} was not found; `pip install {name}` or install it from your distribution")
    return found


def commit() -> str:
    """Return the commit that is built, "" where nothing states it."""
    stated = os.environ.get("ASYNCFABRIC_COMMIT", "")
    if stated or not (ROOT / ".git").exists():
        return stated
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


class BuildNative(build_ext):
    """Build the static library, and beside it translate and compile the extensions; the engine's links it."""

    def build_extensions(self) -> None:
        """Compile by way of ccache, where it is installed and is not the compiler by another name."""
        ccache, compiler = shutil.which("ccache"), shutil.which(self.compiler.compiler_so_cxx[0])
        if ccache and compiler and Path(compiler).resolve().name != "ccache":
            self.compiler.compiler_so_cxx = [ccache, *self.compiler.compiler_so_cxx]
        link = self.compiler.link_shared_object

        def link_what_is_built(*arguments: Any, **options: Any) -> None:
            self.building.result()
            link(*arguments, **options)

        self.compiler.link_shared_object = link_what_is_built
        super().build_extensions()

    def run(self) -> None:
        """Run CMake and the compiler of the extension side by side: what the two have to do takes equally long."""
        # Not build_temp: editable installs would start from nothing. The presets of CMake use the same folders.
        native = ROOT / "build" / f"native-{FLAVOUR}"
        configure(native)
        self.all_anew = bool(self.force)
        self.engine_anew = not is_built(native)
        with ThreadPoolExecutor(1) as pool:
            self.building = pool.submit(run_ninja, native, "-j", JOBS)
            for extension in self.extensions:
                if extension.name == ENGINE:
                    extension.extra_objects = [str(native / LIBRARY)]
                    extension.depends = list(map(str, sorted((ROOT / "native" / "include").rglob("*.h"))))
            translated = cythonize(
                self.extensions,
                build_dir=str(native / "cython"),
                include_path=[str(ROOT / "cython_ext")],
                compiler_directives={"annotation_typing": False},  # annotations are for readers, as elsewhere
            )
            for extension, one in zip(self.extensions, translated, strict=True):
                extension.sources = one.sources
            super().run()
            self.building.result()
        if not self.inplace and not self.editable_mode:  # not compiled in: each commit would be compiled anew
            (Path(self.build_lib) / "asyncfabric" / "_native" / "commit.txt").write_text(commit())

    def build_extension(self, extension: Extension) -> None:
        """Compile and link one extension, if it is not as its sources are."""
        self.force = self.all_anew or (self.engine_anew and extension.name == ENGINE)
        super().build_extension(extension)


def configure(folder: Path) -> None:
    """Let CMake look at what is there."""
    command = [
        tool("cmake"),
        "-S",
        str(ROOT / "native"),
        "-B",
        str(folder),
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DCMAKE_BUILD_TYPE={'Debug' if DEBUG else 'RelWithDebInfo'}",
        f"-DASYNCFABRIC_SANITIZE={SANITIZE}",
        f"-DASYNCFABRIC_WERROR={WERROR}",
    ]
    subprocess.run(command, check=True)


def run_ninja(folder: Path, *options: str, capture: bool = False) -> str:
    """Build what changed of the library; return what is printed where that is captured."""
    command = [tool("ninja"), "-C", str(folder), *options, "asyncfabric_native"]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if capture else None).stdout or ""


def is_built(folder: Path) -> bool:
    """Return whether the library is as its sources are, so that an extension that links it need not be linked anew."""
    return "no work to do" in run_ninja(folder, "-n", capture=True)


def packages() -> list[str]:
    """Return both import packages; the folder services/ is installed as asyncfabric_services."""
    services = [f"asyncfabric_services.{name}" for name in find_packages("services")]
    return [*find_packages(include=["asyncfabric", "asyncfabric.*"]), "asyncfabric_services", *services]


def engine_extension() -> Extension:
    """Describe the extension; its sources and the library are filled in by BuildNative."""
    optimisation = "-O0" if DEBUG else "-O1" if SANITIZE else "-O2"
    flags = ["-std=c++20", "-fvisibility=hidden", optimisation, "-g1", "-Wno-sign-compare"]
    # Some toolchains link the C++ runtime statically. Seen by the loader, its symbols would mix with those of another
    # copy, such as torch's: a stream of ours then called a facet of another kind, and the process ended by SIGSEGV.
    link = [f"-Wl,--version-script={ROOT / 'cython_ext' / 'exports.map'}"]
    if not (DEBUG or SANITIZE):
        link += ["-Wl,--strip-debug"]  # a wheel of 1 MB, not 16; function names stay
    if SANITIZE:
        flags += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"]
        link += [f"-fsanitize={SANITIZE}"]
    return Extension(
        ENGINE,
        sources=["cython_ext/_engine.pyx"],
        include_dirs=["native/include", "native/src"],  # src: only for bench/
        language="c++",
        define_macros=[
            ("ASYNCFABRIC_BUILD_VERSION", f'"{VERSION}"'),
            ("ASYNCFABRIC_BUILD_SANITIZE", f'"{SANITIZE}"'),
            ("ASYNCFABRIC_BUILD_DEBUG", str(int(DEBUG))),
        ],
        extra_compile_args=flags,
        extra_link_args=link,
        libraries=["dl", "pthread"],
    )


def compiled_python() -> list[Extension]:
    """Describe the modules of Python that are compiled as they are."""
    return [
        Extension(
            name,
            sources=[f"{name.replace('.', '/')}.py"],
            extra_compile_args=["-O2", "-g0"],
            extra_link_args=["-Wl,--strip-debug"],
        )
        for name in COMPILED_PYTHON
    ]


setup(
    packages=packages(),
    package_dir={"asyncfabric_services": "services"},
    package_data={
        "asyncfabric": ["py.typed"],
        "asyncfabric._native": ["_engine.pyi"],
        "asyncfabric.integrations.nixl": ["pythonpath/nixl/*.py"],  # no package of ours: a folder for PYTHONPATH
        "asyncfabric.integrations.deep_ep": ["pythonpath/deep_ep/*.py"],
        "asyncfabric.moe.gpu": ["_generated/kernels.ptx"],
        "asyncfabric.weights.memory.gpu": ["_generated/kernels.ptx"],
        "asyncfabric_services.dashboard": ["static/*"],
    },
    ext_modules=[*compiled_python(), engine_extension()],
    cmdclass={"build_ext": BuildNative},
)
