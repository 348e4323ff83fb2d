"""One table of requests, asked of one vLLM engine and of two pools, and the answers compared field by field."""
