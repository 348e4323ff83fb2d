"""The local launcher: `twostroke up`, `status`, `logs` and `down` for a cluster on one machine."""
