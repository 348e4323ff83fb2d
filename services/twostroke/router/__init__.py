"""The router: requests in, a cluster of workers behind."""
