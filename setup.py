"""Compile the loops with Cython, in Python's limited API: `python setup.py build_ext --inplace`."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

FLAGS = ["-O2", "-g0", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off"]  # plans are equal on every machine
VECTORS = ["token_kernels", "patches", "resize"]  # loops over bytes and tokens become vector instructions
DIRECTIVES = {
    "language_level": 3, "boundscheck": False, "wraparound": False, "initializedcheck": False, "infer_types": True,
    "annotation_typing": False, "auto_pickle": False, "binding": False,
}  # fmt: skip
LIMITED = [("Py_LIMITED_API", "0x030B0000"), ("CYTHON_LIMITED_API", "1")]
ARRAYS = "lmms_stream.arrays"  # Cython's code for arrays, once for all modules

header = Path(sysconfig.get_path("include"), "Python.h")
if not header.exists():
    raise SystemExit(
        f"{header} does not exist, and compiling lmms-stream needs it: install a wheel of lmms-stream, install the "
        "headers of this Python (Debian, Ubuntu: apt install python3-dev), or use a Python with headers, of uv or conda"
    )
compilers = os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"
compiler = next((name for name in compilers if name and shutil.which(name.split()[0])), None)
if compiler != sysconfig.get_config_var("CC"):
    os.environ["CC"] = compiler or f"{sys.executable} -m ziglang cc"
    os.environ["LDSHARED"] = os.environ["CC"] + " -shared"

sources = {ARRAYS: "lmms_stream/arrays.c"} | {
    ".".join(types.with_suffix("").parts): str(types.with_suffix(".py"))
    for types in sorted(Path("lmms_stream").rglob("*.pxd"))
}
setup(
    ext_modules=cythonize(
        [
            Extension(
                name,
                [source],
                extra_compile_args=[*FLAGS, "-O3"] if Path(source).stem in VECTORS else FLAGS,
                define_macros=LIMITED,
                py_limited_api=True,
            )
            for name, source in sources.items()
        ],
        compiler_directives=DIRECTIVES,
        shared_utility_qualified_name=ARRAYS,
        build_dir="build/cython",
        nthreads=os.cpu_count(),
    ),
    setup_requires=[] if compiler else ["ziglang>=0.13"],  # asked for by pip and other front ends of a build
    options={"bdist_wheel": {"py_limited_api": "cp311"}, "build_ext": {"parallel": True}},
)
