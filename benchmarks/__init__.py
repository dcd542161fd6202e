"""everyrank beside its peers and its floors: `python -m benchmarks [name ...]`, one module a question.

Every figure is taken beside what it is compared with, in turns within one run, because a machine
that others share is two or three times slower from one minute to the next. So quote ratios; the
microseconds are there to show their size. Nothing here is a test.
"""
