"""gRPC servers and channels: the only package that builds either."""
