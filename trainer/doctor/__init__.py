"""A run's own data and sizes, looked at before it is launched: ``python -m trainer doctor``.

Layout: ``findings`` (what is wrong), ``samples`` (the data), ``schedule`` (anchors, steps, hours),
``policy`` (did the target write the answers?), ``room`` (disk, host memory, GPUs), ``report``.
"""
