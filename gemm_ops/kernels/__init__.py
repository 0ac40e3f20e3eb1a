"""The kernel families: their configurations, and how a configuration and a tree become C++ source.

``config``   a configuration (tile, cluster, schedule, stages) and the fixed table of each family.
``spec``     what one built kernel is: configuration x tree x dtypes x layouts; its key and its source.
``access``   how a kernel reaches its tensors: vectors, alignments.
``families`` which families run on a device, and which of its configurations a family takes for a problem.
``waves``    how long a configuration takes for a problem, and its raster.
``selection`` which family and configuration a problem gets on a device.
``candidates`` all that it could get, best first.
``pad_spec`` the kernel that copies into padded rows.  ``sources``: the files that a kernel is made of.
"""
