"""What only a GPU can show. `make test-gpu` runs these; elsewhere they are skipped, and say so. Speeds are printed and not judged."""
