"""Which fleet for which load: screens thousands, simulates the best, answers in words."""
