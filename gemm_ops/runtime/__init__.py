"""Loading and launching built kernels: the argument block, the shared library, the stream, the launch."""
