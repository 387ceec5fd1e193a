"""Python: `handlers` says which function an export is.

What a function returns goes to the model; what it raises is one error.
"""

import statistics


def summary(ctx, input):
    """Mean, median and standard deviation of `values`."""
    values = input["values"]
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


handlers = {"summary": summary}
