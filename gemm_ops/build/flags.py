"""What every kernel is compiled with.  A part of a kernel's identity: see :mod:`gemm_ops.kernels.sources`."""

FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "-Xcudafe=--diag_suppress=esa_on_defaulted_function_ignored",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Xptxas=-v",  # registers and spills, kept in build.json
    "--shared",
)
