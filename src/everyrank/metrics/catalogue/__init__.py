"""The catalogue: each metric a few lines of declared states.

`aggregate` numbers as they come, `moving` what came lately, `sketch` quantiles and histograms;
`classification`, `confusion` and `curves` by the `labels` of predictions and targets; `regression` and
`ranking` by `pairs` of arrays; `text` language.
"""
