"""The comparison of runs: a table, a page, a picture and a scaling fit."""
