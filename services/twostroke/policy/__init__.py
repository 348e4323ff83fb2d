"""Decisions, pure: no gRPC, no asyncio, no clock, no engine. Time and state are passed in, so that the simulator runs
the very same code."""
