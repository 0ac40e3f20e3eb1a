"""What is fastest for a problem, as measured on the device itself.

    >>> with gemm_ops.tuning("now"):
    ...     y = layer(x)                                   # measures first, once for a class of problems
    $ python -m shape_sweeps tune --shapes suite --epilogues bias_gelu --dtypes bf16 --seconds 300

``context``      :func:`gemm_ops.tuning` and ``GEMM_OPS_TUNE``: measure now, use what is known, or the rules alone.
``classes``      which problems, and which epilogues, one result is for.
``records``      a result, and its form in a file.
``known``        where results are kept: this process, the user's file in the cache folder, the files of the package.
``near``         which result says something of a problem that was not measured.
``advice``       what a call is to do, by a result or else by the rules.
``measuring``    interleaved rounds, which drop the slow ones early; any stopwatch will do.
``contenders``   what is measured: fused kernels, cuBLAS and one kernel, PyTorch by operations; are they right?
``stopwatch``    CUDA graphs that read one copy of the weight after another.
``replay``       such graphs recorded, replayed and timed; how many copies leave the cache.
``tune``         one problem: rank, build, check, measure, keep.

Contract: where nothing is known of a problem, the rules choose (:mod:`gemm_ops.kernels.selection`).  Results are looked
up when a plan is made, at the first call of its kind, and never later.  The package is not called ``tuning``, which is
what the context is called.
"""
