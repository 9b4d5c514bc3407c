"""Reports: every result as a table (the module of its kind, see `records.Result`), as pictures, and as a page.

Pictures as files need the extra `plot`, pages the extra `report`.
"""
