"""vLLM behind the Engine protocol: the worker side's only imports of vLLM.

vLLM's internals move between releases. The version is pinned, and tests/engine/test_contract.py names what we rely on,
so that an upgrade fails there and loudly.
"""
