"""In: resolved cells. Out: whether each may run, why not, what it needs and what it costs, before a
job.
"""
