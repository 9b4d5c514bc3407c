"""Reports: every result as a table (the module of its kind, see `records.Result`), as pictures, and as a page.

Pages need the extra `report`.
"""
