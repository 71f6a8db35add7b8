"""One loss a file, each -> (loss, metrics)."""
