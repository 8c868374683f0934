"""Measuring which schedules are fastest on a GPU: `python -m cute_kernels tune`.

`tuner` is the loop over problems, with whatever measures given to it; `linear` and `experts` say what there is to
measure of weight-only linear layers and of layers of experts; `timing` measures; `command` is the command line. Tables
that ship lie in this directory; what they hold and who reads them: `cute_kernels.runtime.tuned`.
"""
