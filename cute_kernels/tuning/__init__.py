"""Measuring which schedules are fastest on a GPU: `python -m cute_kernels tune`.

`tuner` is the loop over problems, with whatever measures given to it; `linear` says what there is to measure of weight-
only linear layers; `timing` measures; `command` is the command line. Tables that ship lie in this directory; what they
hold and who reads them: `cute_kernels.runtime.tuned`.
"""
