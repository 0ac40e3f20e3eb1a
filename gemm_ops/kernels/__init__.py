"""The kernel families: their configurations, and how a configuration and a tree become C++ source.

``config``   a configuration (tile, cluster, schedule, stages) and the fixed table of each family.
``spec``     what one built kernel is: configuration x tree x dtypes x layouts; its key and its source.
``families`` which problems a family takes, and which of its configurations for which.
``selection`` which family and configuration a problem gets on a device.
"""
