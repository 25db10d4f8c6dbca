"""One file a step type. `spec` says what an op is; `registry` finds them all, those of other packages by entry point."""
