"""From a kernel's source to a shared library on disk.

``toolchain``  finds nvcc and the CUTLASS headers, and says what to do where they are missing.
``cache``      the folder of built kernels: content-addressed, safe against crashes and concurrent processes.
``compiler``   runs nvcc for one kernel, or for many at once, through the cache.
``bundle``     packs built kernels into one file, and merges such a file into another machine's cache.
``archive``    reads such a file, whatever is in it.
"""
