"""`python -m twostroke.prefill`: a worker that is sent prompts."""
