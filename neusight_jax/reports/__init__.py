"""Reports: every result as a table (the module of its kind, see `results.Result`), pictures and HTML pages.

Pictures and pages need the extra `plot`.
"""
