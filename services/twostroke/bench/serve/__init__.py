"""Mixed traffic on two cores: one pool, two pools, and who places what where."""
