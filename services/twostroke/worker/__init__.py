"""A worker: one engine behind PrefillService, DecodeService and WorkerService."""
