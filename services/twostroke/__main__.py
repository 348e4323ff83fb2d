"""`python -m twostroke`: the `twostroke` command."""

from twostroke.cli import main

main()
