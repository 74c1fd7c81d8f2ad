"""Compile the loops with Cython, in Python's limited API: `python setup.py build_ext --inplace`."""

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

setup(
    ext_modules=cythonize(
        [
            Extension(
                ".".join(types.with_suffix("").parts),
                [str(types.with_suffix(".py"))],
                extra_compile_args=[*FLAGS, "-O3"] if types.stem in VECTORS else FLAGS,
                define_macros=LIMITED,
                py_limited_api=True,
            )
            for types in sorted(Path("lmms_stream").rglob("*.pxd"))
        ],
        compiler_directives=DIRECTIVES,
        build_dir="build/cython",
    ),
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
