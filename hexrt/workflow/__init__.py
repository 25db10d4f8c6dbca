"""What a user writes and what becomes of it: `model` (the wire form), `build` (Python builder), `load` (YAML and JSON), `check` (to `TaskGraph`)."""
