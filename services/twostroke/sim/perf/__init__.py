"""The performance model: step times from shapes and hardware sheets, fitted to published measurements."""
