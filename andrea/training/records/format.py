"""Numbers as people read them: large counts with a unit letter, durations in words."""

from __future__ import annotations

import math

UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def format_number(number: float) -> str:
    """Three digits and a unit: 3.34M, 466M, 1.02B; from 10^15 on, 1.20e+17."""
    if number >= 1e15:
        return f"{number:.2e}"
    rounded = float(f"{number:.3g}")
    unit, name = next((pair for pair in UNITS if rounded >= pair[0]), (1, ""))
    rounded /= unit
    return f"{rounded:g}" if not name else f"{rounded:.{2 - math.floor(math.log10(rounded))}f}{name}"


def format_duration(seconds: float) -> str:
    """One or two units: 45 s, 3 min 05 s, 2 h 10 min, 3 d 4 h."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"


def format_memory(n_byte: float) -> str:
    """0.85 MiB, 12.5 MiB, 3.27 GiB: three digits, in GiB from 1 GiB on."""
    size, unit = (n_byte / 2**30, "GiB") if n_byte >= 2**30 else (n_byte / 2**20, "MiB")
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {unit}"
