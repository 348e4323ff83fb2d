"""The console: a page that shows the cluster and its requests, and what the page asks for."""
