"""Huge pages for what an engine on CPU reads in every step."""

from __future__ import annotations

from collections.abc import Mapping


def huge_page_tunables(environment: Mapping[str, str]) -> str:
    """GLIBC_TUNABLES with which a process asks for huge pages for its large allocations, as a model's weights are,
    unless the environment has decided that. A prompt takes a tenth less time so."""
    named = environment.get("GLIBC_TUNABLES", "")
    return named if "glibc.malloc.hugetlb" in named else ":".join(filter(None, [named, "glibc.malloc.hugetlb=1"]))
