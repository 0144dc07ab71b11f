"""What people see of `sparsebalance plan`: tables on the terminal, pages, and a Chrome trace of a simulated step.

In: a forecast with its recommendation, or the choices of a sweep. Out: the same figures in three forms; every one
says whether its times are analytic or measured.
"""
