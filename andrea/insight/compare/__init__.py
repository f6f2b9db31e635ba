"""The comparison of runs: a table, a page and a scaling fit."""
