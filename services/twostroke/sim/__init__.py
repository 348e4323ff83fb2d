"""A fleet in virtual time: the router's policy over modelled engines, links, failures and start-ups."""
