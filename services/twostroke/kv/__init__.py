"""How KV moves between workers."""
