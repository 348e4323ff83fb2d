"""vLLM's front end over the cluster: the router side's only imports of vLLM."""
