"""`python -m twostroke.decode`: a worker that is sent answers to write."""
